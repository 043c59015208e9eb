"""RequestKV: what one running request holds of the cache. Opaque above the cache."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.observe.explain import Explanation
from quire.prefix.node import Lease
from quire.spec.events import Namespace
from quire.spec.rank import Rank
from quire.tiers.transfer import Transfer


@dataclass(slots=True, eq=False)
class RequestKV:
    """A row of page ids in the cache's table, the lengths of its parts, and the lease on its shared part.

        |-- protected: the tree's, leased --|-- private --------------------|
        0                                   protected    committed     allocated      (tokens)

    protected <= committed <= allocated, and protected is a whole number of pages. `committed` tokens have settled: the
    step that wrote them has finished. Made by `KVCache.begin`, ended by `KVCache.finish`, and dead after that.
    """

    row: int
    namespace: Namespace
    lease: Lease
    num_cached: int  # tokens of the hit it began with
    num_host: int  # of these, tokens that came from host memory
    num_storage: int  # and from storage
    num_prompt: int  # tokens that it began with; what it commits beyond them was generated
    label: str  # what others call it
    explanation: Explanation | None  # why it was no more, where the cache explains
    shares: bool  # whether what it computes becomes reusable: not any more once its namespace is flushed
    loads: list[Transfer]  # that bring pages of its prefix to the device
    marks: dict[int, Rank] = field(default_factory=dict)
    """Where it leaves resume points, in pages from its start, and how good ones."""

    @property
    def alive(self) -> bool:
        """Whether it still holds its row."""
        return self.row >= 0

    @property
    def is_ready(self) -> bool:
        """Whether a step may be launched for it: its prefix is there, or good and on its way, layer by layer."""
        if self.loads:
            self.loads = [move for move in self.loads if not move.done or not move.is_whole]
        return not self.loads or all(move.checked for move in self.loads)

    @property
    def has_failed(self) -> bool:
        """Whether a part of its prefix cannot be had: it has to `finish`, without tokens, and begin again."""
        return bool(self.loads) and any(move.done and not move.is_whole for move in self.loads)

    def mark_ends(self, num_cached: int, num_matched: int, end: int) -> None:
        """Leave resume points, in pages, at the prompt's `end` and where it parts from what is cached of it."""
        if end > num_cached:
            self.marks[end] = Rank.MARKED
        if min(num_matched, end) > num_cached:
            self.marks[min(num_matched, end)] = Rank.USED
