"""Mistakes with windows and states that engines of this kind have shipped, in the cache and above it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from quire.cache.carried import CarriedGroup
from quire.cache.groups import PassingGroup, Pieces, WholeGroup
from quire.cache.kv_cache import KVCache
from quire.errors import OutOfPages
from quire.prefix.reach import Chunk, Window
from quire.prefix.shelf import Rank, Shelf
from quire.scheduler.scheduler import Scheduler
from tests.mutants.mutants import Patch, mutant

# -- windows


@mutant("cache", "the first token of a window is gone when the request reads it")
def a_window_is_a_page_too_short(patch: Patch) -> None:
    real = Window.needed
    patch.setattr(Window, "needed", lambda self, n: range(min(n, real(self, n).start + 1), n))


@mutant("cache", "a prompt resumes where the oldest page of its window is missing")
def a_window_with_a_hole_is_resumed_on(patch: Patch) -> None:
    patch.setattr(Window, "resumable", lambda self, resident: resident.copy())


@mutant("cache", "a prompt resumes inside a chunk whose beginning is gone")
def a_chunk_is_taken_for_resident(patch: Patch) -> None:
    patch.setattr(Chunk, "resumable", lambda self, resident: np.ones_like(resident))


@mutant("cache", "a prompt resumes where one group can and another cannot")
def any_group_is_enough(patch: Patch) -> None:
    real = PassingGroup.resumable
    patch.setattr(PassingGroup, "resumable", lambda self, pages: real(self, pages) | (np.arange(len(pages)) % 2 == 0))


@mutant("cache", "windows that running requests read are dropped for others")
def a_pinned_window_is_dropped(patch: Patch) -> None:
    patch.setattr(PassingGroup, "begin", lambda self, row, pages: self.first.__setitem__(row, 0))


@mutant("cache", "the pool of windows fills with what was passed, and requests fail beside frames that nobody reads")
def passed_windows_stay_pinned(patch: Patch) -> None:
    patch.setattr(PassingGroup, "_advance", lambda self, row: (int(self.first[row.row]), int(self.first[row.row])))


@mutant("cache", "only whole pages are evicted, and a full pool of windows never gets a frame back")
def eviction_ignores_windows(patch: Patch) -> None:
    patch.setattr(PassingGroup, "evict", lambda self, num_frames: 0)


@mutant("cache", "a page computed again keeps its cached twin without a window, and nobody resumes there ever after")
def a_window_is_not_revived(patch: Patch) -> None:
    patch.setattr(WholeGroup, "_revive", lambda self, ours, theirs: None)


@mutant("cache", "a revived window belongs to the tree and to the request that ends, which frees it")
def a_revived_frame_is_freed_with_its_old_page(patch: Patch) -> None:
    def revive(group: Any, ours: Any, theirs: Any) -> None:
        missing = ~group.frames.resident(theirs)
        group.frames.column[theirs[missing]] = group.frames.column[ours[missing]]

    patch.setattr(WholeGroup, "_revive", revive)


@mutant("cache", "a window is dropped between two pins of it, and the second unpin frees what is another's")
def a_window_is_unpinned_twice(patch: Patch) -> None:
    real = PassingGroup.give_back

    def give_back(group: PassingGroup, given: Any) -> None:
        again = given.unpinned[group.shelf.pins(given.unpinned) > 1]
        real(group, given)
        group.shelf.unpin(again, given.rank)

    patch.setattr(PassingGroup, "give_back", give_back)


@mutant("shelf", "windows are dropped tail first, so that every conversation loses the end it would resume on")
def windows_go_tail_first(patch: Patch) -> None:
    real = Shelf.unpin
    patch.setattr(Shelf, "unpin", lambda self, pages, rank: real(self, pages[::-1], rank))


@mutant("shelf", "what a long prompt has passed outlives the ends of all other conversations")
def all_windows_are_worth_the_same(patch: Patch) -> None:
    real = Shelf._raise_rank
    patch.setattr(Shelf, "_raise_rank", lambda self, pages, rank: real(self, pages, Rank.MARKED))


@mutant("cache", "a hit taken before its window was dropped is begun on")
def a_hit_outlives_its_window(patch: Patch) -> None:
    real = KVCache.is_current
    patch.setattr(KVCache, "is_current", lambda self, hit: real(self, replace(hit, num_dropped=self._num_dropped)))


@mutant("scheduler", "a prompt longer than the window pool waits for ever")
def chunks_are_not_cut_to_the_window_pool(patch: Patch) -> None:
    patch.setattr(KVCache, "at_once", lambda self, kv, count: count)


@mutant("reuse", "a window pool that is full of cached windows admits nobody")
def cached_windows_count_as_taken(patch: Patch) -> None:
    patch.setattr(PassingGroup, "num_evictable", property(lambda group: 0))


# -- states


@mutant("cache", "a request goes on in the state that others are to begin on")
def a_cached_state_is_rewritten(patch: Patch) -> None:
    def begin(group: CarriedGroup, row: int, pages: Any) -> None:
        if len(pages):
            group._frame[row] = group.frames.column[pages[-1]]
        group._position[row] = len(pages) * group._page_size

    patch.setattr(CarriedGroup, "begin", begin)


@mutant("cache", "a new request begins with what the frame's last owner left in it")
def a_fresh_state_is_not_zero(patch: Patch) -> None:
    real = CarriedGroup.launch

    def launch(group: CarriedGroup, kvs: Any, ends: Any, rows: Any, *, leaves: bool) -> Any:
        pieces, given = real(group, kvs, ends, rows, leaves=leaves)
        return Pieces(pieces.lengths, np.where(pieces.sources, pieces.sources, pieces.targets), pieces.targets), given

    patch.setattr(CarriedGroup, "launch", launch)


@mutant("cache", "a state is cached for a page that its request has not finished writing")
def a_state_is_left_before_it_settles(patch: Patch) -> None:
    real = CarriedGroup.commit

    def commit(group: CarriedGroup, row: Any, *rest: Any) -> Any:
        for trail in group._behind.get(row.row, ()):
            trail.num_pages = min(trail.num_pages, row.protected)
        return real(group, row, *rest)

    patch.setattr(CarriedGroup, "commit", commit)


@mutant("cache", "a state is cached a page too late")
def a_state_is_left_one_page_on(patch: Patch) -> None:
    real = CarriedGroup._leave_here
    patch.setattr(CarriedGroup, "_leave_here", lambda self, row, n, frame, rank: real(self, row, n + 1, frame, rank))


@mutant("cache", "a request that ends forgets the states that it had left on its way")
def states_on_the_way_leak(patch: Patch) -> None:
    real = CarriedGroup.finish

    def finish(group: CarriedGroup, row: Any) -> Any:
        group._behind.pop(row.row, None)
        return real(group, row)

    patch.setattr(CarriedGroup, "finish", finish)


@mutant("cache", "a state is given to a page that has one, and the page's first one is lost")
def a_duplicate_state_replaces_the_first(patch: Patch) -> None:
    real = CarriedGroup._leave

    def leave(group: CarriedGroup, row: Any, trails: Any) -> Any:
        for trail in trails:
            group.frames.column[row.pages[trail.num_pages - 1]] = 0
        return real(group, row, trails)

    patch.setattr(CarriedGroup, "_leave", leave)


@mutant("cache", "the state that a request begins on is dropped before its first step has read it")
def the_source_is_not_pinned(patch: Patch) -> None:
    real = Shelf.pin
    patch.setattr(
        Shelf, "pin", lambda self, pages, rank=Rank.PASSED: None if rank is Rank.USED else real(self, pages, rank)
    )


@mutant("scheduler", "a request dies because there is no frame for an optional checkpoint")
def a_checkpoint_is_not_optional(patch: Patch) -> None:
    real = CarriedGroup._spare

    def spare(group: CarriedGroup, rank: Rank) -> int:
        found = real(group, rank)
        if not found:
            raise OutOfPages(group=group.name, wanted=1, free=0)
        return found

    patch.setattr(CarriedGroup, "_spare", spare)


@mutant("reuse", "checkpoints take the frames that requests need to run")
def checkpoints_take_the_last_frame(patch: Patch) -> None:
    def spare(group: CarriedGroup, rank: Rank) -> int:
        if not group.num_free and not group._drop(1, rank):
            return 0
        return int(group.frames.take(1)[0])

    patch.setattr(CarriedGroup, "_spare", spare)


@mutant("reuse", "the one state there is stays pinned by the request that would begin on it, and it waits for ever")
def no_state_is_taken_over(patch: Patch) -> None:
    patch.setattr(CarriedGroup, "_takeable", lambda self, rows: rows[:0])


@mutant("reuse", "prompts that share a prefix compute it again and again, since nobody leaves a state where they part")
def no_state_where_prompts_part(patch: Patch) -> None:
    real = KVCache._mark_ends

    def mark(cache: KVCache, kv: Any, hit: Any, num_tokens: int) -> None:
        real(cache, kv, hit, num_tokens)
        kv.marks = {n: rank for n, rank in kv.marks.items() if rank is not Rank.USED}

    patch.setattr(KVCache, "_mark_ends", mark)


@mutant("reuse", "requests that come together and share a prefix each compute it, since no state is left for them")
def a_leader_does_not_hear_who_waits(patch: Patch) -> None:
    patch.setattr(Scheduler, "_leader", lambda self, request, hit: None)


@mutant("reuse", "no test would see that checkpoints are skipped")
def skipped_checkpoints_are_not_counted(patch: Patch) -> None:
    patch.setattr(CarriedGroup, "skipped", property(lambda self: 0, lambda self, value: None), raising=False)
