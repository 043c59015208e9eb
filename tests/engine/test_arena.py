"""Engines whose two groups share one range of bytes: frames move while requests run, and no token is another one."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from quire.cache.statistics import CacheStatistics
from quire.canary.canary import Canary
from quire.engine.config import engine_config
from quire.engine.core import EngineCore
from quire.engine.device.runner import ModelRunner
from quire.scheduler.sampling_params import SamplingParams
from tests.changes import CORE, DEVICE, TIERS, in_turns, slow_unless_changed
from tests.engine.running import run

MODELS = {"quire-bundled-window": "3500KiB", "quire-bundled-recurrent": "2MiB"}
"""Memory for a few requests, which swing between many short prompts and few long ones."""

WATCHED = (*CORE, *DEVICE, "src/quire/canary/", "src/quire/plan/", "src/quire/spec/arena")
WATCHED += (*TIERS, "src/quire/loop/", "tests/engine/test_arena")
CASES = [(model, overlap != (at == 1)) for at, model in enumerate(MODELS) for overlap in (False, True)]
"""Models, and whether steps overlap: each turn has both models."""


def prompts(seed: int = 5) -> list[list[int]]:
    random = np.random.default_rng(seed)
    shared = random.integers(1000, size=60).tolist()
    sizes = [*random.integers(20, 90, 10), 500, *random.integers(20, 90, 8), 420]
    return [shared * (at % 3 == 0) + random.integers(1000, size=int(size)).tolist() for at, size in enumerate(sizes)]


def params() -> list[SamplingParams]:
    return [SamplingParams(max_tokens=6 + at % 20, temperature=0.0, ignore_eos=True) for at in range(len(prompts()))]


def engine(model: str, memory: str, **settings: Any) -> EngineCore:
    """An engine in float32, whose tokens do not depend on what else runs."""
    return EngineCore(
        engine_config(
            model=model,
            arena=True,
            kv_memory=memory,
            dtype="float32",
            target_itl_ms="off",
            max_running_requests=8,
            max_num_batched_tokens=256,
            checkpoint_interval=64,
            **settings,
        )
    )


@cache
def expected(model: str, seed: int = 5) -> list[list[int]]:
    core = engine(model, "64MiB", enable_prefix_caching=False)
    found = run(core, prompts(seed), params())
    assert core.cache.statistics().moved_frames == 0
    core.close()
    return found


def served(model: str, **settings: Any) -> CacheStatistics:
    """Serve the prompts twice, and close the engine."""
    core = engine(model, MODELS[model], **settings)
    assert core.plan.arena is not None
    for name in ("cold", "warm"):
        assert run(core, prompts(), params(), name) == expected(model)
    found, statistics = core.cache.statistics(), core.statistics()
    assert not statistics["canary"]["found_pages"]
    core.close()
    return found


@pytest.mark.parametrize("case", in_turns(CASES, 2, *WATCHED), ids=str)
def test_frames_move_and_tokens_stay(case: tuple[str, bool]) -> None:
    """The canary looks at each cached frame after each step."""
    model, overlap = case
    found = served(model, overlap=overlap, canary="all")
    assert found.moved_frames > 5 and sum(frames.dropped for frames in found.frames.values()) > 0


@pytest.mark.parametrize("case", in_turns(CASES, 2, *WATCHED), ids=str)
def test_frames_move_beside_loads_and_saves(case: tuple[str, bool]) -> None:
    """Pages leave the arena for host memory and come back, while others move."""
    model, overlap = case
    core = engine(model, MODELS[model], overlap=overlap, canary="all", host_memory="64MiB", load="always")
    for name, seed in (("cold", 5), ("other", 6), ("warm", 5)):
        assert run(core, prompts(seed), params(), name) == expected(model, seed)
    core.audit()
    found, tiers = core.cache.statistics(), core.statistics()["tiers"]
    assert found.moved_frames > 5 and tiers["saved_frames"] > 50 and tiers["loaded_frames"] > 3
    assert tiers["host_hit_tokens"] > 0 and not tiers["failed_moves"]
    assert not core.statistics()["canary"]["found_pages"]
    core.close()


def test_frames_that_cannot_be_copied_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device without memory for copies: requests wait for others, and no token is another one."""
    model = "quire-bundled-window"
    core, failed = engine(model, MODELS[model], canary="all"), 0
    move = core.backend.moves.move

    def now_and_then(pieces: Any, sources: Any, targets: Any) -> None:
        nonlocal failed
        failed += 1
        if failed % 3:
            move(pieces, sources[:1], targets[:1])  # a part of it
            raise torch.OutOfMemoryError("no memory")
        move(pieces, sources, targets)

    monkeypatch.setattr(core.backend.moves, "move", now_and_then, raising=False)
    assert run(core, prompts(), params()) == expected(model)
    core.audit()
    assert failed > 5 and not core.statistics()["canary"]["found_pages"]
    core.close()


@slow_unless_changed(*WATCHED)
@pytest.mark.parametrize("model", MODELS)
def test_frames_move_between_steps_with_drafts(model: str) -> None:
    found = served(model, speculative_config={"method": "ngram", "num_speculative_tokens": 3}, canary="all")
    assert found.moved_frames > 0


@slow_unless_changed(*WATCHED)
def test_a_model_of_one_group_has_no_arena() -> None:
    core = engine("quire-bundled", "2MiB")
    assert core.plan.arena is None
    core.close()


def lost(self: Any, *given: Any) -> None:
    """Nothing is done."""


@slow_unless_changed(*WATCHED)
@pytest.mark.parametrize(
    ("owner", "name", "seen"),
    [(ModelRunner, "move_frames", "tokens or canary"), (Canary, "moved_frames", "canary")],
)
def test_a_move_that_is_not_done_is_noticed(owner: Any, name: str, seen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that stay where they were give other tokens, or the canary finds them; it must be told of moves itself."""
    model = "quire-bundled-window"
    expected(model)
    monkeypatch.setattr(owner, name, lost)
    core = engine(model, MODELS[model], canary="all")
    wrong = False
    try:
        wrong = run(core, prompts(), params()) != expected(model)
    finally:
        found = core.statistics()["canary"]["found_pages"]
        core.close()
    assert found or (wrong and seen != "canary")
