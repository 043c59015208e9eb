"""VirtualMover: moves real bytes in time that is only counted, one thing after another, the same way every time."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping

from quire.tiers.carrier import Carrier
from quire.tiers.in_flight import MOST_BYTES, InFlight
from quire.tiers.mover import CLOSED, Mover, described
from quire.tiers.moves import Copies, Link, Move
from quire.tiers.rate import Rate
from quire.tiers.store import Store


class VirtualMover(Mover):
    """For simulation and fuzzing: each link carries one move after the other, at its bandwidth and latency.

    `seconds` tells the time. Bytes move when a move ends, as late as a real device may, and not before somebody waits
    for a layer; only the records of a LOAD are checked when it begins. A link without a bandwidth takes no time for
    bytes, one without a latency starts at once. Forgetting goes in line with archiving.

    Time is not this one's to move, unless it is told how: `pass_until(time)` is called where somebody waits, and then
    it is that time, or later. Without, what has to be complete at once ends early, and its link is busy as long all the
    same.

    With `choose`, which returns a number below the one it is given, moves that are due end in an order that it picks,
    and some only at a later call, as between links of a real machine; on one link the order is kept.
    """

    def __init__(
        self,
        copies: Copies,
        store: Store | None,
        *,
        seconds: Callable[[], float],
        bandwidths: Mapping[Link, float],
        latency: Mapping[Link, float],
        choose: Callable[[int], int] | None = None,
        most_bytes: Mapping[Link, int] = MOST_BYTES,
        pass_until: Callable[[float], None] | None = None,
    ) -> None:
        self._carrier = Carrier(copies, store)
        self._seconds = seconds
        self._pass_until = pass_until
        self._bandwidths = bandwidths
        self._latency = latency
        self._choose = choose
        self._in_flight = InFlight(most_bytes)
        self._rates = {link: Rate() for link in Link}
        self._lanes: dict[Link, deque[_Passage]] = {link: deque() for link in Link if link is not Link.FORGET}
        self._ended: list[Move] = []
        self._has_checked = False
        self._closed = False

    def submit(self, move: Move) -> bool:
        if self._closed or not self._in_flight.take(move):
            return False
        lane = self._lane(move.link)
        lane.append(_Passage(move, self._carrier.carry(move), self._seconds()))
        if len(lane) == 1:
            self._begin(lane[0])
        return True

    def finished(self) -> list[Move]:
        now = self._seconds()
        while due := [lane for lane in self._lanes.values() if lane and self._end_of(lane[0], now) <= now]:
            if self._choose is None:
                lane = min(due, key=lambda lane: lane[0].end)
            else:
                picked = self._choose(len(due) + 1)
                if picked == len(due):
                    break
                lane = due[picked]
            self._finish(lane)
        ended, self._ended = self._ended, []
        for move in ended:
            self._in_flight.give_back(move)
        return ended

    def wait(self, seconds: float) -> bool:
        """Whether something has ended by now, or a LOAD has become `checked`. Without `pass_until`, whoever has nothing
        else to do moves the time to `next_end`."""
        next_end, until = self.next_end, self._seconds() + seconds
        if self._pass_until is not None and not self._has_checked and not self._ended:
            self._pass_until(until if next_end is None else min(next_end, until))
        is_due = next_end is not None and next_end <= self._seconds()
        found = self._has_checked or bool(self._ended) or is_due
        self._has_checked = False
        return found

    def complete(self, move: Move) -> None:
        """Those before it on its link end too."""
        if not move.done and self._pass_until is not None:
            self._pass_until(self.end_of(move))
        lane = self._lane(move.link)
        while not move.done:
            self._finish(lane)

    @property
    def next_end(self) -> float | None:
        """When the next move ends. None: nothing is under way."""
        now = self._seconds()
        return min((self._end_of(lane[0], now) for lane in self._lanes.values() if lane), default=None)

    def end_of(self, move: Move) -> float:
        """When a move that has not ended will, as things are now."""
        end = 0.0
        for passage in self._lane(move.link):
            began = max(end, passage.submitted)
            end = passage.end if passage.begun else began + self._duration(passage.move)
            if passage.move is move:
                return end
        raise KeyError(move)

    def in_flight(self, link: Link) -> int:
        return self._in_flight.num_bytes(link)

    def bandwidth(self, link: Link) -> float | None:
        return self._rates[link].per_second

    def latency(self, link: Link) -> float | None:
        return self._rates[link].start

    @property
    def idle(self) -> bool:
        return not self._in_flight.num_moves

    def close(self) -> tuple[Move, ...]:
        self._closed = True
        for lane in self._lanes.values():
            while lane:
                passage = lane.popleft()
                passage.move.end(CLOSED)
                self._ended.append(passage.move)
        return ()

    def _lane(self, link: Link) -> deque[_Passage]:
        return self._lanes[Link.ARCHIVE if link is Link.FORGET else link]

    def _duration(self, move: Move) -> float:
        return self._latency.get(move.link, 0.0) + move.num_bytes / self._bandwidths.get(move.link, math.inf)

    def _begin(self, passage: _Passage, after: float = 0.0) -> None:
        passage.begun = True
        passage.began = max(after, passage.submitted)
        passage.end = passage.began + self._duration(passage.move)
        if passage.move.link is not Link.LOAD:
            return
        passage.move.drive = passage.bring
        passage.advance()
        if passage.move.checked:
            self._has_checked = True
        else:
            passage.end = passage.began + self._latency.get(Link.LOAD, 0.0)

    def _end_of(self, passage: _Passage, now: float) -> float:
        """When it ends, which is now for one that was stopped: it then keeps what would have come by now."""
        move = passage.move
        if move.stopping and not passage.stopped and move.link in (Link.FETCH, Link.ARCHIVE):
            passage.stopped = True
            move.kept_pages = sum(map(len, move.units))
            if now < passage.end:
                share = max(0.0, now - passage.began) / (passage.end - passage.began)
                move.kept_pages = int(share * max(map(len, move.units), default=0))
                passage.end = max(passage.began, now)
        return passage.end

    def _finish(self, lane: deque[_Passage]) -> None:
        passage = lane.popleft()
        while not passage.over:
            passage.advance()
        move = passage.move
        move.seconds = passage.end - passage.began
        move.end(passage.error)
        if move.is_whole:
            self._rates[move.link].add(move.moved_bytes, move.seconds)
        self._ended.append(move)
        if lane:
            self._begin(lane[0], passage.end)


class _Passage:
    """A move on its lane: since when, until when, and how far it is."""

    __slots__ = ("began", "begun", "end", "error", "move", "over", "pieces", "stopped", "submitted")

    def __init__(self, move: Move, pieces: Iterator[None], submitted: float) -> None:
        self.move = move
        self.pieces = pieces
        self.submitted = submitted
        self.began = self.end = submitted
        self.begun = self.over = self.stopped = False
        self.error = ""

    def advance(self) -> None:
        """Do the next piece, and note when that was all."""
        try:
            next(self.pieces)
        except StopIteration:
            self.over = True
        except Exception as raised:
            self.over, self.error = True, described(raised)

    def bring(self, layer: int) -> None:
        """Somebody waits for a layer: bytes move now, up to that one. Where they cannot, the move has failed."""
        while not self.over and not self.move.has_layer(layer):
            self.advance()
        if self.over:
            self.move.end(self.error)
