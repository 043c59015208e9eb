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
    """How many pages of a cached prefix are reused. `limited_by` names a group that could not resume further on.

    `loads` counts by group the frames that come from the host, and `host_pages` the pages that are reused thanks to
    them, of which `storage_pages` had been fetched from storage and not been used since; `declined_pages` could be had
    from there, and are computed again because that is quicker. `weighed` has the tokens and bytes of that comparison;
    `stands` says whether it would be chosen again.
    """

    num_pages: int
    limited_by: str = ""
    loads: Sequence[int] = ()
    host_pages: int = 0
    storage_pages: int = 0
    declined_pages: int = 0
    weighed: tuple[int, int] | None = None
    stands: Callable[[], bool] = _always


@dataclass(slots=True, eq=False)
class PrefixHit:
    """How much of a prompt is cached, in whole pages, and why not more. A snapshot; `begin` makes it last.

    Of what matches, the first `num_tokens` tokens, `num_pages` pages, can be reused. The rest is computed again: the
    last token of a prompt always is, and `choice` may name a group that could not resume further on. `num_dropped`
    counts the frames that cached pages had lost until then, `num_changes` those of `KVCache.num_changes`.
    """

    match: Match
    choice: Choice
    num_pages: int
    num_tokens: int
    num_dropped: int
    num_changes: int

    @property
    def pages(self) -> Ids:
        """Ids of the pages that can be reused, in order, not to be written."""
        return self.match.pages[: self.num_pages]

    @property
    def num_evictable(self) -> int:
        """Its pages that could be evicted now, and not once a request begins on them."""
        return self.match.num_evictable(self.num_pages)
