"""Engines of a replay on one virtual time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from quire.sim.arrivals import Arrivals
from quire.sim.replay import Replay
from quire.sim.scripts import ScriptedRequest


def turns(
    engines: Sequence[Replay],
    arrivals: Arrivals,
    route: Callable[[ScriptedRequest], None],
    is_over: Callable[[], bool],
) -> Iterator[int]:
    """The numbers of engines that have taken a turn, until `is_over` and nothing arrives. Each has its own clock. The
    one whose clock is least takes the next turn, so that what others send it by then is there. A request goes through
    `route` when no clock of an engine that has work is before its arrival."""
    while True:
        times = [math.inf if (time := engine.next_time) is None else time for engine in engines]
        least = min(times)
        arrival = arrivals.next_time
        if arrival is not None and arrival <= least:
            for request in arrivals.until(arrival):
                route(request)
        elif arrival is None and is_over():
            return
        else:
            at = times.index(least)
            engines[at].turn()
            yield at
