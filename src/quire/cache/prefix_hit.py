"""PrefixHit: how much of a prompt is cached."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.prefix.match import Match
from quire.spec.ids import Ids


def _always() -> bool:
    return True


@dataclass(slots=True)
class Choice:
    """How many pages of a cached prefix are reused, and what is loaded for that."""

    num_pages: int
    limited_by: str = ""  # a group that cannot resume after more pages
    loads: Sequence[int] = ()  # by group: frames to load from the host
    host_pages: int = 0  # pages whose reuse needs these loads
    storage_pages: int = 0  # of them, pages fetched from storage and not used since
    declined_pages: int = 0  # pages on the host that are computed again because that is faster
    weighed: tuple[int, int] | None = None  # tokens and bytes of that comparison
    stands: Callable[[], bool] = _always  # whether it would be chosen again


@dataclass(slots=True, eq=False)
class PrefixHit:
    """How much of a prompt is cached, in whole pages. A snapshot: only a request that begins on it holds its pages."""

    match: Match
    choice: Choice
    num_pages: int  # reusable; fewer than match where a group cannot resume there, or for the prompt's last token
    num_tokens: int  # the tokens of these pages
    num_dropped: int  # `Admission.num_dropped` at that time
    num_changes: int  # `KVCache.num_changes` at that time

    @property
    def pages(self) -> Ids:
        """Ids of the reusable pages, in order; a view that must not be written."""
        return self.match.pages[: self.num_pages]

    @property
    def num_evictable(self) -> int:
        """Reusable pages that are evictable now; a request that begins on them takes that away."""
        return self.match.num_evictable(self.num_pages)
