"""Allocators of token slots, for pages of one token and for pages of any size. Bookkeeping only, on the host.

Ids of pages start at 1: page 0 is where padded tokens write, and is never handed out.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, TypeAlias

import numpy as np

from quire.errors import InvalidInput
from quire.memory.allocator.id_pool import IdPool, Reuse
from quire.memory.allocator.slots import IntArray, TokenSlots, slot_array
from quire.memory.runs import IdArray, distinct
from quire.spec.ids import Bools, Ids

AllocatorState: TypeAlias = IdPool
"""What `backup_state` returns. Opaque: only for `restore_state` of the allocator that made it."""


class BaseTokenToKVPoolAllocator(TokenSlots):
    """Which pages are free and which are out.

    `size` is in tokens and is floored to whole pages. `name` is the group it serves, for messages. With `need_sort`,
    freed pages are set aside and merged in ascending order when an allocation would otherwise fall short, so that long
    runs of neighbouring pages come back.
    """

    reuse: ClassVar[Reuse]

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

    @property
    def num_free_pages(self) -> int:
        """Pages that `alloc_pages` could hand out now."""
        return self.ids.num_free

    def available_size(self) -> int:
        """Tokens that could be handed out now, in whole pages."""
        return self.ids.num_free * self.page_size

    def is_out(self, page_ids: Ids | slice) -> Bools:
        """Per page id: whether it is handed out."""
        return self.ids.is_out(page_ids)

    def clear(self) -> None:
        """Forget everything handed out: all pages are free, in ascending order, and no free group is open."""
        self.ids = IdPool(self.num_pages, "sorted" if self.need_sort else self.reuse, group=self.name)
        self._group: list[Ids] | None = None

    def backup_state(self) -> AllocatorState:
        """A snapshot for `restore_state`. O(num_pages). Not inside a free group."""
        assert self._group is None, "backup inside a free group"
        return self.ids.copy()

    def restore_state(self, state: AllocatorState) -> None:
        """Return to exactly what `backup_state` saw: everything handed out or freed since is undone."""
        assert state.size == self.num_pages, "a snapshot of another allocator"
        self.ids = state.copy()
        self._group = None

    def alloc_pages(self, num_pages: int) -> Ids:
        return self.ids.take(num_pages)

    def free(self, free_index: IntArray) -> None:
        """Give back the pages of these token slots; a page goes back whole, whichever of its slots are named.

        Raises InvalidFree, changing nothing, if any of them is not out.
        """
        self.free_pages(self.pages_of(slot_array(free_index)))

    def free_pages(self, page_ids: IdArray) -> None:
        """Give back distinct pages. Raises InvalidFree, changing nothing, if one is not out or is named twice."""
        self.ids.take_back(page_ids)
        if self._group is None:
            self.ids.put(page_ids.astype(np.int32, copy=False))
        else:
            self._group.append(page_ids.astype(np.int32))

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
        if group:
            pages = np.concatenate(group)
            self.ids.put(np.sort(pages) if self.reuse == "first" else pages)

    @abstractmethod
    def pages_of(self, slots: IdArray) -> IdArray:
        """The pages that `free` gives back for these slots, unchecked: not narrowed, so a foreign id stays foreign."""


class TokenToKVPoolAllocator(BaseTokenToKVPoolAllocator):
    """An allocator whose page is one token. Freed slots are reused last, so a stale reader meets them late."""

    reuse = "last"

    def __init__(self, size: int, *, need_sort: bool = False, name: str = "full") -> None:
        super().__init__(size, 1, need_sort=need_sort, name=name)

    def pages_of(self, slots: IdArray) -> IdArray:
        """The slots themselves: a slot named twice is a page freed twice."""
        return slots


class PagedTokenToKVPoolAllocator(BaseTokenToKVPoolAllocator):
    """An allocator for pages of `page_size` tokens. Freed pages are reused first, in ascending order: a sequence that
    ends leaves runs of neighbours, and the next one gets them back as runs."""

    reuse = "first"

    def pages_of(self, slots: IdArray) -> IdArray:
        """Distinct, in ascending order."""
        return distinct(slots // self.page_size)


def token_allocator(
    size: int, page_size: int, *, need_sort: bool = False, name: str = "full"
) -> BaseTokenToKVPoolAllocator:
    """The allocator for pages of that size."""
    if page_size == 1:
        return TokenToKVPoolAllocator(size, need_sort=need_sort, name=name)
    return PagedTokenToKVPoolAllocator(size, page_size, need_sort=need_sort, name=name)
