"""PrefixHit: how much of a prompt is cached. RequestKV: the pages, lengths and lease of one running request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.observe.explain import Explanation
from quire.prefix.match import Match
from quire.prefix.node import Lease
from quire.spec.events import Namespace
from quire.spec.ids import Ids
from quire.spec.rank import Rank
from quire.tiers.transfer import Transfer


class CacheUse(NamedTuple):
    """The cached tokens of a prompt. Of these, parts came from host memory, from storage and from another engine, which
    computed them for this request; the others were on the device."""

    num_cached_tokens: int = 0
    num_host_tokens: int = 0
    num_storage_tokens: int = 0
    num_peer_tokens: int = 0


@dataclass(slots=True)
class Choice:
    """How many pages of a cached prefix are reused, and what is loaded for that."""

    num_pages: int
    limited_by: str = ""  # a group that limits the reuse
    loads: Sequence[int] = ()  # frames to load from the host, by group
    host_pages: int = 0  # pages whose reuse needs these loads
    storage_pages: int = 0  # those of `host_pages` fetched from storage and not used since
    declined_pages: int = 0  # pages on the host that are computed again because that is faster
    weighed: tuple[int, int] | None = None  # tokens and bytes of that comparison
    stands: Callable[[], bool] = lambda: True  # whether the same choice would be made again


@dataclass(slots=True, eq=False)
class PrefixHit:
    """How much of a prompt is cached, in whole pages. A snapshot: only a request that begins on it holds its pages."""

    match: Match
    choice: Choice
    num_pages: int  # reusable; less than matched if a group cannot resume there
    num_tokens: int  # the tokens of these pages
    num_dropped: int  # `Admission.num_dropped` at that time
    num_changes: int  # `KVCache.num_changes` at that time
    most_tokens: int  # that its request lets come from the cache
    lacks_room: bool = False  # so nothing of it is reused: its request needs the bytes

    @property
    def pages(self) -> Ids:
        """Ids of the reusable pages, in order; a view that must not be written."""
        return self.match.pages[: self.num_pages]

    @property
    def num_evictable(self) -> int:
        """Reusable pages that are evictable now; a request that begins on them pins them."""
        return self.match.num_evictable(self.num_pages)


@dataclass(slots=True, eq=False)
class RequestKV:
    """A row of page ids in the cache's table, the lengths of its parts, and the lease on its shared part.

        |-- protected: cached, leased ------|-- private --------------------|
        0                                   protected    committed     allocated      (tokens)

    protected <= committed <= allocated, and protected is a whole number of pages. The steps that wrote `committed`
    tokens have settled. Made by `KVCache.begin`, ended by `KVCache.finish`.
    """

    row: int
    namespace: Namespace
    lease: Lease
    use: CacheUse  # the hit at its start
    num_prompt: int  # tokens of the prompt; tokens committed after them are generated
    label: str  # its name in explanations
    explanation: Explanation | None  # why no more is cached, if the cache explains
    shares: bool  # whether its pages become reusable: not after a flush of its namespace
    loads: list[Transfer]  # loads to the device, of pages of its prefix
    end: object | None = None  # what the eviction policy has of it, when it has ended (`RadixCache.ended`)
    is_held: bool = False  # a session holds it between two turns: no request runs in its row
    marks: dict[int, Rank] = field(default_factory=dict)  # where to store resume points, in pages, and their rank
    last_mark: int = 0  # the largest of them

    @property
    def num_cached(self) -> int:
        """Tokens of the hit at its start."""
        return self.use.num_cached_tokens

    @property
    def alive(self) -> bool:
        """Whether the request is still running."""
        return self.row >= 0

    @property
    def is_ready(self) -> bool:
        """Whether a step may be launched for it: its prefix is resident, or checked and arriving."""
        if self.loads:
            self.loads = [move for move in self.loads if not move.done or not move.is_whole]
        return not self.loads or all(move.checked for move in self.loads)

    @property
    def has_failed(self) -> bool:
        """Whether a part of its prefix is lost: then the request has to `finish` without tokens and begin again."""
        return bool(self.loads) and any(move.done and not move.is_whole for move in self.loads)

    def mark_ends(self, num_cached: int, num_matched: int, end: int) -> None:
        """Mark the prompt's `end` and the end of its match, in pages, if these lie beyond `num_cached`."""
        ends = {end: Rank.MARKED, min(num_matched, end): Rank.USED}
        self.marks |= {place: rank for place, rank in ends.items() if place > num_cached}
        self.last_mark = max(self.marks, default=0)
