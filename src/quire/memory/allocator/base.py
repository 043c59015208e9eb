"""What the token and the paged allocator share: which pages are free, which are out. Bookkeeping only, on the host.

A page of `page_size` tokens has one id; a token's slot is `page * page_size + offset`. Ids start at 1: page 0 is where
padded tokens write, and is never handed out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.errors import InvalidInput, OutOfPages
from quire.memory.allocator.free_list import FreeList, OutIds
from quire.memory.runs import IdArray
from quire.spec.ids import Bools, Ids

IntArray = npt.ArrayLike
Longs = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AllocatorState:
    """What `backup_state` returns. Opaque: only for `restore_state` of the allocator that made it."""

    free: Ids
    released: Ids
    out: OutIds


class BaseTokenToKVPoolAllocator(ABC):
    """Hands out token slots in whole pages, all or nothing.

    `size` is in tokens and is floored to whole pages. `name` is the group it serves, for messages. With `need_sort`,
    freed pages are set aside and merged in ascending order when an allocation would otherwise fall short, so that long
    runs of neighbouring pages come back. Every id is an int32 numpy array on the host; nothing here knows a tensor.
    """

    def __init__(self, size: int, page_size: int, *, need_sort: bool = False, name: str = "full") -> None:
        if page_size < 1:
            raise InvalidInput(f"page_size must be at least 1, got {page_size}.")
        if size < page_size:
            raise InvalidInput(
                f"a pool of {size} tokens holds no page of {page_size} tokens.",
                fix=f"make size at least {page_size}.",
            )
        self.page_size = page_size
        self.num_pages = size // page_size
        self.size = self.num_pages * page_size
        self.need_sort = need_sort
        self.name = name
        self.clear()

    # -- what there is

    @property
    def num_free_pages(self) -> int:
        """Pages that `alloc_pages` could hand out now."""
        return len(self._free) + self._num_released

    @property
    def num_frames(self) -> int:
        """As `num_pages`, where its pages are the frames of a group."""
        return self.num_pages

    @property
    def num_free(self) -> int:
        """As `num_free_pages`."""
        return self.num_free_pages

    def available_size(self) -> int:
        """Tokens that could be handed out now, in whole pages."""
        return self.num_free_pages * self.page_size

    def is_out(self, page_ids: Ids | slice) -> Bools:
        """Per page id: whether it is handed out."""
        return self._out.hold(page_ids)

    def clear(self) -> None:
        """Forget everything handed out: all pages are free, in ascending order, and no free group is open."""
        self._free = FreeList(np.arange(1, self.num_pages + 1, dtype=np.int32), self.num_pages)
        self._released: list[Ids] = []
        self._num_released = 0
        self._out = OutIds(self.num_pages)
        self._group: list[Ids] | None = None

    def backup_state(self) -> AllocatorState:
        """A snapshot for `restore_state`. O(num_pages). Not inside a free group."""
        assert self._group is None, "backup inside a free group"
        return AllocatorState(self._free.to_array(), self._released_ids(), self._out.copy())

    def restore_state(self, state: AllocatorState) -> None:
        """Return to exactly what `backup_state` saw: everything handed out or freed since is undone."""
        assert len(state.out) == self.num_pages + 1, "a snapshot of another allocator"
        self._free = FreeList(state.free, self.num_pages)
        self._released = [state.released.copy()] if len(state.released) else []
        self._num_released = len(state.released)
        self._out = state.out.copy()
        self._group = None

    # -- handing out

    def alloc_pages(self, num_pages: int) -> Ids:
        """Take `num_pages` free pages; the caller owns them. O(num_pages).

        Raises OutOfPages, changing nothing.
        """
        if not 0 <= num_pages <= len(self._free):
            self.check_room(num_pages)
            self._merge_released()
        pages = self._free.take(num_pages)
        self._out.mark(pages)
        return pages

    def alloc(self, need_size: int) -> Ids:
        """Take `need_size` tokens in whole pages and return their slots, int32 `[need_size]`.

        Raises OutOfPages, changing nothing, and InvalidInput where `need_size` is not a number of whole pages.
        """
        if need_size < 0 or need_size % self.page_size:
            raise InvalidInput(f"alloc takes whole pages of {self.page_size} tokens, got {need_size} tokens.")
        pages = self.alloc_pages(need_size // self.page_size)
        if self.page_size == 1:
            return pages
        slots = np.add.outer(pages * np.int32(self.page_size), np.arange(self.page_size, dtype=np.int32))
        flat: Ids = slots.reshape(-1).astype(np.int32, copy=False)
        return flat

    def alloc_extend(
        self, prefix_lens: IntArray, seq_lens: IntArray, last_loc: IntArray, extend_num_tokens: int | None = None
    ) -> Ids:
        """Slots for sequences that grow from `prefix_lens` to `seq_lens` tokens, packed: int32 `[sum(seq - prefix)]`.

        `last_loc` is the slot of each sequence's last token so far, -1 where it has none. A sequence first fills the
        rest of its last page, then takes whole new pages, the last one possibly in part:

            |-- prefix --|-- rest of its page --|-- new pages --|-- part of a new page --|
                         last_loc + 1 ...

        New pages: `sum(ceil(seq / P) - ceil(prefix / P))`. O(tokens), no loop over sequences. Raises OutOfPages,
        changing nothing.
        """
        prefix, seq, last = self.check_lengths(prefix_lens, seq_lens, last_loc, extend_num_tokens)
        pages = self.alloc_pages(num_new_pages(prefix, seq, self.page_size))
        return grown_slots(prefix, seq, last, pages, self.page_size)

    def alloc_decode(self, seq_lens: IntArray, last_loc: IntArray) -> Ids:
        """One more slot per sequence, int32 `[num_sequences]`; `seq_lens` count the new token.

        Only sequences that cross into a new page (`seq % P == 1`) cost an id. Raises OutOfPages, changing nothing.
        """
        slots, crosses = self.check_decode(seq_lens, last_loc)
        if len(crosses):
            slots[crosses] = self.alloc_pages(len(crosses)) * np.int32(self.page_size)
        return slots

    # -- giving back

    def free(self, free_index: IntArray) -> None:
        """Give back the pages of these token slots; a page goes back whole, whichever of its slots are named.

        Raises InvalidFree, changing nothing, if any of them is not out.
        """
        slots = np.asarray(free_index)
        if slots.dtype != np.int32 or slots.ndim != 1:
            slots = slots.astype(np.int64).reshape(-1)
        self.free_pages(self.pages_of(slots))

    def free_pages(self, page_ids: IdArray) -> None:
        """Give back distinct pages. Raises InvalidFree, changing nothing, if one is not out or is named twice."""
        if not len(page_ids):
            return
        self._out.take_back(page_ids, group=self.name)
        if self._group is not None:
            self._group.append(page_ids.astype(np.int32))
        elif self.need_sort:
            self._released.append(page_ids.astype(np.int32))
            self._num_released += len(page_ids)
        else:
            self._put_back(page_ids.astype(np.int32, copy=False))

    def free_group_begin(self) -> None:
        """Collect the frees that follow, so that `free_group_end` gives them back in one operation.

        A page freed inside a group is no longer out (freeing it again is an error) and not yet available.
        """
        assert self._group is None, "free groups do not nest"
        self._group = []

    def free_group_end(self) -> None:
        """Give back everything freed since `free_group_begin`."""
        assert self._group is not None, "free_group_end without free_group_begin"
        group, self._group = self._group, None
        if not group:
            return
        pages = np.concatenate(group)
        if self.need_sort:
            self._released.append(pages)
            self._num_released += len(pages)
        else:
            self._put_back(self._group_order(pages))

    # -- for the two kinds

    @abstractmethod
    def pages_of(self, slots: IdArray) -> IdArray:
        """The pages that `free` gives back for these slots, unchecked: not narrowed, so a foreign id stays foreign."""

    @abstractmethod
    def _put_back(self, pages: Ids) -> None:
        """Where freed pages go in the order of reuse."""

    def _group_order(self, pages: Ids) -> Ids:
        return pages

    # -- checks: each raises before anything has changed

    def check_room(self, num_pages: int) -> None:
        """Raises OutOfPages where `alloc_pages(num_pages)` would."""
        if num_pages < 0:
            raise InvalidInput(f"cannot allocate {num_pages} pages.")
        if num_pages > self.num_free_pages:
            raise OutOfPages(group=self.name, wanted=num_pages, free=self.num_free_pages)

    def check_decode(self, seq_lens: IntArray, last_loc: IntArray) -> tuple[Ids, npt.NDArray[np.intp]]:
        """The slots behind `last_loc`, a fresh array, and which sequences cross into a new page instead.

        Raises InvalidInput where `alloc_decode` would. It is called with every step, and reads each array once.
        """
        seq, last = np.asarray(seq_lens, dtype=np.int64).reshape(-1), np.asarray(last_loc).reshape(-1)
        if len(last) != len(seq) or np.count_nonzero(seq < 1) or np.count_nonzero((last - seq + 2) % self.page_size):
            self.check_lengths(seq - 1, seq, last)
        slots: Ids = last.astype(np.int32)
        slots += 1
        return slots, (slots % np.int32(self.page_size) == 0).nonzero()[0]

    def check_lengths(
        self, prefix_lens: IntArray, seq_lens: IntArray, last_loc: IntArray, num_tokens: int | None = None
    ) -> tuple[Longs, Longs, Longs]:
        """The three as int64 arrays. Raises InvalidInput where `alloc_extend` would."""
        prefix = np.asarray(prefix_lens, dtype=np.int64).reshape(-1)
        seq = np.asarray(seq_lens, dtype=np.int64).reshape(-1)
        last = np.asarray(last_loc, dtype=np.int64).reshape(-1)
        if not len(prefix) == len(seq) == len(last):
            raise InvalidInput(
                f"one length and one last slot per sequence: got {len(prefix)} prefixes, {len(seq)} lengths and "
                f"{len(last)} last slots."
            )
        if np.minimum.reduce(prefix, initial=0) < 0 or np.count_nonzero(seq < prefix):
            raise InvalidInput("a sequence cannot shrink: seq_lens must be at least prefix_lens, and those at least 0.")
        if np.count_nonzero((last + 1 - prefix) % self.page_size):
            raise InvalidInput(
                f"last_loc does not continue its prefix: (last_loc + 1) % {self.page_size} must equal "
                f"prefix_len % {self.page_size}."
            )
        if num_tokens is not None and num_tokens != (total := int((seq - prefix).sum())):
            raise InvalidInput(f"extend_num_tokens is {num_tokens}, but the lengths add up to {total} tokens.")
        return prefix, seq, last

    def check_out(self, page_ids: IdArray) -> None:
        """Raises InvalidFree where `free_pages(page_ids)` would."""
        if len(page_ids):
            self._out.check(page_ids, group=self.name)

    def _released_ids(self) -> Ids:
        return np.concatenate(self._released) if self._released else np.empty(0, dtype=np.int32)

    def _merge_released(self) -> None:
        everything = np.concatenate((self._free.to_array(), self._released_ids()))
        self._free = FreeList(np.sort(everything), self.num_pages)
        self._released = []
        self._num_released = 0


def num_new_pages(prefix: Longs, seq: Longs, page_size: int) -> int:
    """Pages that sequences take to grow from `prefix` to `seq` tokens."""
    return int((-(-seq // page_size)).sum() - (-(-prefix // page_size)).sum())


def grown_slots(prefix: Longs, seq: Longs, last: Longs, pages: Ids, page_size: int) -> Ids:
    """Slots of sequences that grow from `prefix` to `seq` tokens, packed: behind `last`, then in these new pages."""
    if page_size == 1:
        return pages
    if len(seq) == 1:
        count = int(seq[0] - prefix[0])
        rest = min(count, int(-prefix[0] % page_size))
        slots = np.empty(rest + len(pages) * page_size, dtype=np.int32)
        slots[:rest] = np.arange(last[0] + 1, last[0] + 1 + rest)
        whole = slots[rest:].reshape(len(pages), page_size)
        np.add.outer(pages * np.int32(page_size), np.arange(page_size, dtype=np.int32), out=whole)
        return slots[:count]
    counts = seq - prefix
    touched = np.where(counts > 0, -(-seq // page_size) - prefix // page_size, 0)  # pages that get tokens
    ends = np.cumsum(touched)
    ids = np.empty(int(ends[-1]) if len(ends) else 0, dtype=np.int64)
    old = np.zeros(len(ids), dtype=np.bool_)
    in_old_page = (touched > 0) & (prefix % page_size > 0)
    old[(ends - touched)[in_old_page]] = True
    ids[old] = last[in_old_page] // page_size
    ids[~old] = pages
    return slots_in_pages(ids, touched, prefix, seq, page_size)


def slots_in_pages(
    ids: Longs,
    counts: Longs,
    starts: Longs,
    stops: Longs,
    page_size: int,
) -> Ids:
    """Slots of tokens `starts[i]..stops[i]` of each sequence, packed, int32 `[sum(stops - starts)]`.

    `ids` are the `counts[i]` pages (or frames) that hold them, packed too. Work is done for each page, and for tokens
    only what it takes to write them out.
    """
    if not len(ids):
        return np.empty(0, dtype=np.int32)
    ends = np.cumsum(counts)
    nonempty = counts > 0
    first, last = (ends - counts)[nonempty], ends[nonempty] - 1
    lengths = np.full(len(ids), page_size, dtype=np.int64)
    skipped = starts[nonempty] % page_size
    lengths[first] -= skipped
    lengths[last] -= -stops[nonempty] % page_size
    offsets = ids * page_size
    offsets[first] += skipped
    offsets -= np.cumsum(lengths) - lengths
    slots = np.repeat(offsets.astype(np.int32), lengths)
    slots += np.arange(len(slots), dtype=np.int32)
    return slots
