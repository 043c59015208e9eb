"""Shares: how many sequences may be open, whose turn is next, and when one that is refused may come again.

    enter --too many are open, or of this client--> Overloaded, with a time from the measured rate
          --the engine has enough--> waits for its turn --> runs --> close

Clients are keys with names. A turn goes to the one with the fewest sequences in the engine, of several to that whose
turn came first; so one with a long queue delays itself. Until it has room, none goes before it: one with many sequences
would never begin beside small ones. Without names the engine's own policy orders all, and nothing waits here.

A client that is refused comes again when those that were refused before it have come: each end is one place for them.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Callable

from quire.errors import Overloaded

_MEASURED = 64  # ends from which the rate is measured
_QUIET_S = 60.0  # after which a client has no share until it comes again
_UNMEASURED_S = 5.0
_LONGEST_S = 120.0


class OpenSequences:
    """Sequences of one request, until `close`."""

    def __init__(self, shares: Shares, client: str, count: int, came_at: float) -> None:
        self.client = client
        self.count = count
        self.came_at = came_at
        self.begins: asyncio.Future[None] | None = None  # while it waits
        self._shares = shares
        self._is_open = True

    def close(self) -> None:
        """They have ended, or will not begin. Idempotent."""
        if self._is_open:
            self._is_open = False
            self._shares._leave(self)


class Shares:
    """The sequences of a server, for one event loop. `most_open` may be open and, if clients have names,
    `most_begun` in the engine; a request with more is alone."""

    def __init__(
        self, *, most_open: int, most_begun: int, have_names: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._most_open = most_open
        self._most_begun = most_begun
        self._have_names = have_names
        self._clock = clock
        self._open = Counter[str]()
        self._begun = Counter[str]()
        self._waiting: dict[str, deque[OpenSequences]] = {}
        self._first: OpenSequences | None = None  # the turn of several that lacked room: none goes before it
        self._came_at: dict[str, float] = {}  # key: client, not those that were quiet for long
        self._ends: deque[tuple[float, int]] = deque(maxlen=_MEASURED)
        self._refused = Counter[str]()  # sequences by client that come again, less those that have ended since

    async def enter(self, client: str, count: int) -> OpenSequences:
        """A turn of `count` sequences, when it has come. Raises Overloaded."""
        now = self._clock()
        self._came_at[client] = now
        self._came_at = {name: at for name, at in self._came_at.items() if now - at < _QUIET_S or self._open[name]}
        num_open = self._open.total()
        share = self._most_open / len(self._came_at)
        over = max(num_open + count - self._most_open, math.ceil(self._open[client] + count - share))
        if over > 0 and (num_open if len(self._came_at) == 1 else self._open[client]):
            what = f"{num_open} sequences are open of {self._most_open}"
            more = f", {self._open[client]} of them this client's" if len(self._came_at) > 1 else ""
            wait_s = self.wait_s(over + self._refused[client])
            self._refused[client] = min(self._refused[client] + count, self._most_open)
            raise Overloaded(f"{what}{more}.", retry_after_s=wait_s)
        turn = OpenSequences(self, client, count, now)
        self._open[client] += count
        if not self._have_names:
            self._begun[client] += count
            return turn
        turn.begins = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        self._begin_next()
        try:
            await turn.begins
        except BaseException:
            turn.close()
            raise
        return turn

    def wait_s(self, count: int) -> float:
        """Seconds in which so many sequences end, by the last ones."""
        if not self._ends:
            return _UNMEASURED_S
        ended, since_s = sum(number for _, number in self._ends), self._clock() - self._ends[0][0]
        return min(max(1.0, count * since_s / ended), _LONGEST_S)

    def _has_room(self, turn: OpenSequences) -> bool:
        num_begun = self._begun.total()
        return num_begun == 0 or num_begun + turn.count <= self._most_begun

    def _leave(self, turn: OpenSequences) -> None:
        self._open[turn.client] -= turn.count
        waiting = self._waiting.get(turn.client, ())
        if turn is self._first:
            self._first = None
        if turn in waiting:
            self._waiting[turn.client].remove(turn)
        else:
            self._begun[turn.client] -= turn.count
            self._ends.append((self._clock(), turn.count))
            self._refused = +Counter({name: left - turn.count for name, left in self._refused.items()})
        self._begin_next()

    def _begin_next(self) -> None:
        while waiting := [name for name, turns in self._waiting.items() if turns]:
            turn = self._first
            if turn is None:
                client = min(waiting, key=lambda name: (self._begun[name], self._waiting[name][0].came_at))
                turn = self._waiting[client][0]
            if not self._has_room(turn):
                self._first = turn if turn.count > 1 else None  # one sequence has room where any has
                return
            self._first = None
            self._waiting[turn.client].popleft()
            self._begun[turn.client] += turn.count
            assert turn.begins is not None
            if not turn.begins.done():  # its client has left at this moment: it closes its turn next
                turn.begins.set_result(None)
