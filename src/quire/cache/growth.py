"""Growth: page ids and frames for more tokens of running requests, in every group or in none.

If too few are free, room is made in this order:

checkpoints               of running requests, not stored yet, are given up where groups share a room
rows of sessions          end, those of expired sessions first, then the least recently used one
soft retentions           end, the lowest priority first, until enough is evictable
transfers                 are waited for: their pages are evictable when they have arrived
prompts read ahead        are abandoned, the newest first
cached pages              are evicted where page ids or frames of a whole group are short
frames of other groups    are reclaimed where these are short; their pages stay cached

In a room that groups share, frames that were read past go before cached pages, whatever group is short: what is evicted
follows from its value, and not from where its bytes lie. A group then moves out of the way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from quire.cache.groups import NO_PAGES
from quire.cache.offload import CacheParts, Offload
from quire.cache.request_kv import RequestKV
from quire.cache.room import Room
from quire.cache.running import Batch, Counts, Lengths, Rows, RunningBatch
from quire.cache.states import GroupCache, StateGroup
from quire.cache.statistics import CacheCounters
from quire.errors import InvalidInput, OutOfPages
from quire.memory.allocator import GrowingAllocator, Move, PageFrames
from quire.memory.runs import in_order
from quire.spec.ids import Bools, Ids, Tier
from quire.spec.rank import Rank

Grown = tuple[Rows, Lengths, Lengths]  # rows that get pages, and between which places each of them


class Growth:
    """Allocates and frees pages and frames of one cache. If it raises OutOfPages, nothing has changed. `growing`
    allocates pages for rows. `allocators` are this one and those of the groups that it does not cover. `give_way()`
    ends the row of a session, if there is one."""

    def __init__(
        self,
        parts: CacheParts,
        offload: Offload,
        counters: CacheCounters,
        give_way: Callable[[], bool],
        growing: GrowingAllocator,
    ) -> None:
        self._parts = parts
        self._give_way = give_way
        self._offload = offload
        self._counters = counters
        self._rows = parts.rows
        self._frames = parts.frames
        self._context = parts.plan.context
        self._size = parts.plan.page_size
        self._growing = growing
        covered: object = growing
        self._others = tuple(group for group in parts.groups if group.frames is not covered)
        frames = (g.frames.allocator for g in self._others if isinstance(g.frames, PageFrames))
        others = (each for each in frames if each is not parts.pages)
        self.allocators: tuple[GrowingAllocator, ...] = (growing, *others)
        self._states = tuple(group for group in parts.groups if isinstance(group, StateGroup))
        self._rooms = parts.rooms
        self._lack_pages = 0  # that have to become evictable, beside what rooms lack
        self.resized()
        self.num_left = 0
        """Pages that have left the device for more room."""

    def resized(self) -> None:
        """Groups have other frames than before."""
        most, rooms = self._parts.pages.num_pages, self._rooms
        few = [any(g.reach.in_place or g.frames.allocator.ids.limit < most for g in room.groups) for room in rooms]
        # Those that can be short where page ids are not.
        self._scarce = tuple(room for room, has_few in zip(rooms, few, strict=True) if has_few or room.is_shared)

    def by(self, kvs: Batch, rows: Rows, counts: int | Counts) -> None:
        """Make room for `counts[i]` more tokens in each row, within the plan's context."""
        after = self._rows.num_allocated[rows] + np.asarray(counts, dtype=np.int64)
        if len(rows) and (np.count_nonzero(np.less(counts, 0)) or np.maximum.reduce(after) > self._context):
            raise self._beyond_context(int(after.max()))
        self._to(kvs, rows, after)

    def up_to(self, kvs: Batch, rows: Rows, lengths: Counts) -> None:
        """Make room for `lengths[i]` tokens in each row that has less, up to the width of rows."""
        most = np.minimum(np.asarray(lengths, dtype=np.int64), self._rows.width * self._size)
        self._to(kvs, rows, np.maximum(self._rows.num_allocated[rows], most))

    def by_one(self, batch: RunningBatch) -> None:
        """Make room for one more token of every request."""
        rows, size = self._rows.rows_of(batch), self._size
        lengths = self._rows.num_allocated[rows]
        if np.maximum.reduce(lengths, initial=0) >= self._context:
            raise self._beyond_context(self._context + 1)
        crossing = (lengths % size == 0).nonzero()[0]  # the others have a free slot in their last page
        if len(crossing) or self._states:
            starts, num_new = lengths[crossing] // size, len(crossing)
            grown = rows[crossing], starts, starts + 1
            self._make_room(rows, num_new, batch, None, grown)
            self._give(rows, grown, self._growing.alloc_pages(num_new) if num_new else NO_PAGES)
        self._rows.num_allocated[rows] = lengths + 1

    def pages_of(self, row: int, first: int, last: int) -> Ids:
        """Pages `first..last - 1` of a row, a copy."""
        return self._growing.pages_of_row(self._rows.pages, row, first, last)

    def free(self, pages: Ids) -> None:
        """Free pages that nothing holds, and their frames in every group."""
        pages = in_order(pages)
        for group in self._parts.groups:  # all of them, since `freed` may withhold ids
            group.frames.drop(pages)
        self._frames.remove_pages(Tier.DEVICE, pages)
        self._growing.free(self._offload.freed(pages) * np.int32(self._growing.page_size))

    def _to(self, kvs: Batch, rows: Rows, after: Lengths) -> None:
        """Make room for `after[i]` tokens in each row."""
        before, size = self._rows.num_allocated[rows], self._size
        grown = rows, -(-before // size), -(-after // size)
        num_new = int(np.add.reduce(grown[2] - grown[1]))
        if num_new or self._states:  # else each has free slots in its last page
            self._make_room(rows, num_new, kvs, after, grown)
            growing, table = self._growing, self._rows.pages
            self._give(rows, grown, growing.alloc_rows(table, rows, before, after) if num_new else NO_PAGES)
        self._rows.num_allocated[rows] = after

    def _give(self, rows: Rows, grown: Grown, pages: Ids) -> None:
        """These new `pages` are those of `grown`, and all `rows` get their frames in the other groups."""
        self._take(rows, pages)
        if len(pages):
            self._rows.write_new(*grown, pages)

    def _make_room(self, rows: Rows, num_new: int, kvs: Batch, ends: Lengths | None, grown: Grown) -> None:
        """Evict if the free pages and frames do not suffice for these rows, with `ends[i]` tokens then, None: one more,
        and the `num_new` pages of `grown`."""
        short = num_new * self._growing.page_size > self._growing.available_size() or self._is_bound()
        asking = kvs.kvs if isinstance(kvs, RunningBatch) else kvs
        rooms = self._rooms if any(group.quarantined for group in self._parts.groups) else self._scarce
        if not short and rooms:
            wanted = self._wanted(asking, rows, num_new, ends)
            short = not all(room.has(wanted) for room in rooms)
        reclaims = ends is None and rooms and not rooms[0].is_shared
        if short and not (reclaims and self._reclaim_for(rows, num_new, len(kvs))):
            self._offload.retention.expire()
            cause = _names_of(asking, self._rows.num_allocated[rows] % self._size == 0)
            if rooms or not self._evict_for(num_new, cause):
                self._until(lambda: self._wanted(asking, rows, num_new, ends), num_new, cause, waits=True)

    def _evict_for(self, num_new: int, cause: str) -> bool:
        """Evict for so many page ids, where no group can be short without them, and for what all that run want in four
        steps, but at most one more in 128. False: more than that is needed."""
        most, lack = self._parts.tree.num_evictable, num_new - self._parts.pages.num_free_pages
        if lack <= most:
            ahead = min(4 * int(np.count_nonzero(self._rows.serials)) // self._size, (most - lack) // 128)
            self._evict_pages(lack + ahead, num_new, cause)
        return num_new * self._growing.page_size <= self._growing.available_size()

    def _reclaim_for(self, rows: Rows, num_new: int, num_rows: int) -> bool:
        """Whether idle frames of windows, which are free now, are all that `num_new` pages of decodes lack. Of those
        that were read past go what `num_rows` rows want in a page, else what they want in four steps: they are next."""
        wanted = [(group, group.wanted(rows, num_new)) for group in self._parts.groups]
        lacking = [(group, n) for group, n in wanted if n > group.num_free]
        reclaims = all(not group.reach.whole and n <= group.num_free + group.num_evictable for group, n in lacking)
        if not reclaims or num_new > self._parts.pages.num_free_pages:
            return False
        for group, n in lacking:
            group.evict(max(n - group.num_free, num_rows), Rank.PASSED)
            if n > group.num_free:
                group.evict(max(n - group.num_free, 4 * num_rows // self._size))
        return all(n <= group.num_free for group, n in lacking)

    def _is_bound(self) -> bool:
        """Whether those that ask may have less than what is free."""
        return False

    def _wanted(self, kvs: Sequence[RequestKV], rows: Rows, num_new: int, ends: Lengths | None) -> list[int]:
        """Frames that rows need, with those for checkpoints where these fit beside everything that is held."""
        groups = self._parts.groups
        wanted = [group.wanted(rows, num_new) for group in groups]
        for group in self._states:
            if wishes := group.wishes(kvs, rows, ends):
                more = [n + wishes * (g is group) for g, n in zip(groups, wanted, strict=True)]
                if group.room.lack([g.num_held + n for g, n in zip(groups, more, strict=True)]) <= 0:
                    wanted = more
        return wanted

    def reclaim(self, wanted: Sequence[int], cause: str, pages: Sequence[Ids]) -> None:
        """Evict until each group has `wanted[i]` free frames, for loads, which follow moves as launched steps do. Does
        not wait for transfers. `pages` are those of each group that get the frames."""
        self._until(lambda: wanted, 0, cause, waits=False)

    def shrink(self, reserved: Sequence[int], cause: str) -> None:
        """As `reclaim` for rooms that are smaller now, in which each group keeps so many frames. Moves nothing."""
        self._until(lambda: reserved, 0, cause, waits=False, moves=False)

    def _until(
        self, ask: Callable[[], Sequence[int]], num_new: int, cause: str, *, waits: bool, moves: bool = True
    ) -> None:
        """Release holds until the pages counted by `ask()` are evictable, and evict them. Raises OutOfPages before."""
        while True:
            wanted, before = ask(), self._num_out()
            while (refusal := self._short(wanted, num_new)) is not None:
                if not self._release(wanted, num_new, waits=waits):
                    raise refusal
                wanted = ask()
            self._evict(wanted, num_new, cause, self._rooms)
            free = self._parts.pages.num_free_pages
            if num_new <= free:
                break
            if self._num_out() == before:  # else a transfer reads what was evicted
                raise self._refusal("pages", num_new, free, free)
        for room in self._rooms:
            if room.lack(self._used(wanted)) > 0:  # an eviction freed less than was counted
                raise self._refusal(room.groups[0].name, wanted[room.indices[0]], room.groups[0].num_free, 0)
            if moves and (move := room.make_way(wanted)) is not None:
                self.move(move)

    def _release(self, wanted: Sequence[int], num_new: int, *, waits: bool) -> bool:
        """End a hold that protects pages or frames, or wait for a transfer. False: there is none to end now."""
        retention = self._offload.retention
        ways: list[Callable[[], bool]] = [
            lambda: self._give_up_checkpoints(wanted, num_new),
            self._give_way,
            lambda: retention.give_way(wanted, num_new, self._lack_pages),
            lambda: self._offload.make_room(waits=waits),
        ]
        if self._fits_later(wanted, num_new):  # nothing else ends for it, while there is something to wait for
            ways = ways[-1:] + ways[:-1]
            ways = ways[: int(waits)] if self._parts.holds.fences.num_open or not waits else ways
        return any(way() for way in ways)

    def _fits_later(self, wanted: Sequence[int], num_new: int) -> bool:
        """Whether what lacks comes by itself where groups share a room: frames can move again, and checkpoints of
        running requests be given up, once transfers have ended and the steps in flight have settled."""
        if num_new > self._most_ids():
            return False
        steps, moves = self._parts.holds.fences.num_open > 0, self._offload.is_moving
        counts = self._held_with(wanted)
        if steps:
            counts = [n - group.num_optional for n, group in zip(counts, self._parts.groups, strict=True)]
        return (steps or moves) and all(room.lack(counts, settled=True) <= 0 for room in self._rooms)

    def _evict(self, wanted: Sequence[int], num_new: int, cause: str, rooms: Sequence[Room]) -> None:
        """Evict until each group of these rooms has `wanted[i]` free frames, and `num_new` pages are free."""
        self._evict_frames(wanted, Rank.PASSED, [room for room in rooms if room.is_shared])
        chunk, before, after = 1, 0, 1
        while before != after and (missing := self._missing(wanted, num_new, chunk, rooms)) > 0:
            before = self._num_out()
            self._evict_pages(missing, num_new, cause)
            chunk, after = 2 * chunk, self._num_out()
        self._evict_frames(wanted, max(Rank), rooms)

    def _evict_pages(self, num_pages: int, num_new: int, cause: str) -> None:
        evicted = self._offload.evict(num_pages, num_new, cause)
        self._counters.evicted(len(evicted.removed))
        self.num_left += len(evicted.removed) + evicted.num_moved

    def _give_up_checkpoints(self, wanted: Sequence[int], num_new: int) -> bool:
        """A running request needs no more than the plan counts for it: what it has beside that goes, if this helps."""
        if self._parts.holds.fences.num_open or num_new > self._most_ids():
            return False
        counts = self._held_with(wanted)
        return any(group.give_up(group.room.lack(counts)) for group in self._states)

    def _held_with(self, wanted: Sequence[int]) -> list[int]:
        """Frames that eviction cannot free if each group gets so many."""
        return [group.num_held + n for group, n in zip(self._parts.groups, wanted, strict=True)]

    def _used(self, wanted: Sequence[int]) -> list[int]:
        """Frames in use if each group gets so many."""
        return [group.frames.num_used + n for group, n in zip(self._parts.groups, wanted, strict=True)]

    def _num_out(self) -> int:
        """What an eviction changes: page ids that are out, and frames in use."""
        return sum([group.frames.num_used for group in self._parts.groups]) - self._parts.pages.num_free_pages

    def _missing(self, wanted: Sequence[int], num_new: int, chunk: int, rooms: Sequence[Room]) -> int:
        """Pages to evict next. Of a room that groups share a page may free frames in all of them, and its tail more
        than what follows: so few at once, and more each time."""
        missing = num_new - self._parts.pages.num_free_pages if chunk == 1 else 0  # some ids are free later
        for room in rooms:
            whole = sum([stride for g, stride in zip(room.groups, room.strides, strict=True) if g.reach.whole])
            if whole and (lack := room.lack(self._used(wanted))) > 0:
                least = max(-(-lack // sum(room.strides)), chunk)
                missing = max(missing, min(least, -(-lack // whole)) if room.is_shared else lack)
        return missing

    def _evict_frames(self, wanted: Sequence[int], most: Rank, rooms: Sequence[Room]) -> None:
        """Evict frames of groups that are read in part, up to this rank, where these rooms are short."""
        for room in rooms:
            for index, stride in zip(room.indices, room.strides, strict=True):
                group = self._parts.groups[index]
                if not group.reach.whole and (lack := room.lack(self._used(wanted))) > 0:
                    self._reclaim(index, -(-lack // stride), most)

    def _reclaim(self, group: int, num_frames: int, most: Rank) -> None:
        self._parts.groups[group].evict(num_frames, most)

    def move(self, move: Move) -> None:
        """The bytes of some frames are elsewhere from now on: for what is launched next, behind what was launched. If
        they cannot be copied, nothing has changed."""
        if not len(move.sources):
            return
        for listener in self._parts.moved:
            listener(move.group, move.sources, move.targets)
        group = self._parts.groups[move.group]
        group.frames.allocator.ids.moved(move.sources, move.targets)
        self._rows.rewritten(move.group, group.moved(move.sources, move.targets))
        self._counters.moved_frames += len(move.sources)

    def _short(self, wanted: Sequence[int], num_new: int) -> OutOfPages | None:
        """The error for a request that does not fit even if all evictable pages are evicted."""
        parts, held = self._parts, self._held_with(wanted)
        for room in self._rooms:
            lack = room.lack(held)
            if lack > 0:
                index, stride = max(zip(room.indices, room.strides, strict=True), key=lambda at: wanted[at[0]] * at[1])
                group, n = parts.groups[index], wanted[index]
                fits = n - -(-lack // stride)  # beside what the others want
                return self._refusal(group.name, n, min(group.num_free, max(0, fits)), fits)
        most = self._most_ids()
        return self._refusal("pages", num_new, parts.pages.num_free_pages, most) if num_new > most else None

    def _most_ids(self) -> int:
        """Page ids that are free if all that can be evicted is."""
        tree, free = self._parts.tree, self._parts.pages.num_free_pages
        return free + max(0, tree.num_evictable + tree.num_below - self._offload.num_read_ids)

    def _refusal(self, group: str, wanted: int, free: int, most: int) -> OutOfPages:
        held_by = self._parts.holds.summary(self._offload.retention.num_pinned)
        return OutOfPages(group=group, wanted=wanted, free=free, evictable=max(0, most - free), held_by=held_by)

    def _take(self, rows: Rows, pages: Ids) -> None:
        """Allocate frames in the other groups for new pages of these rows. OutOfPages frees the pages."""
        groups = self._others if len(pages) else self._states
        taken: list[GroupCache] = []
        try:
            for group in groups:
                group.take(rows, pages)
                taken.append(group)
        except OutOfPages:
            for group in taken:
                group.untake(pages)
            self._growing.free(pages * np.int32(self._growing.page_size))
            raise
        for group in groups:
            group.grow(rows, pages)
        self._frames.add_pages(pages)

    def _beyond_context(self, length: int) -> InvalidInput:
        most = f"it only grows, and the plan's context is {self._context:,} tokens."
        fix = "plan for a longer context, or end the request before."
        return InvalidInput(f"a request cannot go to {length:,} tokens: {most}", fix=fix)


def _names_of(asking: Sequence[RequestKV], at_end: Bools) -> str:
    """The cause of an eviction: the first request that needs a page, and the number of others."""
    count = int(np.count_nonzero(at_end))
    first, count = (int(at_end.argmax()), count) if count else (0, len(asking))
    return asking[first].label + (f" and {count - 1} more" if count > 1 else "")
