"""What a page is told of a server while it runs: an event a second, made once for all who look.

    engine --heartbeat--> last_statistics --beat: a point--> ring of ten minutes
                                          --event, at most every half second--> the same bytes for each viewer

A viewer takes the latest event when it can. A slow one misses some, and has at most one in its hands. No viewer asks
the engine anything.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator
from typing import Any

from quire import __version__
from quire.client.async_engine import AsyncEngine
from quire.errors import Overloaded
from quire.observe.metrics import ServerCounters
from quire.serve.sse import event

EVERY_S = 1.0
_LASTS_S = EVERY_S / 2  # an event, for viewers that come after it was made
_POINTS = 600
_REQUESTS = 50
_MOST_VIEWERS = 64  # each has one of the server's connections for as long as it looks

_POINT = ("running_requests", "waiting_requests", "usage", "prompt_tokens", "hit_tokens", "output_tokens")
"""Statistics of a point, beside its time, its tokens by cause, and the latencies of a minute."""

_QUANTILES, _MINUTE = (0.5, 0.95), 60


class Live:
    """The events of one server. `engine` is the caller's; its heartbeats make the points."""

    def __init__(self, engine: AsyncEngine, counters: ServerCounters, *, model_name: str) -> None:
        self._engine = engine
        self._model_name = model_name
        self._points: deque[dict[str, Any]] = deque(maxlen=_POINTS)
        self._point_at_s = self._made_at_s = 0.0
        self._latencies = {
            "first": counters.first_token_s, "next": counters.inter_token_s, "whole": counters.request_s,
        }  # fmt: skip
        self._counts: deque[dict[str, list[int]]] = deque(maxlen=_MINUTE)  # at the points of a minute
        self._requests: deque[dict[str, Any]] = deque(maxlen=_REQUESTS)
        self._event = b""
        self._num_viewers = 0
        engine.on_beat = self.beat

    def beat(self) -> None:
        """The engine has sent its counters: at most a point a second."""
        if time.monotonic() - self._point_at_s < EVERY_S * 0.9:
            return
        self._point_at_s = time.monotonic()
        found = self._engine.last_statistics
        point = {"at": round(time.time(), 3), **{name: found.get(name, 0) for name in _POINT}}
        self._counts.append({name: each.counts() for name, each in self._latencies.items()})
        point["latencies"] = {
            name: [each.quantile(part, self._counts[0][name]) for part in _QUANTILES]
            for name, each in self._latencies.items()
        }
        self._points.append(point | {"causes": list(found.get("explained_tokens", {}).values())})

    def ended(self, request: dict[str, Any]) -> None:
        """A request has ended. What is told of it has no text."""
        self._requests.append(request | {"at": round(time.time(), 3)})

    def viewer(self) -> AsyncGenerator[bytes, None]:
        """The events for one viewer, until the server ends: what never changes and the last ten minutes, then what is
        now, again and again. Raises Overloaded while too many look."""
        if self._num_viewers >= _MOST_VIEWERS:
            raise Overloaded(f"{_MOST_VIEWERS} pages look at this server.", fix="close one of them.")
        return self._events()

    async def _events(self) -> AsyncGenerator[bytes, None]:
        self._num_viewers += 1
        try:
            facts = {"model": self._model_name, "version": __version__, "facts": self._engine.facts}
            yield event(facts | {"points": list(self._points)}, name=b"begin")
            while not self._engine.is_draining:
                yield self._now()
                await asyncio.sleep(EVERY_S)
        finally:
            self._num_viewers -= 1

    def _now(self) -> bytes:
        if time.monotonic() - self._made_at_s >= _LASTS_S:
            self._made_at_s = time.monotonic()
            engine = self._engine
            now = {
                "at": time.time(),
                "health": engine.health().to_dict(for_operator=True),
                "restarts": engine.num_restarts,
                "counters": {key: each for key, each in engine.last_statistics.items() if key not in engine.facts},
                "requests": list(self._requests),
                "point": self._points[-1] if self._points else None,
            }
            self._event = event(now)
        return self._event
