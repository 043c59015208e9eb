"""Mistakes with groups of which a request reads a part that moves along."""

from __future__ import annotations

from typing import Any

import numpy as np

from quire.cache import offload
from quire.cache.admission import Admission
from quire.cache.groups import NO_PAGES, GroupRelease, NewPages, PagedGroup, resume_point
from quire.cache.passing import Passing
from quire.prefix.reach import Chunk, Window
from tests.mutants import field
from tests.mutants.registry import Patch, mutant


@mutant("cache", field.OFF_BY_ONE)
def a_window_is_a_page_too_short(patch: Patch) -> None:
    """The first token of a window is gone when the request reads it."""
    real = Window.needed
    patch.setattr(Window, "needed", lambda self, n: range(min(n, real(self, n).start + 1), n))


@mutant("cache", field.PARTIAL)
def a_window_with_a_hole_is_resumed_on(patch: Patch) -> None:
    """A prompt resumes where the oldest page of its window is missing."""
    patch.setattr(Window, "resumable", lambda self, resident: resident.copy())


@mutant("cache", field.PARTIAL)
def a_chunk_is_taken_for_resident(patch: Patch) -> None:
    """A prompt resumes inside a chunk whose beginning is gone."""
    patch.setattr(Chunk, "resumable", lambda self, resident: np.ones_like(resident))


@mutant("cache", field.PARTIAL)
def any_group_is_enough(patch: Patch) -> None:
    """A prompt resumes where one group can and another cannot."""
    patch.setattr(offload, "resume_point", lambda groups, pages: resume_point(groups[:1], pages))


@mutant("cache", field.PINS)
def a_pinned_window_is_dropped(patch: Patch) -> None:
    """Windows that running requests read are dropped for others."""
    patch.setattr(PagedGroup, "begin", lambda self, row, pages: self.first.__setitem__(row, 0))


@mutant("cache", field.PINS)
def passed_windows_stay_pinned(patch: Patch) -> None:
    """The pool of windows fills with passed frames, and requests fail although no request reads them."""
    patch.setattr(PagedGroup, "_advance", lambda self, new: (self.first[new.rows], NO_PAGES))


@mutant("cache", field.PARTIAL)
def a_window_moves_on_past_what_has_settled(patch: Patch) -> None:
    """A window moves on by a page that its request still reads."""
    real = Passing.pass_by
    patch.setattr(Passing, "pass_by", lambda self, batch, places, pages: real(self, batch, places, pages + 1))


@mutant("cache", field.PINS)
def a_passed_window_is_idle_while_a_step_reads_it(patch: Patch) -> None:
    """A frame is handed out that the step in flight still reads."""
    real = PagedGroup.pass_by

    def pass_by(group: PagedGroup, new: NewPages) -> list[GroupRelease]:
        for part in real(group, new):
            group.release(part)
        return []

    patch.setattr(PagedGroup, "pass_by", pass_by)


@mutant("cache", field.PINS)
def a_passed_window_stays_pinned_once_more(patch: Patch) -> None:
    """The release of a passed window removes one of two holds, and its frame is never idle."""
    real = PagedGroup.pass_by

    def pass_by(group: PagedGroup, new: NewPages) -> list[GroupRelease]:
        found = real(group, new)
        for part in found:
            group.table.pin(part.unpinned)
        return found

    patch.setattr(PagedGroup, "pass_by", pass_by)


@mutant("cache", field.STUCK)
def eviction_ignores_windows(patch: Patch) -> None:
    """Only whole pages are evicted, and a full pool of windows never gets a frame back."""
    patch.setattr(PagedGroup, "evict", lambda self, num_frames, most=None: 0)


@mutant("cache", field.DEAD)
def a_window_is_not_revived(patch: Patch) -> None:
    """A page computed again keeps its cached twin without a window, and no request resumes there again."""
    patch.setattr(PagedGroup, "_revive", lambda self, ours, theirs: None)


@mutant("cache", field.TWICE)
def a_revived_frame_is_freed_with_its_old_page(patch: Patch) -> None:
    """A revived window belongs to the tree and to the request that ends, which frees it."""

    def revive(group: Any, ours: Any, theirs: Any) -> None:
        missing = ~group.table.present(theirs)
        group.table.frame[theirs[missing]] = group.table.frame[ours[missing]]

    patch.setattr(PagedGroup, "_revive", revive)


@mutant("cache", field.PINS)
def a_window_is_unpinned_twice(patch: Patch) -> None:
    """A window is dropped between two pins of it, and the second unpin frees what is another's."""
    real = PagedGroup.release

    def release(group: PagedGroup, released: Any) -> None:
        again = released.unpinned[group.table.pins[released.unpinned] > 1]
        real(group, released)
        group.table.unpin(again, released.rank)

    patch.setattr(PagedGroup, "release", release)


@mutant("cache", field.EVICTED)
def a_hit_outlives_its_window(patch: Patch) -> None:
    """A hit taken before its window was dropped is begun on."""
    patch.setattr(Admission, "is_current", lambda self, hit: hit.match.version == self._tree.version)
