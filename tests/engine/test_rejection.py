"""Rejection sampling of drafts: tokens have the target's distribution, and as many drafts are accepted as can be."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch

from quire.counters import plain
from quire.engine.core import EngineCore
from quire.engine.device.sampler import Proposal, Sampler
from quire.models.draft_head import LoadedHead
from quire.models.hf import LoadedModel
from quire.scheduler.request import Request
from quire.scheduler.sampling_params import SamplingParams
from tests.changes import DRAFTS, slow_unless_changed
from tests.engine.drafted import CHAIN, REPEATING
from tests.engine.running import core_for, run
from tests.engine.test_draft_head import bigram_target, rigged_head
from tests.engine.test_draft_model import BOUNDS, DRAFT, PARAMS, ungoverned
from tests.engine.test_sampler import places, request
from tests.tiny_models import build_tiny

RARE = 5.0  # standard deviations: 3 in 10 million
TIMES = 20_000
TARGET = [0.0, 1.0, 2.0, -1.0, 0.5, 2.3, -0.4, 1.4]
OFTEN_RIGHT = [0.6, 0.7, 1.5, -1.2, 1.4, 2.5, -2.0, 1.1]
PROMPT = [5, 9, 3, 7, 1]
STANDARD = {"rejection_sample_method": "standard"}


def chi_square_limit(freedom: int) -> float:
    """What chi-square exceeds as rarely as a normal number exceeds `RARE`, by Wilson and Hilferty."""
    if not freedom:
        return 0.0
    return freedom * (1 - 2 / (9 * freedom) + RARE * math.sqrt(2 / (9 * freedom))) ** 3


def check_frequencies(found: npt.NDArray[Any], probabilities: npt.NDArray[Any]) -> None:
    """Counts of a draw with these probabilities."""
    likely = probabilities > 0
    assert not found[~likely].any()
    expected = found.sum() * probabilities[likely]
    assert ((found[likely] - expected) ** 2 / expected).sum() <= chi_square_limit(int(likely.sum()) - 1)


def exact(logits: Sequence[float] | torch.Tensor, made: Request) -> npt.NDArray[Any]:
    """The distribution of a draw."""
    sampler = Sampler([], keeps_probabilities=True)
    drawn = sampler.draw(torch.as_tensor(logits)[None].clone(), places([made]))
    assert drawn.probabilities is not None
    found: npt.NDArray[Any] = drawn.probabilities[1][0].double().numpy()
    return found


def check_a_draw(params: SamplingParams) -> None:
    """Draws after drafts of another distribution are distributed as without, and drafts accepted as often as can be."""
    made, every = [request(params)] * TIMES, np.arange(TIMES)
    there = places(made, skipped=every.tolist())
    drafts = Sampler([], keeps_probabilities=True).draw(torch.tensor([OFTEN_RIGHT] * TIMES), there)
    assert drafts.probabilities is not None
    proposal = Proposal(every, drafts.tokens.numpy(), drafts.probabilities[1])
    tokens = Sampler([]).draw(torch.tensor([TARGET] * TIMES), there, [proposal]).tokens
    target, draft = exact(TARGET, made[0]), exact(OFTEN_RIGHT, made[0])
    check_frequencies(np.bincount(tokens.numpy(), minlength=len(TARGET)), target)
    right, chance = int((tokens == drafts.tokens).sum()), float(np.minimum(target, draft).sum())
    assert abs(right - TIMES * chance) <= RARE * math.sqrt(TIMES * chance * (1 - chance))


CASES = [
    SamplingParams(seed=11),
    SamplingParams(seed=1, temperature=0.4),
    SamplingParams(seed=2, top_k=4, temperature=1.5),
    SamplingParams(seed=3, top_p=0.8),
    SamplingParams(seed=4, min_p=0.2, top_p=0.95),
    SamplingParams(seed=5, top_k=1),
]


@pytest.mark.parametrize("params", CASES)
def test_a_draw_after_a_draft(params: SamplingParams) -> None:
    check_a_draw(params)


def test_other_rows_of_the_batch_do_not_matter() -> None:
    """Greedy rows, rows without a draft and rows with one share a batch, and each draws what it draws alone."""
    params = [SamplingParams(seed=at, temperature=at % 3) for at in range(12)]
    made = [request(each) for each in params]
    logits = torch.randn(12, 50, generator=torch.Generator().manual_seed(2))
    draws = np.array([at for at in range(12) if at % 3 and at % 4])
    probabilities = torch.softmax(torch.randn(len(draws), 50, generator=torch.Generator().manual_seed(3)), -1)
    tokens = probabilities.argmax(-1).numpy()
    together = Sampler([]).draw(logits.clone(), places(made), [Proposal(draws, tokens, probabilities)]).tokens.tolist()
    for at, token in enumerate(together):
        own = (draws == at).nonzero()[0]
        proposals = [Proposal(np.zeros(1, np.intp), tokens[own], probabilities[own])] if len(own) else []
        assert Sampler([]).draw(logits[at : at + 1].clone(), places([made[at]]), proposals).tokens.tolist() == [token]
    plain = Sampler([]).draw(logits.clone(), places(made)).tokens.tolist()
    assert all(together[at] == plain[at] for at in range(12) if at not in draws)


def noisy(model: torch.nn.Module, amount: float) -> torch.nn.Module:
    """Its weights with a little noise: a draft that is often right."""
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for weight in model.parameters():
            weight += weight.std() * amount * torch.randn(weight.shape, generator=generator)
    return model


def drafted_by_a_model(folder: Path) -> tuple[LoadedModel, LoadedModel, str]:
    del folder
    draft = LoadedModel(noisy(build_tiny("llama_gqa"), 0.1), name="noisy", check=False)
    return LoadedModel(build_tiny("llama_gqa"), name="llama_gqa"), draft, "draft_model"


def drafted_by_a_head(folder: Path) -> tuple[LoadedModel, LoadedHead, str]:
    target = bigram_target()
    head = rigged_head(target, folder)
    noisy(head._head, 0.1)
    return target, head, "eagle"


def sequences_of(core: EngineCore, params: SamplingParams, times: int) -> Counter[tuple[int, ...]]:
    """How often each output is drawn, over as many seeds."""
    many = [msgspec.structs.replace(params, seed=seed) for seed in range(times)]
    return Counter(map(tuple, run(core, [PROMPT] * times, many)))


@slow_unless_changed(*DRAFTS)
@pytest.mark.parametrize("drafted", [drafted_by_a_head, pytest.param(drafted_by_a_model, marks=pytest.mark.slow)])
def test_outputs_of_an_engine(drafted: Callable[[Path], Any], tmp_path: Path) -> None:
    """Whole outputs have the probability that the target gives them, penalties and filters among it."""
    target, draft, method = drafted(tmp_path)
    params = SamplingParams(
        temperature=0.8, top_k=3, max_tokens=4, ignore_eos=True, repetition_penalty=1.2, presence_penalty=0.3
    )
    config = {**DRAFT, "method": method, "num_speculative_tokens": 2, **STANDARD}
    core = core_for(target, draft=draft, page_size=4, speculative_config=config, max_running_requests=64)
    ungoverned(core)
    found = sequences_of(core, params, 3000)
    assert core.speculator is not None
    said = plain(core.speculator.counted())
    assert 0.2 < said["accepted_tokens"] / said["draft_tokens"] < 0.98

    chances: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(params.max_tokens or 0):
        chances = {
            (*tokens, token): chance * float(own[token])
            for tokens, chance in chances.items()
            for own in [after(target, tokens, params)]
            for token in own.nonzero()[0].tolist()
        }
    assert found.keys() <= chances.keys() and len(chances) == 81
    check_frequencies(np.array([found[each] for each in chances]), np.array([*chances.values()]))


def after(target: LoadedModel, outputs: tuple[int, ...], params: SamplingParams) -> npt.NDArray[Any]:
    """The distribution of the token behind these."""
    logits = target.plain_logits(torch.tensor([*PROMPT, *outputs]))[-1]
    return exact(logits, request(params, prompt=tuple(PROMPT), outputs=outputs))


@slow_unless_changed(*DRAFTS)
def test_a_run_can_be_repeated() -> None:
    """With the same drafts a seed draws the same tokens, whatever the page size and the neighbours."""
    target, draft, method = drafted_by_a_model(Path())
    config = {**DRAFT, "method": method, **STANDARD}
    found = []
    for page_size in (1, 16):
        core = core_for(target, draft=draft, page_size=page_size, speculative_config=config, **BOUNDS)
        ungoverned(core)
        found += [run(core, REPEATING, PARAMS["seeded"], turn) for turn in ("cold", "warm")]
        found.append([run(core, [prompt], PARAMS["seeded"], f"alone{prompt}")[0] for prompt in REPEATING])
        assert all(frames["private"] == 0 for frames in core.statistics()["frames"].values())
    assert all(each == found[0] for each in found)
    assert found[0] != run(core_for(target, **BOUNDS), REPEATING, PARAMS["seeded"])


@slow_unless_changed(*DRAFTS)
def test_greedy_requests_and_n_grams_draw_what_they_draw_without() -> None:
    """A draft that is certain is accepted while it equals the draw: that is rejection sampling too."""
    target, draft, method = drafted_by_a_model(Path())
    greedy = core_for(target, draft=draft, speculative_config={**DRAFT, "method": method, **STANDARD}, **BOUNDS)
    n_grams = core_for(target, speculative_config={**CHAIN, **STANDARD}, **BOUNDS)
    for core, params in ((greedy, "greedy"), (n_grams, "greedy"), (n_grams, "seeded")):
        ungoverned(core)
        expected = run(core_for(target, **BOUNDS), REPEATING, PARAMS[params])
        assert run(core, REPEATING, PARAMS[params], params) == expected
        assert core.speculator is not None and core.speculator.counted().accepted_tokens > 0
