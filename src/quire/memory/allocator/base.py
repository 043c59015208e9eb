"""Allocators of token slots, for pages of one token and for pages of any size. Bookkeeping only, on the host.

A token's slot is `page * page_size + offset`. Page 0, to which padded tokens write, is never allocated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from quire.errors import InvalidInput
from quire.memory.allocator.id_pool import IdPool, Reuse
from quire.memory.runs import IdArray, distinct
from quire.spec.ids import Ids

IntArray = npt.ArrayLike
Longs = npt.NDArray[np.int64]
RowIds = npt.NDArray[np.intp]


class TokenSlots(ABC):
    """Allocates token slots in whole pages, all or nothing, as int32 arrays on the host."""

    page_size: int

    @abstractmethod
    def alloc_pages(self, num_pages: int) -> Ids:
        """Allocate `num_pages` free pages; the caller owns them. O(num_pages). Raises OutOfPages, changing nothing."""

    def alloc(self, need_size: int) -> Ids:
        """Slots of `need_size` tokens, whole pages, int32. Raises OutOfPages or InvalidInput, changing nothing."""
        if need_size < 0 or need_size % self.page_size:
            raise InvalidInput(f"alloc takes whole pages of {self.page_size} tokens, got {need_size} tokens.")
        return slots_of(self.alloc_pages(need_size // self.page_size), self.page_size)

    def alloc_extend(
        self, prefix_lens: IntArray, seq_lens: IntArray, last_loc: IntArray, extend_num_tokens: int | None = None
    ) -> Ids:
        """Slots for sequences that grow from `prefix_lens` to `seq_lens` tokens, packed: int32 `[sum(seq - prefix)]`.

        `last_loc` is the slot of each sequence's last token, -1 for none. A sequence first fills its last page:

            |-- prefix --|-- rest of its page --|-- new pages --|-- part of a new page --|
                         last_loc + 1 ...

        New pages: `sum(ceil(seq / P) - ceil(prefix / P))`. O(tokens). Raises OutOfPages, and InvalidInput if lengths
        and slots are inconsistent; nothing has changed then.
        """
        prefix, seq, last = self._check_lengths(prefix_lens, seq_lens, last_loc, extend_num_tokens)
        self._check_continued(prefix, seq, last)
        size = self.page_size
        pages = self.alloc_pages(int((-(-seq // size)).sum() - (-(-prefix // size)).sum()))
        return pages if size == 1 else _grown_slots(prefix, seq, last, pages, size)

    def alloc_rows(self, table: Ids, rows: RowIds, before: Longs, after: Longs) -> Ids:
        """Allocate the new pages of rows that grow from `before[i]` to `after[i]` tokens, and return them row by row.
        `table` has the pages of each row, int32 `[all rows, width]`. Raises OutOfPages, changing nothing."""
        size = self.page_size
        inside = before % size
        if not np.count_nonzero(inside):
            slots = self.alloc(int(np.add.reduce(-(-after // size) - before // size)) * size)[::size]
        else:
            last = before - 1
            slots = table[rows, last // size] * np.int32(size) + (last % size).astype(np.int32)
            slots = self.alloc_extend(before, after, np.where(inside == 0, -1, slots))
            slots = slots[slots % size == 0]
        return slots if size == 1 else slots // np.int32(size)

    def pages_of_row(self, table: Ids, row: int, first: int, last: int) -> Ids:
        """Pages `first..last - 1` of a row of `table`, a copy."""
        return table[row, first:last].copy()

    def _check_continued(self, prefix: Longs, seq: Longs, last: Longs) -> None:  # noqa: B027 - without windows, all is there
        """Raises InvalidInput if a sequence continues in a page that has no room left."""

    def _check_lengths(
        self, prefix_lens: IntArray, seq_lens: IntArray, last_loc: IntArray, num_tokens: int | None
    ) -> tuple[Longs, Longs, Longs]:
        """The three arguments as int64 arrays. Raises InvalidInput in the cases of `alloc_extend`."""
        prefix, seq, last = _longs(prefix_lens), _longs(seq_lens), _longs(last_loc)
        if not len(prefix) == len(seq) == len(last):
            raise InvalidInput(
                f"one length and one last slot per sequence: got {len(prefix)} prefixes, {len(seq)} lengths and "
                f"{len(last)} last slots."
            )
        if np.count_nonzero(prefix < 0) or np.count_nonzero(seq < prefix):
            raise InvalidInput("a sequence cannot shrink: seq_lens must be at least prefix_lens, and those at least 0.")
        if np.count_nonzero((last + 1 - prefix) % self.page_size):
            raise InvalidInput(
                f"last_loc does not continue its prefix: (last_loc + 1) % {self.page_size} must equal "
                f"prefix_len % {self.page_size}."
            )
        if num_tokens is not None and num_tokens != (total := int((seq - prefix).sum())):
            raise InvalidInput(f"extend_num_tokens is {num_tokens}, but the lengths add up to {total} tokens.")
        return prefix, seq, last


class BaseTokenToKVPoolAllocator(TokenSlots):
    """`size` is in tokens, rounded down to whole pages; `name` is the group, for messages. With `need_sort`, freed
    pages wait until an allocation would fail without them. They are then merged in ascending order, for long runs.
    `ids` are those of a group of an arena, which decides which are next."""

    reuse: ClassVar[Reuse]

    def __init__(
        self, size: int, page_size: int, *, need_sort: bool = False, name: str = "full", ids: IdPool | None = None
    ) -> None:
        if page_size < 1:
            raise InvalidInput(f"page_size must be at least 1, got {page_size}.")
        if size < page_size:
            raise InvalidInput(
                f"a pool of {size} tokens holds no page of {page_size} tokens.", fix=f"make size at least {page_size}."
            )
        self.page_size = page_size
        self.num_pages = size // page_size
        self.size = self.num_pages * page_size
        self.need_sort = need_sort
        self.name = name
        self.ids = ids or IdPool(self.num_pages, "sorted" if need_sort else self.reuse, group=name)
        self.clear()

    @property
    def num_free_pages(self) -> int:
        """Pages that can be allocated."""
        return self.ids.num_free

    def available_size(self) -> int:
        """Free tokens, in whole pages."""
        return self.ids.num_free * self.page_size

    def clear(self) -> None:
        """Free all pages, in ascending order. An open free group ends, and its frees are dropped."""
        self.ids.clear()
        self._group: list[Ids] | None = None

    def alloc_pages(self, num_pages: int) -> Ids:
        return self.ids.take(num_pages)

    def free(self, free_index: IntArray) -> None:
        """Free the whole pages of these token slots. Raises InvalidFree, changing nothing, if one is not allocated."""
        self.free_pages(self.pages_of(slot_array(free_index)))

    def free_pages(self, page_ids: IdArray) -> None:
        """Free distinct pages. Raises InvalidFree, changing nothing, if one is not allocated or is given twice."""
        self.ids.take_back(page_ids)
        if self._group is None:
            self.ids.put(page_ids.astype(np.int32, copy=False))
        else:
            self._group.append(page_ids.astype(np.int32))

    def free_group_begin(self) -> None:
        """Collect the frees that follow until `free_group_end`. Their pages are neither allocated nor free."""
        assert self._group is None, "free groups do not nest"
        self._group = []

    def free_group_end(self) -> None:
        """Free everything collected since `free_group_begin`, in one operation."""
        assert self._group is not None, "free_group_end without free_group_begin"
        group, self._group = self._group, None
        if group:
            pages = np.concatenate(group)
            self.ids.put(np.sort(pages) if self.reuse == "first" else pages)

    @abstractmethod
    def pages_of(self, slots: IdArray) -> IdArray:
        """The pages that `free` frees for these slots, unchecked, in the dtype of `slots`."""


class TokenToKVPoolAllocator(BaseTokenToKVPoolAllocator):
    """Pages of one token. Freed slots are reused last, so that a stale reader meets new content late."""

    reuse = "last"

    def __init__(self, size: int, *, need_sort: bool = False, name: str = "full", ids: IdPool | None = None) -> None:
        super().__init__(size, 1, need_sort=need_sort, name=name, ids=ids)

    def pages_of(self, slots: IdArray) -> IdArray:
        """The slots themselves; duplicates stay, and `free` refuses them."""
        return slots


class PagedTokenToKVPoolAllocator(BaseTokenToKVPoolAllocator):
    """Freed pages are reused first, in ascending order, so that runs of neighbouring pages stay runs."""

    reuse = "first"

    def pages_of(self, slots: IdArray) -> IdArray:
        """Distinct pages, in ascending order."""
        return distinct(slots // self.page_size)


def token_allocator(
    size: int, page_size: int, *, need_sort: bool = False, name: str = "full", ids: IdPool | None = None
) -> BaseTokenToKVPoolAllocator:
    """The allocator for pages of that size."""
    if page_size == 1:
        return TokenToKVPoolAllocator(size, need_sort=need_sort, name=name, ids=ids)
    return PagedTokenToKVPoolAllocator(size, page_size, need_sort=need_sort, name=name, ids=ids)


def slot_array(index: IntArray) -> IdArray:
    """The slots as a flat array, not narrowed, so that an invalid id stays invalid."""
    slots = np.asarray(index)
    return slots if slots.dtype == np.int32 and slots.ndim == 1 else slots.astype(np.int64).reshape(-1)


def slots_of(pages: Ids, page_size: int) -> Ids:
    """All slots of these pages, int32 `[len(pages) * page_size]`; the array itself for pages of one token."""
    if page_size == 1:
        return pages
    slots: Ids = np.add.outer(pages * np.int32(page_size), np.arange(page_size, dtype=np.int32)).reshape(-1)
    return slots


def slots_in_pages(ids: IdArray, counts: Longs, starts: Longs, stops: Longs, page_size: int) -> Ids:
    """Slots of tokens `starts[i]..stops[i]` of each sequence, packed, int32 `[sum(stops - starts)]`. `ids` are their
    pages or frames, packed as well, `counts[i]` for each sequence."""
    if not len(ids):
        return np.empty(0, dtype=np.int32)
    if len(counts) == 1:
        before = int(starts[0]) % page_size
        return slots_of(ids.astype(np.int32, copy=False), page_size)[before : before + int(stops[0] - starts[0])]
    ends = np.cumsum(counts)
    nonempty = counts > 0
    first, last = (ends - counts)[nonempty], ends[nonempty] - 1
    lengths = np.full(len(ids), page_size, dtype=np.int64)
    skipped = starts[nonempty] % page_size
    lengths[first] -= skipped
    lengths[last] -= -stops[nonempty] % page_size
    offsets = ids.astype(np.int64) * page_size
    offsets[first] += skipped
    offsets -= np.cumsum(lengths) - lengths
    slots = np.repeat(offsets.astype(np.int32), lengths)
    slots += np.arange(len(slots), dtype=np.int32)
    return slots


def _grown_slots(prefix: Longs, seq: Longs, last: Longs, pages: Ids, page_size: int) -> Ids:
    """Slots of tokens `prefix[i]..seq[i]` of each sequence, packed: behind slot `last[i]`, then in new `pages`."""
    touched = np.where(seq > prefix, -(-seq // page_size) - prefix // page_size, 0)  # pages that get tokens
    ends = np.cumsum(touched)
    ids = np.empty(int(ends[-1]) if len(ends) else 0, dtype=np.int64)
    old = np.zeros(len(ids), dtype=np.bool_)
    in_old_page = (touched > 0) & (prefix % page_size > 0)
    old[(ends - touched)[in_old_page]] = True
    ids[old] = last[in_old_page] // page_size
    ids[~old] = pages
    return slots_in_pages(ids, touched, prefix, seq, page_size)


def _longs(values: IntArray) -> Longs:
    array = np.asarray(values, dtype=np.int64)
    return array if array.ndim == 1 else array.reshape(-1)
