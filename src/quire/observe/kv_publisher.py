"""KvPublisher: sends the cache's events to routers over ZeroMQ, from a thread of its own, as vLLM sends them.

    PUB     topic, sequence (8 bytes, big endian), batch
    ROUTER  a request: b"", first sequence; answered with: b"", topic, sequence, batch for each batch that is kept,
            then b"", b"", -1, b""

The first number is the time of the start, so that readers see a restart as a gap and ask what they have missed. They
see a gap at the next message: some seconds long after the last event, there is one without events each second.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.counters import counter, gauge
from quire.errors import InvalidInput
from quire.observe.kv_batch import KvBatches
from quire.spec.events import AllCleared, CacheEvent

logger = logging.getLogger(__name__)

MOST_WAITING = 1 << 20
"""Events that may wait for the thread. Beyond, they are dropped, and a snapshot follows."""
MOST_KEPT = 10_000
MOST_KEPT_BYTES = 64 << 20
"""Batches that are kept for those who missed some."""
_MOST_IN_BATCH = 256  # events
_MOST_AT_ONCE = 100_000  # messages that wait for a slow reader; it misses those beyond, and asks for them
_ALL_S = 1.0  # between two snapshots that readers asked for
_BEATS = 10  # messages without events, one each second
_END = (-1).to_bytes(8, "big", signed=True)


@dataclass(kw_only=True)
class PublisherCounters:
    """Events of the cache for routers."""

    batches: int = counter("Batches of events that were published.", name="kv_event_batches")
    events: int = counter("Events of the cache that were published.", name="kv_events_published")
    replays: int = counter("Requests of readers for batches that they missed.", name="kv_event_replays")
    snapshots: int = counter("Times that everything cached was published anew.", name="kv_event_snapshots")
    dropped: int = counter("Events that were dropped because the thread was behind.", name="kv_events_dropped")
    waiting: int = gauge("Events that wait to be published.", name="kv_events_waiting")
    problem: str = ""
    addresses: list[str] = field(default_factory=list)


class KvPublisher:
    """`append` and `flush` are for the engine's thread: neither waits. `wake` is called on another thread when a
    snapshot is due. Raises InvalidInput for an address where it cannot listen."""

    def __init__(self, batches: KvBatches, address: str, replay: str | None, wake: Callable[[], None]) -> None:
        import zmq

        self._zmq: Any = zmq
        self._batches = batches
        self._wake = wake
        self._queue: deque[CacheEvent] = deque([AllCleared()])
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._first = self._next = time.time_ns() // 1000
        self._beats = 0
        self._all_at = -_ALL_S
        self.wants_all = False
        self.totals = PublisherCounters()
        self._context = zmq.Context()
        try:
            self._pub = self._socket(zmq.PUB, address, "--kv-events")
            self._router = self._socket(zmq.ROUTER, replay, "--kv-events-replay") if replay is not None else None
        except InvalidInput:
            self._context.destroy(linger=0)
            raise
        self.address = self._pub.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self.replay_address = (
            self._router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0") if self._router is not None else None
        )
        self.totals.addresses = [self.address] + [self.replay_address] * bool(self.replay_address)
        self._woken, self._waker = os.pipe()
        self._is_woken = self._closes = False
        self._thread = threading.Thread(target=self._run, name="quire-kv-events", daemon=True)
        self._thread.start()

    def _socket(self, kind: int, address: str, option: str) -> Any:
        socket = self._context.socket(kind)
        socket.set_hwm(_MOST_AT_ONCE)
        socket.setsockopt(self._zmq.IPV6, int("[" in address))
        try:
            socket.bind(address)
        except self._zmq.ZMQError as error:
            fix = "use tcp://127.0.0.1:PORT with a free port."
            raise InvalidInput(f"{option} {address}: {error}.", fix=fix) from error
        return socket

    # -- the engine's thread

    def append(self, event: CacheEvent) -> None:
        """Publish an event after the next `flush`."""
        self._queue.append(event)

    def flush(self) -> None:
        """Have the thread publish what was appended."""
        if self._closes or self.totals.problem:
            self._queue.clear()
            return
        if len(self._queue) > MOST_WAITING:
            self.totals.dropped += len(self._queue)
            self._queue = deque()
            self.wants_all = True
            return
        if self._queue and not self._is_woken:
            self._is_woken = True
            os.write(self._waker, b"e")

    @property
    def is_due(self) -> bool:
        """Whether `flush` or a snapshot is wanted."""
        return self.wants_all or (bool(self._queue) and not self._is_woken)

    def takes_all(self) -> bool:
        """Whether all that is cached is to be appended now, after `AllCleared`."""
        wanted, self.wants_all = self.wants_all, False
        self.totals.snapshots += wanted
        return wanted

    def counters(self) -> PublisherCounters:
        """What was published until now."""
        self.totals.waiting = len(self._queue)
        return self.totals

    def close(self) -> None:
        """Publish what waits, and end. May be called twice."""
        if not self._closes:
            self._closes = True
            os.write(self._waker, b"c")
            self._thread.join(5.0)
            for end in (self._waker, self._woken):
                os.close(end)

    # -- the thread of its own

    def _run(self) -> None:
        zmq = self._zmq
        poller = zmq.Poller()
        for each in (self._woken, self._router):
            if each is not None:
                poller.register(each, zmq.POLLIN)
        try:
            while not self._closes:
                ready = dict(poller.poll(1000 if self._beats else None))
                if not ready:
                    self._beats -= 1
                    self._send([])
                if self._woken in ready:
                    os.read(self._woken, 64)
                    self._is_woken = False
                    self._publish()
                if self._router in ready:
                    self._answer()
            self._publish()
        except Exception as error:
            logger.exception("events of the cache are no longer published")
            self.totals.problem = f"{type(error).__name__}: {error}"
        finally:
            self._context.destroy(linger=100)

    def _publish(self) -> None:
        while self._queue:
            queue = self._queue  # the engine may replace it, and only this thread takes from it
            events = [queue.popleft() for _ in range(min(len(queue), _MOST_IN_BATCH))]
            self._send(events)
            self._beats = _BEATS
            self.totals.batches += 1
            self.totals.events += len(events)

    def _send(self, events: Sequence[CacheEvent]) -> None:
        payload, sequence = self._batches.encode(events), self._next
        self._next += 1
        self._pub.send_multipart((b"", sequence.to_bytes(8, "big"), payload))
        self._kept.append((sequence, payload))
        self._kept_bytes += len(payload)
        while len(self._kept) > MOST_KEPT or self._kept_bytes > MOST_KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])

    def _answer(self) -> None:
        """Send what is kept to one who asks. A snapshot follows if that is not all it misses."""
        assert self._router is not None
        reader, *request = self._router.recv_multipart()
        if len(request) != 2 or len(request[1]) != 8:
            return
        start = int.from_bytes(request[1], "big")
        self.totals.replays += 1
        for sequence, payload in self._kept:
            if sequence >= start:
                self._router.send_multipart((reader, b"", b"", sequence.to_bytes(8, "big"), payload))
        self._router.send_multipart((reader, b"", b"", _END, b""))
        first = self._kept[0][0] if self._kept else self._next
        is_short = self._first < first > start or request[1] == _END
        if is_short and time.monotonic() > self._all_at + _ALL_S:
            self._all_at = time.monotonic()
            self.wants_all = True
            self._wake()
