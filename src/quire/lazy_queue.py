"""LazyQueue: an order in which things go. Entries that no longer count are dropped when they are met.

To leave the queue costs nothing: the item's owner makes its entry invalid, by another ticket or none. Invalid entries
are cleaned out before they are most of the queue. By key that is done at once, and an operation costs O(log n),
amortised; otherwise a few entries are looked at with every `push`, so that no operation takes long:

    pops from here --[ first: looked at ]--[ rest: not looked at yet, in segments ]-- pushes, newest pops

Every order of eviction and of expiry is one of these.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")

_SLACK = 64
_LOOKED_AT = 4  # entries with each push: one more is added meanwhile, so this ends


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

    __slots__ = ("_by_key", "_first", "_live", "_newest_first", "_rest", "_size", "_size_cleaned", "_sum")

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
        self._first: Any = [] if by_key else deque()
        self._rest: deque[deque[Any]] = deque()  # empty by key, and where no cleaning is under way
        self._sum = 0  # sizes of all entries
        self._size_cleaned = 0  # the same, after the last cleaning

    def __len__(self) -> int:
        """Sizes of all entries, of which some may not count any more: at most 90 more than three times those that did
        when they were last counted."""
        return self._sum

    def __iter__(self) -> Iterator[T]:
        """What counts, in no order. O(entries)."""
        return (
            found for entry in chain(self._first, *self._rest) if (found := self._live(entry[1], entry[2])) is not None
        )

    def push(self, ticket: int, item: T, key: Any = 0) -> None:
        """Add an entry. Tickets ascend; an older entry of the same item should not count from now on."""
        entry = (key, ticket, item)
        if self._by_key:
            heapq.heappush(self._first, entry)
        else:
            (self._rest[-1] if self._rest else self._first).append(entry)
        self._sum += 1 if self._size is None else self._size(item)
        if self._rest:
            self.tidy(_LOOKED_AT)
        elif self._sum > _SLACK + 2 * self._size_cleaned:
            if self._by_key:
                self._clean()
            else:
                self._look_again()

    def pop(self) -> Entry[T] | None:
        """Take out the first entry that counts; None where there is none."""
        while (entry := self._take()) is not None:
            key, ticket, item = entry
            self._sum -= 1 if self._size is None else self._size(item)
            found = self._live(ticket, item)
            if found is not None:
                return Entry(key, ticket, found)
        return None

    def _take(self) -> Any:
        """The next entry, whether it counts or not; None where there is none."""
        if self._by_key:
            return heapq.heappop(self._first) if self._first else None
        if self._newest_first:
            while self._rest:
                if self._rest[-1]:
                    return self._rest[-1].pop()
                self._rest.pop()
            return self._first.pop() if self._first else None
        if self._first:
            return self._first.popleft()
        while self._rest:
            if self._rest[0]:
                return self._rest[0].popleft()
            self._rest.popleft()
        return None

    def first_key(self, default: Any) -> Any:
        """By key: that of the first entry that counts, which stays; `default` where there is none."""
        while self._first:
            key, ticket, item = self._first[0]
            if self._live(ticket, item) is not None:
                return key
            heapq.heappop(self._first)
            self._sum -= 1 if self._size is None else self._size(item)
        return default

    def put_back(self, entry: Entry[T]) -> None:
        """What is left of the entry that `pop` gave last goes back to its place."""
        assert not self._by_key
        if self._newest_first:
            (self._rest[-1] if self._rest else self._first).append(entry)
        else:
            self._first.appendleft(entry)
        self._sum += 1 if self._size is None else self._size(entry.item)

    def join(self, later: LazyQueue[T]) -> None:
        """All of another queue comes behind all of this one, and the other is not used any more. O(1), and `tidy` has
        work to do."""
        assert not self._by_key
        if not self._rest:
            self._look_again()
        self._rest.append(later._first)
        self._rest += later._rest
        self._sum += later._sum

    def tidy(self, num_entries: int) -> bool:
        """Look at so many entries more, and drop those that do not count; whether all have been looked at."""
        for _ in range(num_entries):
            while self._rest and not self._rest[0]:
                self._rest.popleft()
            if not self._rest:
                self._size_cleaned = self._sum
                return True
            key, ticket, item = self._rest[0].popleft()
            found = self._live(ticket, item)
            self._sum -= 1 if self._size is None else self._size(item)
            if found is not None:
                self._sum += 1 if self._size is None else self._size(found)
                self._first.append((key, ticket, found))
        return False

    def clear(self) -> None:
        """Drop every entry."""
        self._first.clear()
        self._rest.clear()
        self._sum = self._size_cleaned = 0

    def _look_again(self) -> None:
        self._rest, self._first = deque((self._first,)), deque()

    def _clean(self) -> None:
        kept = [
            (key, ticket, found) for key, ticket, item in self._first if (found := self._live(ticket, item)) is not None
        ]
        heapq.heapify(kept)
        self._first = kept
        self._sum = self._size_cleaned = len(kept) if self._size is None else sum(map(self._size, (e[2] for e in kept)))
