"""Token slots in pages of any size."""

from __future__ import annotations

import numpy as np

from quire.memory.allocator.base import BaseTokenToKVPoolAllocator
from quire.memory.runs import IdArray, is_ascending
from quire.spec.ids import Ids


class PagedTokenToKVPoolAllocator(BaseTokenToKVPoolAllocator):
    """An allocator for pages of `page_size` tokens. Freed pages are reused first, in ascending order: a sequence that
    ends leaves runs of neighbours, and the next one gets them back as runs."""

    def __init__(self, size: int, page_size: int, *, need_sort: bool = False, name: str = "full") -> None:
        super().__init__(size, page_size, need_sort=need_sort, name=name)

    def pages_of(self, slots: IdArray) -> IdArray:
        """Distinct, in ascending order."""
        pages = slots // self.page_size
        return pages if is_ascending(pages) else np.unique(pages)

    def _put_back(self, pages: Ids) -> None:
        self._free.push_front(pages)

    def _group_order(self, pages: Ids) -> Ids:
        return np.sort(pages)
