"""A draft model on the pages of its target: the same tokens, all drafts right where both are one model, and no page
without what the draft has computed."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from quire.cache.running import Lengths, Rows
from quire.counters import plain
from quire.engine.core import EngineCore
from quire.engine.device.sampler import Drawn, Sampler
from quire.engine.messages import EngineRequest, prompt_bytes
from quire.errors import UnsupportedModel
from quire.models.hf import LoadedModel
from quire.scheduler.sampling_params import SamplingParams
from quire.scheduler.step import Places
from quire.spec.events import Namespace
from quire.spec.ids import Tier
from quire.spec.pages import pages_for
from tests.changes import DRAFTS, TIERS, slow_unless_changed
from tests.covering import covering, few
from tests.engine.running import core_for, run, tiered_core, tight_core
from tests.engine.test_hybrid_tokens import GREEDY, PROMPTS, case_of
from tests.tiny_models import VOCAB_SIZE, build_tiny, save_tiny

STEPS = 4
DRAFT = {"method": "draft_model", "model": "draft", "num_speculative_tokens": STEPS}
BOUNDS = {"max_model_len": 256, "max_running_requests": 8}
NEW_TOKENS = 40
PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True),
    "seeded": SamplingParams(temperature=0.9, seed=3, top_p=0.9, max_tokens=NEW_TOKENS, ignore_eos=True),
    "penalties": SamplingParams(
        temperature=0.3, seed=2, repetition_penalty=1.1, frequency_penalty=0.2, max_tokens=NEW_TOKENS, min_tokens=20
    ),
}
PAGES = (1, 4, 16, 64)


@cache
def tiny_target() -> LoadedModel:
    return LoadedModel(build_tiny("llama_gqa"), name="llama_gqa")


@cache
def undrafted(target: LoadedModel, page_size: int, params: str) -> list[list[int]]:
    """What it generates without drafts."""
    return run(core_for(target, page_size=page_size, **BOUNDS), PROMPTS, PARAMS[params])


@pytest.fixture
def target() -> LoadedModel:
    return tiny_target()


@pytest.fixture(scope="module")
def small() -> LoadedModel:
    """Another shape, another number of heads, other weights."""
    return LoadedModel(build_tiny("qwen3", num_hidden_layers=1), name="small")


def ungoverned(core: EngineCore) -> dict[str, Any]:
    """From now on, every request drafts as far as there is room. The statistics so far."""
    assert core.speculator is not None
    core.speculator._governor = None
    return plain(core.speculator.counted())


def check_right(core: EngineCore) -> None:
    """All drafts were right, and as many were made as a request may have."""
    assert core.speculator is not None
    found = plain(core.speculator.counted())
    assert found["draft_tokens"] > found["drafts"] > 0
    assert found["accepted_tokens"] == found["draft_tokens"]
    assert all(frames["private"] == 0 for frames in core.statistics()["frames"].values())


def check_some_right(core: EngineCore, *, accepted: bool = True) -> None:
    """Some drafts were wrong, and with `accepted` some were right."""
    assert core.speculator is not None
    found = plain(core.speculator.counted())
    assert found["accepted_tokens"] < found["draft_tokens"] and (found["accepted_tokens"] > 0 or not accepted)
    assert all(frames["private"] == 0 for frames in core.statistics()["frames"].values())


def check_drafts_for_itself(target: LoadedModel, page_size: int, params: str) -> None:
    """Acceptance of all: the draft has computed every token before, cold, warm, and behind prompts in chunks."""
    expected = undrafted(target, page_size, params)
    core = core_for(
        target, page_size=page_size, draft=target, speculative_config=DRAFT, max_num_batched_tokens=23, **BOUNDS
    )
    ungoverned(core)
    for turn in ("cold", "warm"):
        assert run(core, PROMPTS, PARAMS[params], turn) == expected
    check_right(core)


@covering(page_size=PAGES, params=sorted(PARAMS))
def test_a_model_drafts_for_itself(target: LoadedModel, page_size: int, params: str) -> None:
    check_drafts_for_itself(target, page_size, params)


@slow_unless_changed(*DRAFTS)
@covering(page_size=PAGES, params=["greedy", "seeded"])
def test_a_smaller_model_drafts(target: LoadedModel, small: LoadedModel, page_size: int, params: str) -> None:
    """Of other weights and another shape: few drafts are right, and the tokens are the same."""
    expected = undrafted(target, page_size, params)
    core = core_for(target, page_size=page_size, draft=small, speculative_config=DRAFT, **BOUNDS)
    ungoverned(core)
    for turn in ("cold", "warm"):
        assert run(core, PROMPTS, PARAMS[params], turn) == expected
    check_some_right(core)


@slow_unless_changed(*DRAFTS)
@pytest.mark.parametrize(
    ("name", "page_size"), [("gemma3_text", 4), ("falcon_h1", 16), ("qwen3_next", 1), ("deepseek_v3", 64)]
)
def test_targets_of_other_kinds(small: LoadedModel, name: str, page_size: int) -> None:
    """Windows, states and latents beside the pages that the draft shares: ample, and starved."""
    model, expected = case_of(name)
    settings = {"draft": small, "page_size": page_size, "speculative_config": DRAFT}
    kinds = [group.reach.kind for group in model.spec.groups(page_size)]
    tight = tight_core(
        model,
        num_tokens=(pages_for(80, page_size) + 8) * page_size,
        window_tokens=2 * max(44, page_size),
        max_num_batched_tokens=17,
        max_running_requests=3,
        max_mamba_cache_size=4 if "state" in kinds else None,
        **settings,
    )
    for core in (core_for(model, **settings, **BOUNDS), tight):
        ungoverned(core)
        for turn in ("cold", "warm"):
            assert run(core, PROMPTS, GREEDY, turn) == expected
        check_some_right(core, accepted=False)


def test_starved(target: LoadedModel) -> None:
    """Preempted with drafts, and evicted between."""
    expected = undrafted(target, 4, "seeded")
    core = tight_core(
        target,
        num_tokens=132,
        page_size=4,
        draft=target,
        max_num_batched_tokens=17,
        max_running_requests=3,
        speculative_config=DRAFT,
    )
    ungoverned(core)
    for turn in range(2):
        assert run(core, PROMPTS, PARAMS["seeded"], f"turn{turn}") == expected
    found = core.statistics()
    assert found["preemptions"] > 0 and found["evicted_pages"] > 0 and found["hit_tokens"] > 0
    check_right(core)


def check_tiers(model: LoadedModel, draft: Any, config: dict[str, Any], params: SamplingParams, page_size: int) -> None:
    """Pages that come back from the host bring what the draft has computed."""
    expected = run(core_for(model, page_size=page_size, **BOUNDS), PROMPTS, params)
    core = tiered_core(
        model,
        num_tokens=144,
        page_size=page_size,
        draft=draft,
        max_num_batched_tokens=32,
        max_running_requests=2,
        speculative_config=config,
    )
    try:
        ungoverned(core)
        for turn in range(3):
            assert run(core, PROMPTS, params, f"turn{turn}") == expected
        assert core.statistics()["tiers"]["host_hit_tokens"] > 0
        check_right(core)
    finally:
        core.close()


@slow_unless_changed(*DRAFTS, *TIERS)
@pytest.mark.parametrize("page_size", few([4, 1, 16], 1))
def test_tiers_move_both(target: LoadedModel, page_size: int) -> None:
    check_tiers(target, target, DRAFT, PARAMS["seeded"], page_size)


class Sometimes:
    """A governor that lets few steps draft, and few drafts."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(5)

    def rests(self, num_requests: int) -> bool:
        return not num_requests

    def pays(self, *_: Any) -> bool:
        return True

    def limits(self, rows: Rows, serials: Lengths) -> Lengths:
        del serials
        return self._random.choice([0, 0, 0, 1, STEPS], len(rows))

    def settled(self, *_: Any) -> None: ...

    def measured(self, *_: Any) -> None: ...

    def counters(self) -> SimpleNamespace:
        return SimpleNamespace()


class Mistaken:
    """A sampler that draws another token now and then."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._random = np.random.default_rng(6)

    def draw(self, logits: torch.Tensor, places: Places) -> Drawn:
        drawn = self._sampler.draw(logits, places)
        wrong = torch.from_numpy(self._random.random(len(drawn.tokens)) < 0.4)
        return Drawn(torch.where(wrong, (drawn.tokens + 1) % VOCAB_SIZE, drawn.tokens))

    def scores(self, logits: torch.Tensor, places: Places) -> torch.Tensor:
        scores = self._sampler.scores(logits, places)
        return scores.roll(1, dims=-1) if self._random.random() < 0.4 else scores


def check_pages_are_complete(target: LoadedModel, page_size: int, config: dict[str, Any] = DRAFT) -> None:
    """Whether steps draft or not, and drafts are right or not, each cached page has what both models computed: here,
    they are one."""
    core = core_for(
        target, page_size=page_size, draft=target, speculative_config=config, max_num_batched_tokens=23, **BOUNDS
    )
    assert core.speculator is not None
    core.speculator._governor = Sometimes()  # type: ignore[assignment]
    drafter = core.drafter
    assert drafter is not None
    drafter._sampler = Mistaken(drafter._sampler)  # type: ignore[assignment]
    outputs = run(core, PROMPTS, PARAMS["seeded"])
    found = plain(core.speculator.counted())
    assert 0 < found["accepted_tokens"] < found["draft_tokens"]
    assert 0 < found["drafts"] < core.statistics()["output_tokens"] / 2
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        tokens = np.array([*prompt, *output], dtype=np.int32)
        pages = core.cache.tree.match(Namespace(), tokens).pages
        assert len(pages) >= (len(tokens) - 1) // page_size
        frames = core.cache.parts.frames.of(Tier.DEVICE, 0).frame[pages]
        for field, tensor in core.pools[0].tensors:
            half = len(field.layers) // 2
            assert field.layers == tuple(range(2 * half))
            torch.testing.assert_close(tensor[:half, frames], tensor[half:, frames], atol=1e-4, rtol=1e-4)


@slow_unless_changed(*DRAFTS)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_cached_pages_are_complete(target: LoadedModel, page_size: int) -> None:
    check_pages_are_complete(target, page_size)


@slow_unless_changed(*DRAFTS)
@pytest.mark.parametrize("page_size", [4, 16])
def test_as_much_is_reused_as_without(target: LoadedModel, small: LoadedModel, page_size: int) -> None:
    """Conversations that go on: hits are those of an engine without drafts."""
    hits = []
    for more in ({}, {"draft": small, "speculative_config": DRAFT}):
        core = core_for(target, page_size=page_size, **BOUNDS, **more)
        prompts = PROMPTS
        for turn in range(3):
            outputs = run(core, prompts, PARAMS["greedy"], f"turn{turn}")
            prompts = [[*prompt, *output, 7, 8, 9] for prompt, output in zip(prompts, outputs, strict=True)]
        hits.append(core.statistics()["hit_tokens"])
    assert hits[1] >= 0.99 * hits[0] > 0


def test_its_layers_are_planned(target: LoadedModel, small: LoadedModel) -> None:
    """A page has the fields of both, with real shapes, and pages of another draft are not found."""
    core = core_for(target, draft=small, speculative_config=DRAFT, **BOUNDS)
    own, drafts = (model.spec.groups(16)[0].layout.bytes_per_frame for model in (target, small))
    (group,) = core.plan.groups
    assert group.layout.bytes_per_frame == own + drafts
    assert core.statistics()["weight_bytes"] == target.weight_bytes + small.weight_bytes
    other = LoadedModel(build_tiny("qwen3", num_hidden_layers=1, seed=1), name="other")
    identities = {core_for(target, draft=draft, speculative_config=DRAFT)._identity(0) for draft in (small, other)}
    assert len(identities) == 2


@pytest.mark.parametrize(
    ("architecture", "changed", "reason"),
    [
        ("llama_gqa", {"vocab_size": 128}, "vocabulary of 128"),
        ("gemma3_text", {}, "windows"),
        ("llama_gqa", {"max_position_embeddings": 128}, "context of 128"),
    ],
)
def test_drafts_that_cannot_run_are_refused(
    target: LoadedModel, architecture: str, changed: dict[str, Any], reason: str
) -> None:
    draft = case_of(architecture)[0] if architecture == "gemma3_text" else None
    draft = draft or LoadedModel(build_tiny(architecture, **changed), name="draft")
    with pytest.raises(UnsupportedModel, match=reason):
        core_for(target, draft=draft, speculative_config=DRAFT, **BOUNDS)


def test_it_is_loaded_by_its_path(tmp_path: Path, target: LoadedModel) -> None:
    """In the dtype of its target, before which its configuration was read."""
    folder = save_tiny("llama_gqa", tmp_path / "draft", num_hidden_layers=1)
    expected = undrafted(target, 16, "greedy")
    core = core_for(target, speculative_config={**DRAFT, "model": str(folder)}, **BOUNDS)
    ungoverned(core)
    assert run(core, PROMPTS, PARAMS["greedy"]) == expected
    assert core.draft is not None and core.draft.spec.dtype is target.spec.dtype


def test_no_log_probabilities_of_drafts_are_computed(target: LoadedModel, small: LoadedModel) -> None:
    """Those of the target's draws are the same as without drafts."""
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=1)
    drawn: list[Drawn] = []
    found = []
    for settings in ({}, {"draft": small, "speculative_config": DRAFT}):
        core = core_for(target, **settings, **BOUNDS)
        if core.drafter is not None:
            ungoverned(core)
            draw = core.drafter._sampler.draw
            core.drafter._sampler.draw = lambda *args, draw=draw: drawn.append(draw(*args)) or drawn[-1]  # type: ignore[method-assign]
        core.add(EngineRequest(request_id="a", prompt=prompt_bytes(PROMPTS[0]), params=params))
        outputs = []
        while core.has_work():
            outputs += [said for each in core.step().noted for said in each.logprobs or ()]
        found.append([said.logprob for said in outputs])
    assert drawn and not any(each.reported for each in drawn)
    assert found[0] == pytest.approx(found[1], abs=1e-4) and len(found[0]) == 10
