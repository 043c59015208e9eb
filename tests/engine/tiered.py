"""Engines over tiers for tests: starved ones, what must be true when they rest, and where their bytes are."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from quire.engine.core import EngineCore
from quire.models.hf import LoadedModel
from quire.scheduler.sampling_params import SamplingParams
from quire.spec.pages import pages_for
from tests.engine.running import generated, run, shared_prompts, tiered_core
from tests.tiny_hybrids import build_hybrid
from tests.tiny_latents import SPARSE, build_latent
from tests.tiny_models import VOCAB_SIZE

NEW_TOKENS = 8
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
PROMPTS = shared_prompts(7, shared=37, tails=(3, 20, 11, 1, 29), vocabulary=VOCAB_SIZE)
OTHERS = shared_prompts(8, shared=21, tails=(30, 17, 2), vocabulary=VOCAB_SIZE)
LONGEST = max(map(len, PROMPTS)) + NEW_TOKENS

OPEN: list[EngineCore] = []
"""Engines that a test has made; `end_all` ends those that it has not closed."""


class Case(NamedTuple):
    """A loaded model, and what transformers generates with the same weights for `PROMPTS` and `OTHERS`."""

    model: LoadedModel
    expected: list[list[int]]
    others: list[list[int]]

    def check(self, core: EngineCore, turn: object = "") -> None:
        """Prompts, and then others that push them off the device, are answered as they should be."""
        assert run(core, PROMPTS, GREEDY, f"p{turn}") == self.expected, turn
        assert run(core, OTHERS, GREEDY, f"o{turn}") == self.others, turn


def build(name: str, **overrides: Any) -> Any:
    """The tiny model of that name, with random weights that are always the same."""
    return build_latent(name, **overrides) if name in SPARSE else build_hybrid(name, **overrides)


@cache
def case_of(name: str) -> Case:
    """That of the tiny model of that name."""
    reference = build(name)
    expected = [[generated(reference, prompt, NEW_TOKENS) for prompt in some] for some in (PROMPTS, OTHERS)]
    return Case(LoadedModel(build(name), name=name), *expected)


def small(model: LoadedModel, page_size: int = 4, **settings: Any) -> EngineCore:
    """Room for little more than the longest request, one window, and five states."""
    kinds = [group.reach.kind for group in model.spec.groups(page_size)]
    core = tiered_core(
        model,
        **{
            "num_tokens": (pages_for(LONGEST - 1, page_size) + 3) * page_size,
            "window_tokens": (pages_for(8, page_size) + 5) * page_size,
            "page_size": page_size,
            "max_num_batched_tokens": 17,
            "max_running_requests": 3,
            "max_model_len": 256,
            "max_mamba_cache_size": 5 if "state" in kinds else None,
            **settings,
        },
    )
    OPEN.append(core)
    return core


def settle(core: EngineCore) -> None:
    """Wait for all that moves."""
    tiers = core.offload.tiers
    assert tiers is not None
    core.offload.ahead.settle_moves()
    while core.has_moves() or tiers.moving:
        core.offload.ahead.wait_moves(1.0)
        core.offload.ahead.settle_moves()


def at_rest(core: EngineCore) -> dict[str, Any]:
    """Wait for all that moves, and check that nothing is held: the tiers' statistics."""
    settle(core)
    core.audit()
    check_audit_in_pieces(core)
    tiers = core.offload.tiers
    assert tiers is not None
    assert not tiers.moving and not tiers.damaged_paths and not tiers.damaged.num_damaged
    assert core.offload.prefetcher is None or not core.offload.prefetcher.in_flight
    assert core.cache.tree.num_protected == 0
    for group, host in zip(core.cache.groups, tiers.hosts, strict=True):
        assert group.table.num_pinned == 0
        assert host.table.num_pinned == 0
        assert not host.still_read
    found = core.statistics()
    assert all(frames["private"] == frames["moving"] == 0 for frames in found["frames"].values())
    withheld = sum(len(each()) for each in core.cache.parts.withheld)
    num_cached = found["cached_pages"] + core.cache.tree.num_below
    assert core.cache.pages.num_free_pages == core.cache.pages.num_pages - num_cached - withheld
    assert found["failed_requests"] == 0
    return dict(found["tiers"])


def check_audit_in_pieces(core: EngineCore) -> None:
    """That of servers finds nothing either."""
    auditor = core.audits.auditor
    while auditor.is_running:
        auditor.advance(1.0)
    found = None
    while found is None:
        found = auditor.advance(1.0)
    assert found.whole and not found.faults, found.faults


def closed(core: EngineCore) -> dict[str, Any]:
    """As `at_rest`, and close it."""
    found = at_rest(core)
    core.close()
    return found


def end_all() -> None:
    """Stop the threads of engines whose test has failed."""
    left = [core.tiers for core in OPEN if core.tiers is not None]
    OPEN.clear()
    for tiers in left:
        tiers.mover.close()
        if tiers.store is not None:
            tiers.store.close()


def below_only(core: EngineCore, group: int = 0) -> list[tuple[int, int]]:
    """Pages of a group that the host has and the device has not, and their host frames."""
    assert core.offload.tiers is not None
    column = core.offload.tiers.hosts[group].table.frame
    pages = np.flatnonzero((column > 0) & (core.cache.groups[group].table.frame == 0))
    return [(int(page), int(column[page])) for page in pages]


def flip(core: EngineCore, frame: int, group: int = 0, at: int = 80) -> None:
    """Change a byte of a host record."""
    assert core.tiers is not None
    core.tiers.host.rows(group)[frame, at] ^= 1
