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


class PrefixHit:
    """How much of a prompt is cached, in whole pages, and why not more. A snapshot; `begin` makes it last.

    `num_tokens` can be reused. `held_back` tokens matched too and are computed again: the last token of a prompt
    always is, and `limited_by` names a group that could not resume further on ("" where none stood in the way).
    `num_dropped` counts the frames that cached pages had lost until then, `num_changes` those of `KVCache.num_changes`.
    """

    __slots__ = ("choice", "held_back", "match", "num_changes", "num_dropped", "num_pages", "num_tokens")

    def __init__(
        self,
        match: Match,
        page_size: int,
        held_back: int,
        num_dropped: int,
        num_changes: int,
        choice: Choice,
    ) -> None:
        self.match = match
        self.num_pages = choice.num_pages
        self.num_tokens = choice.num_pages * page_size
        self.held_back = held_back
        self.num_dropped = num_dropped
        self.num_changes = num_changes
        self.choice = choice

    @property
    def limited_by(self) -> str:
        """The group that could not resume further on, "" where none stood in the way."""
        return self.choice.limited_by

    @property
    def pages(self) -> Ids:
        """Ids of the pages that can be reused, in order, not to be written."""
        return self.match.pages[: self.num_pages]

    @property
    def num_matched(self) -> int:
        """Pages of the prompt that are cached in one group or another."""
        return self.match.num_pages

    @property
    def num_evictable(self) -> int:
        """Its pages that could be evicted now, and not once a request begins on them."""
        return self.match.num_evictable(self.num_pages)
