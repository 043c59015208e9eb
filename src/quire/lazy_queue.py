"""LazyQueue: a queue for eviction and expiry that removes invalid entries lazily.

The owner of an item makes its entry invalid by giving the item another ticket, or none, which costs the queue nothing.
Invalid entries are removed before they outnumber the valid ones. With keys, one pass removes them, and an operation
costs O(log n) amortised. Without keys, every `push` checks a few entries, so that no operation takes long:

    pops --[ first: checked ]--[ rest: not checked yet ]-- pushes
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")

_SLACK = 64
_CHECKED = 4  # entries checked per push: more than the push adds, so that a pass ends


class Entry(NamedTuple, Generic[T]):
    """An item may have several entries with different tickets: at most one of them is valid."""

    key: Any
    ticket: int
    item: T


class LazyQueue(Generic[T]):
    """Order: first in, first out; or `by_key`, the smallest key first, then the smallest ticket.

    `live(ticket, item)` returns the valid part of an entry: the item, a part of it, or None. `size(item)` is the number
    of its parts (default 1).
    """

    __slots__ = ("_by_key", "_first", "_live", "_rest", "_size", "_size_cleaned", "_sum")

    def __init__(
        self,
        live: Callable[[int, T], T | None],
        *,
        by_key: bool = False,
        size: Callable[[T], int] | None = None,
    ) -> None:
        self._live = live
        self._by_key = by_key
        self._size = size
        self._first: Any = [] if by_key else deque()
        self._rest: deque[Any] = deque()  # empty by key, and if no pass is running
        self._sum = 0  # sizes of all entries
        self._size_cleaned = 0  # its size after the last pass

    def __len__(self) -> int:
        """Sizes of all entries, valid or not: at most 90 more than three times the valid ones of the last pass."""
        return self._sum

    def __iter__(self) -> Iterator[T]:
        """Valid items, in no order. O(entries)."""
        return (
            found for entry in chain(self._first, self._rest) if (found := self._live(entry[1], entry[2])) is not None
        )

    def push(self, ticket: int, item: T, key: Any = 0) -> None:
        """Add an entry. Tickets ascend; older entries of the same item must be invalid."""
        entry = (key, ticket, item)
        if self._by_key:
            heapq.heappush(self._first, entry)
        else:
            (self._rest or self._first).append(entry)
        self._sum += 1 if self._size is None else self._size(item)
        if self._rest:
            self._check_some()
        elif self._sum > _SLACK + 2 * self._size_cleaned:
            if self._by_key:
                self._clean()
            else:
                self._first, self._rest = deque(), self._first

    def pop(self) -> Entry[T] | None:
        """Remove and return the first valid entry; None if there is none."""
        while (entry := self._take()) is not None:
            key, ticket, item = entry
            self._sum -= 1 if self._size is None else self._size(item)
            found = self._live(ticket, item)
            if found is not None:
                return Entry(key, ticket, found)
        return None

    def _take(self) -> Any:
        """Remove and return the next entry, valid or not; None if there is none."""
        if self._by_key:
            return heapq.heappop(self._first) if self._first else None
        entries = self._first or self._rest
        return entries.popleft() if entries else None

    def put_back(self, entry: Entry[T]) -> None:
        """Put the rest of the last popped entry back in its place."""
        assert not self._by_key
        self._first.appendleft(entry)
        self._sum += 1 if self._size is None else self._size(entry.item)

    def _check_some(self) -> None:
        """Check more entries of the pass that runs, and remove invalid ones."""
        for _ in range(min(_CHECKED, len(self._rest))):
            key, ticket, item = self._rest.popleft()
            found = self._live(ticket, item)
            self._sum -= 1 if self._size is None else self._size(item)
            if found is not None:
                self._sum += 1 if self._size is None else self._size(found)
                self._first.append((key, ticket, found))
        if not self._rest:
            self._size_cleaned = self._sum

    def _clean(self) -> None:
        kept = [
            (key, ticket, found) for key, ticket, item in self._first if (found := self._live(ticket, item)) is not None
        ]
        heapq.heapify(kept)
        self._first = kept
        self._sum = self._size_cleaned = len(kept) if self._size is None else sum(map(self._size, (e[2] for e in kept)))
