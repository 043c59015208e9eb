"""Counts of tokens that are kept while a sequence grows, against counts of all of it."""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.device.sampler import Sampler
from quire.engine.device.token_counts import TokenCounts
from quire.scheduler.request import KNOWN
from quire.scheduler.sampling_params import SamplingParams
from tests.engine.test_sampler import places, request


def as_counter(counts: TokenCounts) -> Counter[int]:
    assert np.all(np.diff(counts.ids) > 0)
    return Counter(dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True)))


def check_counts(text: list[int], ends: list[int]) -> None:
    """At each end, also a smaller one than before, and with some tokens ahead, which change nothing."""
    tokens, counts = np.array(text, dtype=np.int32), TokenCounts()
    for end in ends:
        counts.advance(tokens[:end])
        assert as_counter(counts.ahead(tokens)) == Counter(text)
        assert as_counter(counts) == Counter(text[:end])


@settings(max_examples=60)
@given(st.data())
def test_counts_are_those_of_the_whole_sequence(data: st.DataObject) -> None:
    text = data.draw(st.lists(st.integers(0, 9), max_size=60))
    check_counts(text, data.draw(st.lists(st.integers(0, len(text)), max_size=12)))


def test_penalties_from_step_to_step_are_those_of_a_new_sampler() -> None:
    """With a draft behind each token, which the next step replaces, and with tokens that come back."""
    params = SamplingParams(temperature=0, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3)
    outputs, drafts = [3, 5, 3, 9, 5, 5, 0], [1, 3, 2, 5, 9, 3, 4]
    made, sampler = request(params, prompt=(3, 3, 7), outputs=(0,) * 9), Sampler([])
    for step in range(len(outputs)):
        made.tokens[3 : 4 + step] = outputs[: step + 1]
        made.tokens[4 + step] = drafts[step]
        rows = torch.randn(2, 10, generator=torch.Generator().manual_seed(step))
        kept, fresh = rows.clone(), rows.clone()
        where = places([made, made], skipped=[step + 1 - made.num_outputs, step + 2 - made.num_outputs])
        sampler.draw(kept, where)
        Sampler([]).draw(fresh, where)
        assert torch.equal(kept, fresh) and not torch.equal(kept, rows)


def test_a_sampler_of_drafts_does_not_keep_them() -> None:
    """It has one row of a request in a call, some behind tokens that the request does not have."""
    params = SamplingParams(temperature=0, repetition_penalty=1.3)
    made, sampler = request(params, prompt=(3, 7), outputs=(4,)), Sampler([])
    made._tokens = tokens = np.array([3, 7, 4, 5, 0], dtype=np.int32)

    def penalised(ahead: int) -> set[int]:
        rows = torch.ones(1, 10)
        sampler.draw(rows, places([made], skipped=[ahead]))
        return set(np.flatnonzero(rows[0].numpy() != 1).tolist())

    assert penalised(1) == {3, 7, 4, 5}
    tokens[3], made._lengths[KNOWN] = 6, 4
    assert penalised(0) == {3, 7, 4, 6}
