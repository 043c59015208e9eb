"""PlainCache: what a prefix cache is, with sets and lists only. The stateful check compares the real one with it.

It shares no code with the cache: no tree, no rows, no free lists. A cached page is the tuple of all tokens up to its
end; pages are only counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

Prefix = tuple[Hashable, tuple[int, ...]]  # namespace, tokens


@dataclass(eq=False)
class Sequence:
    """One request: its tokens, and how many of them are allocated, launched, settled, committed."""

    kv: Any
    namespace: Hashable
    tokens: list[int]
    pinned: int  # pages
    allocated: int
    launched: int
    settled: int
    committed: int
    begun: int  # tokens of the hit


@dataclass
class PlainCache:
    num_pages: int
    page_size: int
    cached: set[Prefix] = field(default_factory=set)
    live: list[Sequence] = field(default_factory=list)
    open: set[int] = field(default_factory=set)  # steps in flight
    waiting: list[tuple[frozenset[int], int, Prefix]] = field(default_factory=list)  # for steps: pages, leased prefix

    def prefix(self, namespace: Hashable, tokens: Any, num_pages: int) -> Prefix:
        return namespace, tuple(tokens[: num_pages * self.page_size])

    def matched(self, namespace: Hashable, tokens: Any) -> int:
        pages = range(1, len(tokens) // self.page_size + 1)
        hits = [self.prefix(namespace, tokens, n) in self.cached for n in pages]
        return [*hits, False].index(False)

    def leases(self) -> Counter[Prefix]:
        """How many leases hold each cached page."""
        held = [self.prefix(s.namespace, s.tokens, s.pinned) for s in self.live] + [
            lease for _, _, lease in self.waiting
        ]
        ends = [(ns, tokens[:end]) for ns, tokens in held for end in range(1, len(tokens) + 1)]
        return Counter(end for end in ends if len(end[1]) % self.page_size == 0)

    def private(self) -> int:
        return sum(-(-s.allocated // self.page_size) - s.pinned for s in self.live)

    def moving(self) -> int:
        return sum(pages for _, pages, _ in self.waiting)

    def free(self) -> int:
        return self.num_pages - len(self.cached) - self.private() - self.moving()

    def evictable(self) -> int:
        return len(self.cached - set(self.leases()))

    def commit(self, s: Sequence, num_tokens: int) -> int:
        """Returns how many of its pages were duplicates."""
        ends = range(s.pinned + 1, num_tokens // self.page_size + 1)
        pages = {self.prefix(s.namespace, s.tokens, n) for n in ends}
        duplicates = len(pages & self.cached)
        self.cached |= pages
        s.pinned, s.committed = s.pinned + len(pages), num_tokens
        self.retire(duplicates, (s.namespace, ()))
        return duplicates

    def finish(self, s: Sequence) -> None:
        self.live.remove(s)
        self.retire(-(-s.allocated // self.page_size) - s.pinned, self.prefix(s.namespace, s.tokens, s.pinned))

    def retire(self, num_pages: int, lease: Prefix) -> None:
        if self.open:
            self.waiting.append((frozenset(self.open), num_pages, lease))

    def close(self, step: int) -> None:
        self.open.remove(step)
        self.waiting = [entry for entry in self.waiting if entry[0] & self.open]
