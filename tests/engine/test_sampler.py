"""The sampler against definitions written out one token at a time, and its independence of the batch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.device.sampler import Sampler, _hash, _spread
from quire.scheduler.request import Request
from quire.scheduler.sampling_params import SamplingParams
from quire.scheduler.step import TERMS, Places, terms_of

VOCABULARY = 12


def request(
    params: SamplingParams,
    *,
    prompt: tuple[int, ...] = (1, 2),
    outputs: tuple[int, ...] = (),
    name: str = "r",
    index: int = 0,
) -> Request:
    """A request about to draw its next token."""
    made = Request(name, np.array((*prompt, *outputs), dtype=np.int32), params, max_tokens=1000, index=index)
    made.num_prompt_tokens = len(prompt)
    return made


def places(requests: Sequence[Request], *, skipped: Sequence[int] | None = None) -> Places:
    """Where each draws its next token, or one that is so many tokens later."""
    outputs = np.array([made.num_outputs for made in requests]) + (0 if skipped is None else np.array(skipped))
    return Places(np.array(list(map(terms_of, requests)), dtype=TERMS), outputs, requests)


def draw(logits: torch.Tensor, *requests: Request, skipped: Sequence[int] | None = None) -> list[int]:
    """The tokens that these draw."""
    found: list[int] = Sampler([]).draw(logits, places(requests, skipped=skipped)).tokens.tolist()
    return found


def draws(params: SamplingParams, logits: list[float], times: int) -> Counter[int]:
    """How often each token is drawn over many positions."""
    return Counter(draw(torch.tensor([logits] * times), *[request(params)] * times, skipped=range(times)))


def allowed(logits: list[float], params: SamplingParams) -> set[int]:
    """Tokens that top-k, then top-p, then min-p leave, by their definitions."""
    scaled = [value / params.temperature for value in logits]
    order = sorted(range(len(logits)), key=lambda token: -scaled[token])
    if params.top_k > 0:
        order = order[: params.top_k]
    weights = [math.exp(scaled[token] - scaled[order[0]]) for token in order]
    total, kept, passed = sum(weights), [], 0.0
    for token, weight in zip(order, weights, strict=True):
        if passed / total >= params.top_p and kept:
            break
        kept.append(token)
        passed += weight
    return {
        token
        for token, weight in zip(order, weights, strict=True)
        if token in kept and weight >= params.min_p * weights[0]
    }


@settings(max_examples=25)
@given(
    logits=st.permutations([0.0, 0.31, 0.77, 1.13, 1.59, 2.03, 2.41, -1.07, -2.3, 0.53, 3.1, 1.87]),
    top_k=st.sampled_from([0, 1, 3, 7]),
    top_p=st.sampled_from([0.05, 0.41, 0.83, 1.0]),
    min_p=st.sampled_from([0.0, 0.1, 0.37]),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
)
def test_only_allowed_tokens_and_all_of_them(
    logits: list[float], top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    """What is drawn over many positions is exactly what the filters leave (the rarest kept ones may not show)."""
    params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature, seed=3)
    found, expected = set(draws(params, logits, 400)), allowed(logits, params)
    assert found <= expected
    scaled = torch.softmax(torch.tensor(logits) / temperature, -1)
    assert {token for token in expected if scaled[token] > 0.05} <= found


def test_frequencies_are_the_probabilities() -> None:
    """Without filters, tokens come as often as the softmax says, within five standard deviations."""
    logits, times = [0.0, 1.0, 2.0, -1.0, 0.5], 20_000
    found = draws(SamplingParams(seed=11), logits, times)
    for token, p in enumerate(torch.softmax(torch.tensor(logits), -1).tolist()):
        assert abs(found[token] - times * p) < 5 * math.sqrt(times * p * (1 - p))


def test_similar_distributions_draw_the_same() -> None:
    """Two requests of one seed agree as often as shared Gumbel noise does, within five standard deviations."""
    times = 20_000
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0, 0.5], [0.6, 0.7, 1.5, -1.2, 1.4]])
    p, q = torch.softmax(logits, -1).tolist()
    agree = sum(1 / sum(max(p[j] / p[i], q[j] / q[i]) for j in range(5)) for i in range(5))
    made = request(SamplingParams(seed=11))
    one, other = (torch.tensor(draw(row.repeat(times, 1), *[made] * times, skipped=range(times))) for row in logits)
    found = int((one == other).sum())
    assert abs(found - times * agree) < 5 * math.sqrt(times * agree * (1 - agree))


def test_hashes_are_the_same_on_every_device() -> None:
    """Arrays and tensors of integers give the same bits, and these are not those of the next row or token."""
    tokens, (low, high) = _spread(3000), torch.randint(-(2**31), 2**31 - 1, (2, 7, 1), dtype=torch.int32)
    bits = _hash(tokens, low.numpy(), high.numpy())
    assert np.array_equal(bits, _hash(torch.from_numpy(tokens), low, high).numpy())
    assert bits.min() >= 0 and len(np.unique(bits)) > 20_990


def test_a_draw_does_not_depend_on_the_batch() -> None:
    """The same request draws the same token alone, in a batch, and in another row of it."""
    params = SamplingParams(seed=5, temperature=1.5)
    rows = torch.randn(8, VOCABULARY, generator=torch.Generator().manual_seed(0))
    requests = [request(params, index=i, name=f"r{i}") for i in range(8)]
    together = draw(rows.clone(), *requests)
    alone = [draw(rows[i : i + 1].clone(), requests[i])[0] for i in range(8)]
    backwards = draw(rows.flip(0), *requests[::-1])[::-1]
    assert together == alone == backwards


KINDS = [
    {},
    {"top_p": 0.9},
    {"top_k": 3},
    {"top_k": 2000, "top_p": 0.6},
    {"min_p": 0.05},
    {"top_p": 0.999},
    {"temperature": 0},
    {"temperature": 2.5, "top_k": 1500},
]


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_neighbours_with_other_filters_do_not_matter(kind: int) -> None:
    """A draw is the same alone and beside any other kind of request, with ties among the logits."""
    rows = torch.randn(40, 3000, generator=torch.Generator().manual_seed(kind)).bfloat16().float()
    for place, row in enumerate(rows):
        made = request(SamplingParams(seed=place, **KINDS[kind]))  # type: ignore[arg-type]
        alone = draw(row[None].clone(), made)[0]
        others = [request(SamplingParams(seed=1, **other)) for other in KINDS]  # type: ignore[arg-type]
        together = draw(row.repeat(len(KINDS) + 1, 1), *others, made)[-1]
        assert together == alone


def test_index_and_seed_and_position_matter() -> None:
    """Sequences of one request differ, and so do seeds and positions."""
    flat = torch.zeros(1, 1000)

    def drawn(**settings: Any) -> int:
        made = request(SamplingParams(seed=settings.get("seed", 1)), index=settings.get("index", 0))
        return draw(flat.clone(), made, skipped=[settings.get("place", 0)])[0]

    assert len({drawn(index=i) for i in range(5)}) == 5
    assert len({drawn(seed=i) for i in range(5)}) == 5
    assert len({drawn(place=i) for i in range(5)}) == 5
    assert drawn(seed=2) == drawn(seed=2)


def test_greedy_takes_the_highest_among_sampled_rows() -> None:
    """Greedy and sampled rows share a batch."""
    rows = torch.tensor([[0.0, 5.0, 1.0], [9.0, 0.0, 0.0], [0.0, 0.0, 7.0]])
    params = [SamplingParams(temperature=0), SamplingParams(seed=1), SamplingParams(temperature=0)]
    assert draw(rows, *[request(p, prompt=(1,)) for p in params]) == [1, 0, 2]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(temperature=0, repetition_penalty=2.0), [2.0, 1.0, -2.0, 1.5]),
        (SamplingParams(temperature=0, presence_penalty=0.5), [4.0, 1.0, -1.5, 2.5]),
        (SamplingParams(temperature=0, frequency_penalty=0.5), [4.0, 1.0, -1.5, 2.0]),
        (SamplingParams(temperature=0, logit_bias={1: 10.0}), [4.0, 11.0, -1.0, 3.0]),
    ],
)
def test_adjustments(params: SamplingParams, expected: list[float]) -> None:
    """Repetition counts the prompt (token 0) and the outputs (2, 3, 3); presence and frequency the outputs alone."""
    row = torch.tensor([[4.0, 1.0, -1.0, 3.0]])
    draw(row, request(params, prompt=(0,), outputs=(2, 3, 3)))
    assert row[0].tolist() == pytest.approx(expected)


def test_min_tokens_holds_the_end_back() -> None:
    """The end token cannot be drawn before `min_tokens` have been."""
    params = SamplingParams(temperature=0, min_tokens=2, max_tokens=9)
    for outputs, expected in (((), 0), ((0,), 0), ((0, 0), 3)):
        row = torch.tensor([[1.0, 0.0, 0.0, 5.0]])
        place = places([request(params, prompt=(1,), outputs=outputs)])
        assert Sampler([3]).draw(row, place).tokens.item() == expected


def test_logprobs_are_of_the_model_not_of_the_draw() -> None:
    """Reported values ignore temperature and penalties; ranks count from 1; the most likely come first."""
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    params = SamplingParams(temperature=0.7, seed=1, logprobs=2, presence_penalty=2.0)
    made = request(params, prompt=(1,), outputs=(1,))
    drawn = Sampler([]).draw(logits.clone(), places([made]))
    found = drawn.logprobs()[0]
    truth = torch.log_softmax(logits[0], -1)
    token = int(drawn.tokens.item())
    assert found.logprob == pytest.approx(truth[token].item())
    assert found.rank == 1 + int((truth > truth[token]).sum())
    assert found.top_ids == [1, 3]
    assert found.top_logprobs == pytest.approx(truth[[1, 3]].tolist())


def test_wide_vocabulary_falls_back_to_a_whole_sort() -> None:
    """A flat distribution over more candidates than the shortcut holds: top-p still reaches its share of them."""
    times, size = 400, 2500
    requests = [request(SamplingParams(seed=2, top_p=0.9))] * times
    logits = torch.linspace(0.01, 0, size).repeat(times, 1)
    tokens = draw(logits, *requests, skipped=range(times))
    assert max(tokens) > 0.8 * size
    assert max(tokens) <= 0.91 * size


def test_a_seed_draws_what_it_always_drew() -> None:
    """Tokens of a seed do not change between versions: these were drawn by version 0.6."""
    rows = torch.randn(6, 500, generator=torch.Generator().manual_seed(1))
    params = [
        SamplingParams(seed=7),
        SamplingParams(seed=-3, temperature=0.7),
        SamplingParams(top_p=0.8),
        SamplingParams(seed=2**64 - 1, top_k=9),
        SamplingParams(temperature=0),
        SamplingParams(min_p=0.1),
    ]
    requests = [request(p, index=i % 3) for i, p in enumerate(params)]
    for arrival, made in enumerate(requests):
        made.arrival = arrival
    found = [Sampler([], seed).draw(rows.clone(), places(requests, skipped=[3] * 6)).tokens.tolist() for seed in (0, 9)]
    assert found == [[439, 371, 11, 227, 5, 26], [439, 371, 355, 227, 5, 456]]
