"""InFlight: moves that were taken and have not been handed back, and how many bytes that is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from quire.tiers.moves import Link, Move

MOST_BYTES: Final[Mapping[Link, int]] = {
    Link.SAVE: 256 << 20,
    Link.LOAD: 1 << 30,
    Link.ARCHIVE: 256 << 20,
    Link.FETCH: 1 << 30,
}
"""What waits on a link holds frames on both of its sides."""

_MOST_MOVES = 1024  # on one link; those of no bytes would have no bound


class InFlight:
    """Bounded per link: in moves, and in bytes where a bound is given. A move larger than that is taken when it is
    alone."""

    def __init__(self, most_bytes: Mapping[Link, int]) -> None:
        self._most_bytes = most_bytes
        self._bytes = dict.fromkeys(Link, 0)
        self._moves = dict.fromkeys(Link, 0)

    def take(self, move: Move) -> bool:
        """Count a move in. False: there is no room for it now, and nothing was changed."""
        link = move.link
        most = self._most_bytes.get(link)
        is_full = most is not None and self._bytes[link] + move.num_bytes > most
        if self._moves[link] and (is_full or self._moves[link] >= _MOST_MOVES):
            return False
        self._bytes[link] += move.num_bytes
        self._moves[link] += 1
        return True

    def give_back(self, move: Move) -> None:
        """Count a move out."""
        self._bytes[move.link] -= move.num_bytes
        self._moves[move.link] -= 1
        assert self._moves[move.link] >= 0, "a move was handed back twice"

    def num_bytes(self, link: Link) -> int:
        """Of moves on a link."""
        return self._bytes[link]

    @property
    def num_moves(self) -> int:
        """On all links."""
        return sum(self._moves.values())
