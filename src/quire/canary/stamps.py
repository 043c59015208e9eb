"""Stamps: which cached pages of a group have a stamp, and the digest in it. Bookkeeping on the host, without bytes.

    cached --watch--> watched, with a ticket --stamp--> stamped --(its frame is freed)--> nothing

Two bits in the residency table say where a page is on this way. They go when its frame does, so that no stamp outlives
the frame that it is of. A digest arrives later than it was asked for: the ticket says whether it is still of the same
page.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quire.canary.digest import Digests
from quire.memory.residency import Column, State
from quire.spec.ids import Bools, Ids

Longs = npt.NDArray[np.int64]


class Asked(NamedTuple):
    """Pages of which digests were asked for: their frames and tickets at that time, int32 and int64 `[pages]`."""

    pages: Ids
    frames: Ids
    tickets: Longs


class Stamps:
    """Stamps of the pages of one `column`, whose frames are 1 to `num_frames`."""

    def __init__(self, column: Column, num_frames: int) -> None:
        size = column.num_pages + 1
        self.column = column
        self._digests: Digests = np.zeros(size, dtype=np.int64)
        self._tickets: Longs = np.zeros(size, dtype=np.int64)
        self._turns: Longs = np.zeros(size, dtype=np.int64)  # when each was watched, by the caller's clock
        self._checked: Longs = np.zeros(size, dtype=np.int64)
        self._page_of: Ids = np.zeros(num_frames + 1, dtype=np.int32)  # the page that was watched last in each frame
        self._next_ticket = 1
        self._queue: deque[tuple[Ids, Longs]] = deque()
        self.num_due = 0  # in the queue; some may have left the cache

    # -- pages become cached

    def watch(self, pages: Ids, turn: int) -> Bools:
        """These cached pages are to get a stamp. Returns which are new, and have a frame whose bytes are there."""
        frames = self.column.frame[pages]
        fresh: Bools = (self.column.state[pages] & _WATCHED_OR_ARRIVING == 0) & (frames != 0)
        new = pages[fresh]
        if len(new):
            tickets = np.arange(self._next_ticket, self._next_ticket + len(new))
            self._next_ticket += len(new)
            self._tickets[new], self._turns[new], self._checked[new] = tickets, turn, turn
            self._page_of[frames[fresh]] = new
            self.column.mark(new, State.WATCHED)
            self._queue.append((new, tickets))
            self.num_due += len(new)
        return fresh

    def lacks(self, pages: Ids) -> bool:
        """Whether `watch` would watch any of these pages."""
        unwatched = self.column.state[pages] & _WATCHED_OR_ARRIVING == 0
        return bool(np.count_nonzero(unwatched & (self.column.frame[pages] != 0)))

    def due(self, most: int) -> Asked:
        """Up to `most` pages that wait for a stamp, the first watched first. They leave the queue."""
        parts: list[tuple[Ids, Longs]] = []
        while most > 0 and self._queue:
            pages, tickets = self._queue.popleft()
            if len(pages) > most:
                self._queue.appendleft((pages[most:], tickets[most:]))
                pages, tickets = pages[:most], tickets[:most]
            most -= len(pages)
            self.num_due -= len(pages)
            parts.append((pages, tickets))
        if not parts:
            return NOTHING
        pages, tickets = (np.concatenate(each) for each in zip(*parts, strict=True))
        here = self._are(pages, tickets, State.WATCHED)
        return Asked(pages[here], self.column.frame[pages[here]], tickets[here])

    def stamp(self, asked: Asked, digests: Digests) -> Bools:
        """Stamp those of the pages that are still what they were. Returns which."""
        here = self._are(asked.pages, asked.tickets, State.WATCHED)
        self._digests[asked.pages[here]] = digests[here]
        self.column.mark(asked.pages[here], State.STAMPED)
        return here

    # -- pages are looked at again

    def stamped(self, pages: Ids, turn: int) -> Asked:
        """Those of these pages that have a stamp and were last looked at before `turn`."""
        found = pages[self.column.has(pages, State.STAMPED) & (self._checked[pages] < turn)]
        return Asked(found, self.column.frame[found], self._tickets[found])

    def differ(self, asked: Asked, digests: Digests, turn: int) -> Ids:
        """Those of the pages that still have the stamp that they had, and other bytes."""
        here = self._are(asked.pages, asked.tickets, State.STAMPED)
        pages = asked.pages[here]
        equal = self._digests[pages] == digests[here]
        self._checked[pages[equal]] = turn
        differs: Ids = pages[~equal]
        return differs

    def overwritten(self, frames: Ids, turns: Longs) -> Ids:
        """Watched pages whose frames, written in these turns, were written after the page was watched."""
        pages = self._page_of[frames]
        at = pages.nonzero()[0]
        pages, frames, turns = pages[at], frames[at], turns[at]
        wrong = self.column.has(pages, State.WATCHED) & (self.column.frame[pages] == frames)
        wrong &= turns > self._turns[pages]
        found = pages[wrong]
        return np.unique(found) if len(found) else found

    def moved(self, sources: Ids, targets: Ids) -> None:
        """Frames are elsewhere, with their bytes."""
        self._page_of[targets] = self._page_of[sources]

    def last_good(self, page: int) -> int:
        """The turn in which a watched page was last found to be what it was."""
        return int(self._checked[page])

    def _are(self, pages: Ids, tickets: Longs, state: State) -> Bools:
        """Per page: whether it is in this state since it got this ticket."""
        found: Bools = self.column.has(pages, state) & (self._tickets[pages] == tickets)
        return found


NOTHING = Asked(np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int64))
_WATCHED_OR_ARRIVING = np.uint8(int(State.WATCHED | State.ARRIVING))
