"""Prefetch: what one waiting request has come from storage, and how far that is. The `Prefetcher` does it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from quire.cache.hold import Hold
from quire.offload.sought import Places, Sought
from quire.prefix.node import Lease
from quire.spec.events import Namespace
from quire.spec.ids import Bools, Ids
from quire.tiers.transfer import Transfer


@dataclass(slots=True, eq=False)
class Piece:
    """Pages of a prompt up to `last` on their way, or waiting for those before them: by group, their places on the path
    and the host frames they come to. Nothing moves where none of them is read."""

    last: int
    fetching: list[tuple[int, Places, Ids]] = field(default_factory=list)
    move: Transfer | None = None

    def suspect(self) -> list[Bools]:
        """By group, which of those frames are at fault for what is wrong in them."""
        places = self.move.suspect if self.move is not None else ()
        return [
            np.array([(at, place) in places for place in range(len(frames))], dtype=np.bool_)
            for at, (_, _, frames) in enumerate(self.fetching)
        ]


class Prefetch:
    """What one request waits for. Behind `start` pages of its prompt it could begin when it asked, behind `wanted` it
    is to, and all that it needs up to `limit` has come; `stop_at` is when waiting stops being worth it."""

    __slots__ = (
        "abandoned",
        "again",
        "at_once",
        "done",
        "fetched_before",
        "fetching_since",
        "hold",
        "in_rounds",
        "last",
        "limit",
        "look",
        "lost",
        "lost_in",
        "name",
        "namespace",
        "num_bytes",
        "num_waiting",
        "own_bytes",
        "pieces",
        "repeats",
        "seconds",
        "shared",
        "since",
        "sought",
        "start",
        "stop_at",
        "stopped",
        "tokens",
        "tries",
        "wanted",
    )

    def __init__(self, namespace: Namespace, tokens: Ids, name: bytes, sought: Sought, hold: Hold) -> None:
        self.namespace = namespace
        self.tokens = tokens
        self.name = name  # the key of the first page that is in no tier here, or of the last page
        self.sought = sought
        self.start = self.limit = self.wanted = sought.start
        self.hold = hold  # of its path and, in groups that are read in part, of the host frames that it counts on
        self.look: Transfer | None = None
        self.pieces: deque[Piece] = deque()  # that do not count yet, in the order of the prompt
        self.last = self.start  # the page behind the last of them
        self.lost_in: list[int] = []  # groups
        self.lost = -1  # the page that has not come: those behind it are no use
        self.at_once = 0  # bytes that may be on their way
        self.fetching_since: float | None = None
        self.fetched_before = 0  # bytes, for anybody
        self.repeats = False  # whether the page that is lost is to be fetched again
        self.again = 0  # times that rows of the host were at fault
        self.seconds = 0.0  # of work on its pieces
        self.own_bytes = 0  # that came by that
        self.in_rounds = False  # whether some were begun only when others had come
        self.since = self.stop_at = 0.0
        self.done = self.stopped = self.abandoned = False
        self.tries = False  # the link, which is off
        self.num_waiting = 1  # requests, which begin with the same pages
        self.shared = False  # whether there ever were several
        self.num_bytes = 0  # of the host, for what is fetched

    @property
    def lease(self) -> Lease:
        """The path that it holds."""
        return self.hold.path

    @property
    def holds(self) -> bool:
        """Whether it still does."""
        return not self.hold.released

    @property
    def moves(self) -> list[Transfer]:
        """What is under way for it, or has arrived and does not count yet."""
        looking = [self.look] if self.look is not None else []
        return looking + [piece.move for piece in self.pieces if piece.move is not None]

    def leads_on(self, tokens: Ids) -> bool:
        """Whether a request that waited for it may find more, now that it has ended: where it brought something, or its
        own prompt ends elsewhere than that request's."""
        if not self.shared or not self.done:
            return False
        return self.limit > self.start or (self.sought.branches() and not np.array_equal(tokens, self.tokens))
