"""Mistakes with groups of which a request carries one frame along."""

from __future__ import annotations

from typing import Any

import numpy as np

from quire.cache.carried import CarriedGroup
from quire.cache.groups import Pieces
from quire.memory.residency import Column
from quire.spec.rank import Rank
from tests.mutants import field
from tests.mutants.registry import Patch, mutant


@mutant("cache", field.STALE)
def a_cached_state_is_rewritten(patch: Patch) -> None:
    """A request goes on in the state that others are to begin on."""

    def begin(group: CarriedGroup, row: int, pages: Any) -> None:
        if len(pages):
            group._frame[row] = group.table.frame[pages[-1]]
        group._position[row] = len(pages) * group._page_size

    patch.setattr(CarriedGroup, "begin", begin)


@mutant("cache", field.STALE)
def a_fresh_state_is_not_zero(patch: Patch) -> None:
    """A new request begins with what the frame's last owner left in it."""
    real = CarriedGroup.launch

    def launch(group: CarriedGroup, *what: Any, leaves: bool) -> Any:
        pieces, given = real(group, *what, leaves=leaves)
        return Pieces(pieces.lengths, np.where(pieces.sources, pieces.sources, pieces.targets), pieces.targets), given

    patch.setattr(CarriedGroup, "launch", launch)


@mutant("cache", field.AHEAD)
def a_state_is_left_before_it_settles(patch: Patch) -> None:
    """A state is cached for a page that its request has not finished writing."""
    real = CarriedGroup.commit

    def commit(group: CarriedGroup, new: Any, *rest: Any) -> Any:
        for kv, end in zip(new.kvs, new.ends.tolist(), strict=True):
            for trail in group._behind.get(kv.row, ()):
                trail.num_pages = min(trail.num_pages, end)
        return real(group, new, *rest)

    patch.setattr(CarriedGroup, "commit", commit)


@mutant("cache", field.OFF_BY_ONE)
def a_state_is_left_one_page_on(patch: Patch) -> None:
    """A state is cached a page too late."""
    real = CarriedGroup._leave_here
    patch.setattr(CarriedGroup, "_leave_here", lambda self, row, n, frame, rank: real(self, row, n + 1, frame, rank))


@mutant("cache", field.LEAK)
def states_on_the_way_leak(patch: Patch) -> None:
    """A request that ends forgets the states that it had left on its way."""
    real = CarriedGroup.finish

    def finish(group: CarriedGroup, row: int, *rest: Any) -> Any:
        group._behind.pop(row, None)
        return real(group, row, *rest)

    patch.setattr(CarriedGroup, "finish", finish)


@mutant("cache", field.LEAK)
def a_duplicate_state_replaces_the_first(patch: Patch) -> None:
    """A state is given to a page that has one, and the page's first one is lost."""
    real = CarriedGroup._leave

    def leave(group: CarriedGroup, pages: Any, trails: Any) -> Any:
        for trail in trails:
            group.table.frame[pages[trail.num_pages - 1]] = 0
        return real(group, pages, trails)

    patch.setattr(CarriedGroup, "_leave", leave)


@mutant("cache", field.PINS)
def the_source_is_not_pinned(patch: Patch) -> None:
    """The state that a request begins on is dropped before its first step has read it."""
    real = Column.pin
    patch.setattr(
        Column, "pin", lambda self, pages, rank=Rank.PASSED: None if rank is Rank.USED else real(self, pages, rank)
    )
