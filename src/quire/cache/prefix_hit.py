"""PrefixHit: how much of a prompt is cached."""

from __future__ import annotations

from quire.prefix.radix_cache import Match
from quire.spec.ids import Ids


class PrefixHit:
    """How much of a prompt is cached, in whole pages, and why not more. A snapshot; `begin` makes it last.

    `num_tokens` can be reused. `held_back` tokens matched too and are computed again: the last token of a prompt
    always is, and `limited_by` names a group that could not resume further on ("" where none stood in the way).
    `num_dropped` counts the frames that cached pages had lost until then, `num_changes` those of `KVCache.num_changes`.
    """

    __slots__ = ("held_back", "limited_by", "match", "num_changes", "num_dropped", "num_pages", "num_tokens")

    def __init__(
        self,
        match: Match,
        num_tokens: int,
        num_pages: int,
        held_back: int,
        limited_by: str,
        num_dropped: int,
        num_changes: int,
    ) -> None:
        self.match = match
        self.num_tokens = num_tokens
        self.num_pages = num_pages
        self.held_back = held_back
        self.limited_by = limited_by
        self.num_dropped = num_dropped
        self.num_changes = num_changes

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
