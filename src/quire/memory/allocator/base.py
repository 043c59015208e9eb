"""Allocators of token slots, for pages of one token and for pages of any size. Bookkeeping only, on the host.

Page 0, to which padded tokens write, is never handed out.
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
"""What `backup_state` returns. Opaque: only for `restore_state` of the same allocator."""


class BaseTokenToKVPoolAllocator(TokenSlots):
    """Which pages are free and which are out.

    `size` is in tokens, floored to whole pages; `name` is the group, for messages. With `need_sort`, freed pages wait
    until an allocation would fall short, and are then merged in ascending order, which gives long runs.
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
        """Pages that are free."""
        return self.ids.num_free

    def available_size(self) -> int:
        """Free tokens, in whole pages."""
        return self.ids.num_free * self.page_size

    def is_out(self, page_ids: Ids | slice) -> Bools:
        """Per page id: whether it is handed out."""
        return self.ids.is_out(page_ids)

    def clear(self) -> None:
        """Free all pages, in ascending order, and close a free group without its frees."""
        self.ids = IdPool(self.num_pages, "sorted" if self.need_sort else self.reuse, group=self.name)
        self._group: list[Ids] | None = None

    def backup_state(self) -> AllocatorState:
        """A snapshot for `restore_state`. O(num_pages). Not inside a free group."""
        assert self._group is None, "backup inside a free group"
        return self.ids.copy()

    def restore_state(self, state: AllocatorState) -> None:
        """Return to the state that `backup_state` saw, without a free group."""
        assert state.size == self.num_pages, "a snapshot of another allocator"
        self.ids = state.copy()
        self._group = None

    def alloc_pages(self, num_pages: int) -> Ids:
        return self.ids.take(num_pages)

    def free(self, free_index: IntArray) -> None:
        """Free the pages of these token slots, whole. Raises InvalidFree, changing nothing, if one is not out."""
        self.free_pages(self.pages_of(slot_array(free_index)))

    def free_pages(self, page_ids: IdArray) -> None:
        """Free distinct pages. Raises InvalidFree, changing nothing, if one is not out or is named twice."""
        self.ids.take_back(page_ids)
        if self._group is None:
            self.ids.put(page_ids.astype(np.int32, copy=False))
        else:
            self._group.append(page_ids.astype(np.int32))

    def free_group_begin(self) -> None:
        """Collect the frees that follow until `free_group_end`. Their pages are neither out nor free meanwhile."""
        assert self._group is None, "free groups do not nest"
        self._group = []

    def free_group_end(self) -> None:
        """Make everything freed since `free_group_begin` free, in one operation."""
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

    def __init__(self, size: int, *, need_sort: bool = False, name: str = "full") -> None:
        super().__init__(size, 1, need_sort=need_sort, name=name)

    def pages_of(self, slots: IdArray) -> IdArray:
        """The slots themselves; duplicates stay, and `free` refuses them."""
        return slots


class PagedTokenToKVPoolAllocator(BaseTokenToKVPoolAllocator):
    """Pages of `page_size` tokens. Freed pages are reused first, in ascending order, so that runs of neighbouring pages
    stay runs."""

    reuse = "first"

    def pages_of(self, slots: IdArray) -> IdArray:
        """Distinct pages, in ascending order."""
        return distinct(slots // self.page_size)


def token_allocator(
    size: int, page_size: int, *, need_sort: bool = False, name: str = "full"
) -> BaseTokenToKVPoolAllocator:
    """The allocator for pages of that size."""
    if page_size == 1:
        return TokenToKVPoolAllocator(size, need_sort=need_sort, name=name)
    return PagedTokenToKVPoolAllocator(size, page_size, need_sort=need_sort, name=name)
