"""LazyQueue: an order in which things go. Entries that no longer count are dropped when they are met.

To leave the queue costs nothing: the item's owner makes its entry invalid, by another ticket or none. Invalid entries
are cleaned out before they are most of the queue, so that every operation costs O(1), or O(log n) by key, amortised.
Every order of eviction and of expiry is one of these.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")

_SLACK = 64


class Entry(NamedTuple, Generic[T]):
    """`ticket` tells apart the entries of one item: at most one of them counts."""

    key: Any
    ticket: int
    item: T


class LazyQueue(Generic[T]):
    """First in, first out; by key, where `by_key`, the smallest first and equal keys in the order of their tickets; or
    `newest_first`.

    `live(ticket, item)` is what of an item an entry still stands for: the item, a part of it, or None. `size(item)` is
    how much of the queue it takes: 1, or the number of its parts.
    """

    __slots__ = ("_by_key", "_entries", "_live", "_newest_first", "_size", "_size_cleaned", "_sum")

    def __init__(
        self,
        live: Callable[[int, T], T | None],
        *,
        by_key: bool = False,
        newest_first: bool = False,
        size: Callable[[T], int] | None = None,
    ) -> None:
        self._live = live
        self._by_key = by_key
        self._newest_first = newest_first
        self._size = size
        self._entries: Any = [] if by_key else deque()
        self._sum = 0  # sizes of all entries
        self._size_cleaned = 0  # the same, after the last cleaning

    def __len__(self) -> int:
        """Sizes of all entries, of which some may not count any more: at most 64 more than twice those that did when
        they were last counted."""
        return self._sum

    def __iter__(self) -> Iterator[T]:
        """What counts, in no order. O(entries)."""
        return (found for entry in self._entries if (found := self._live(entry[1], entry[2])) is not None)

    def push(self, ticket: int, item: T, key: Any = 0) -> None:
        """Add an entry. Tickets ascend; an older entry of the same item should not count from now on."""
        entry = (key, ticket, item)
        if self._by_key:
            heapq.heappush(self._entries, entry)
        else:
            self._entries.append(entry)
        self._sum += 1 if self._size is None else self._size(item)
        if self._sum > _SLACK + 2 * self._size_cleaned:
            self._clean()

    def pop(self) -> Entry[T] | None:
        """Take out the first entry that counts; None where there is none."""
        entries = self._entries
        while entries:
            if self._by_key:
                key, ticket, item = heapq.heappop(entries)
            else:
                key, ticket, item = entries.pop() if self._newest_first else entries.popleft()
            self._sum -= 1 if self._size is None else self._size(item)
            found = self._live(ticket, item)
            if found is not None:
                return Entry(key, ticket, found)
        return None

    def first_key(self, default: Any) -> Any:
        """By key: that of the first entry that counts, which stays; `default` where there is none."""
        while self._entries:
            key, ticket, item = self._entries[0]
            if self._live(ticket, item) is not None:
                return key
            heapq.heappop(self._entries)
            self._sum -= 1 if self._size is None else self._size(item)
        return default

    def put_back(self, entry: Entry[T]) -> None:
        """What is left of the entry that `pop` gave last goes back to its place."""
        assert not self._by_key
        if self._newest_first:
            self._entries.append(entry)
        else:
            self._entries.appendleft(entry)
        self._sum += 1 if self._size is None else self._size(entry.item)

    def clear(self) -> None:
        """Drop every entry."""
        self._entries.clear()
        self._sum = self._size_cleaned = 0

    def _clean(self) -> None:
        size, kept = 0, []
        for key, ticket, item in self._entries:
            found = self._live(ticket, item)
            if found is not None:
                kept.append((key, ticket, found))
                size += 1 if self._size is None else self._size(found)
        self._entries = kept if self._by_key else deque(kept)
        if self._by_key:
            heapq.heapify(self._entries)
        self._sum = self._size_cleaned = size
