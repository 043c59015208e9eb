"""The engine runs on the verbs of the allocators: each, made to raise, ends a run."""

from __future__ import annotations

from collections.abc import Callable
from inspect import getattr_static
from typing import Any

import numpy as np
import pytest

from quire.memory.allocator import (
    BaseTokenToKVPoolAllocator,
    MambaSlotAllocator,
    PagedTokenToKVPoolAllocator,
    SWATokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from quire.memory.allocator.host import HiSparseHostPoolMixin
from quire.spec.group import ReachSpec
from quire.spec.hisparse import HotBuffers
from tests.offload.cached_bytes import FULL, tokens_of
from tests.offload.tiered_cache import TieredCache
from tests.scheduler.hybrid_server import HybridServer

WINDOW, STATE = ReachSpec("window", 8), ReachSpec("state")
CLASSES = (
    BaseTokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
    PagedTokenToKVPoolAllocator,
    SWATokenToKVPoolAllocator,
    MambaSlotAllocator,
    HiSparseHostPoolMixin,
)


class VerbRaisedError(Exception):
    """What a verb raises that was made to."""


def serve(
    page_size: int, *reaches: ReachSpec, pages: int = 24, frames: tuple[int, ...] = (), hot: HotBuffers | None = None
) -> None:
    """Prompts that share a prefix, more than fit, twice: hits, eviction, preemption and ends of several in one step."""
    server = HybridServer(*reaches, num_pages=pages, page_size=page_size, frames=frames, chunk=16, interval=8, hot=hot)
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 50, 8).tolist()
    for _ in range(2):
        server.serve(*(shared + rng.integers(0, 50, 6).tolist() for _ in range(4)), max_tokens=9)
    server.serve([*shared, 1, 2, 3], max_tokens=2)
    server.cache.audit()


def offload() -> None:
    """Pages that go to the host and come back."""
    tiered = TieredCache(num_pages=6, host=12, reaches=(FULL,))
    for first in (0, 20, 40, 0):
        tiered.compute(tokens_of(range(first, first + 4)))
        tiered.drain()
    tiered.cache.audit()
    assert tiered.tiers.counters.loaded_frames


RUNS: tuple[Callable[[], None], ...] = (
    lambda: serve(4, FULL, WINDOW, STATE, frames=(24, 12, 6)),
    lambda: serve(4, FULL),
    lambda: serve(1, FULL, WINDOW, pages=90, frames=(90, 50)),
    lambda: serve(1, FULL, pages=90),
    lambda: serve(4, FULL, WINDOW, ReachSpec("window", 4), frames=(24, 14, 14)),
    lambda: serve(4, FULL, FULL, hot=HotBuffers(group=0, buffer_size=4, top_k=1)),
    offload,
)


def verbs() -> list[tuple[type, str]]:
    growing = (BaseTokenToKVPoolAllocator, SWATokenToKVPoolAllocator)
    inherited = [(each, name) for each in growing for name in ("alloc", "alloc_extend")]
    return inherited + [
        (each, name)
        for each in CLASSES
        for name, what in vars(each).items()
        if not name.startswith("_") and not getattr(what, "__isabstractmethod__", False)
        if callable(what) or isinstance(what, property | classmethod)
    ]


@pytest.mark.parametrize("number", range(len(RUNS)))
def test_the_runs_end_well(number: int) -> None:
    RUNS[number]()


@pytest.mark.parametrize(("owner", "verb"), verbs())
def test_no_engine_runs_without_this_verb(owner: type, verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(*_: Any, **__: Any) -> Any:
        raise VerbRaisedError

    is_property = isinstance(getattr_static(owner, verb), property)
    monkeypatch.setattr(owner, verb, property(raises) if is_property else raises)
    for run in RUNS:
        try:
            run()
        except VerbRaisedError:
            return
    pytest.fail(f"{owner.__name__}.{verb} has no caller in a running engine")
