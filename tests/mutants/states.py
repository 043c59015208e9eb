"""Mistakes with groups of which a request carries one frame along."""

from __future__ import annotations

from typing import Any

import numpy as np

from quire.cache.states import StateGroup, StatePieces
from quire.memory.residency import Column
from quire.spec.rank import Rank
from tests.mutants import field
from tests.mutants.registry import Patch, mutant


@mutant("cache", field.STALE)
def a_cached_state_is_rewritten(patch: Patch) -> None:
    """A request goes on in the state that others are to begin on."""

    def begin(group: StateGroup, row: int, pages: Any) -> None:
        if len(pages):
            group._frame[row] = group.table.frame[pages[-1]]
        group._position[row] = len(pages) * group._page_size

    patch.setattr(StateGroup, "begin", begin)


@mutant("cache", field.STALE)
def a_fresh_state_is_not_zero(patch: Patch) -> None:
    """A new request begins with what the frame's last owner left in it."""
    real = StateGroup.launch

    def launch(group: StateGroup, *what: Any, stores: bool) -> Any:
        pieces, released = real(group, *what, stores=stores)
        return StatePieces(
            pieces.lengths, np.where(pieces.sources, pieces.sources, pieces.targets), pieces.targets
        ), released

    patch.setattr(StateGroup, "launch", launch)


@mutant("cache", field.AHEAD)
def a_state_is_left_before_it_settles(patch: Patch) -> None:
    """A state is cached for a page that its request has not finished writing."""
    real = StateGroup.commit

    def commit(group: StateGroup, new: Any, *rest: Any) -> Any:
        for kv, end in zip(new.kvs, new.ends.tolist(), strict=True):
            for checkpoint in group._unsettled[kv.row]:
                checkpoint.num_pages = min(checkpoint.num_pages, end)
                group._oldest[kv.row] = min(group._oldest[kv.row], end)
        return real(group, new, *rest)

    patch.setattr(StateGroup, "commit", commit)


@mutant("cache", field.OFF_BY_ONE)
def a_state_is_left_one_page_on(patch: Patch) -> None:
    """A state is cached a page too late."""
    real = StateGroup._checkpoint
    patch.setattr(StateGroup, "_checkpoint", lambda self, row, n, frame, rank: real(self, row, n + 1, frame, rank))


@mutant("cache", field.STALE)
def a_decode_forgets_that_its_frame_is_a_checkpoint(patch: Patch) -> None:
    """A request writes its next token into another frame, and goes on in the old one, which others are to begin on."""
    real = StateGroup._exchange

    def exchange(group: StateGroup, places: Any, rows: Any, starts: Any, sources: Any) -> Any:
        targets = real(group, places, rows, starts, sources)
        group._frame[rows[places]] = sources[places]
        return targets

    patch.setattr(StateGroup, "_exchange", exchange)


@mutant("cache", field.LEAK)
def states_on_the_way_leak(patch: Patch) -> None:
    """A request that ends forgets the states that it had left on its way."""
    real = StateGroup.finish

    def finish(group: StateGroup, row: int, *rest: Any) -> Any:
        group._unsettled[row] = []
        return real(group, row, *rest)

    patch.setattr(StateGroup, "finish", finish)


@mutant("cache", field.LEAK)
def a_duplicate_state_replaces_the_first(patch: Patch) -> None:
    """A state is given to a page that has one, and the page's first one is lost."""
    real = StateGroup._store

    def store(group: StateGroup, pages: Any, checkpoints: Any) -> Any:
        for checkpoint in checkpoints:
            group.table.frame[pages[checkpoint.num_pages - 1]] = 0
        return real(group, pages, checkpoints)

    patch.setattr(StateGroup, "_store", store)


@mutant("cache", field.PINS)
def the_source_is_not_pinned(patch: Patch) -> None:
    """The state that a request begins on is dropped before its first step has read it."""
    real = Column.pin
    patch.setattr(
        Column, "pin", lambda self, pages, rank=Rank.PASSED: None if rank is Rank.USED else real(self, pages, rank)
    )
