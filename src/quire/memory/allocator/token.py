"""Token slots one by one: page size 1."""

from __future__ import annotations

from quire.memory.allocator.base import BaseTokenToKVPoolAllocator
from quire.memory.runs import IdArray
from quire.spec.ids import Ids


class TokenToKVPoolAllocator(BaseTokenToKVPoolAllocator):
    """An allocator whose page is one token. Freed slots are reused last, so a stale reader meets them late."""

    def __init__(self, size: int, *, need_sort: bool = False, name: str = "full") -> None:
        super().__init__(size, 1, need_sort=need_sort, name=name)

    def pages_of(self, slots: IdArray) -> IdArray:
        """The slots themselves: a slot named twice is a page freed twice."""
        return slots

    def _put_back(self, pages: Ids) -> None:
        self._free.push_back(pages)
