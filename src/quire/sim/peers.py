"""Engines of a replay that compute prompts for others: the two sides of `quire.transfer`, over a virtual link.

Messages take the latency of the link, and bytes the time that its bandwidth gives them. An engine reads its messages
between its steps, as a real one does.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import numpy as np

from quire.sim.arrivals import Inbox
from quire.sim.clock import VirtualClock
from quire.sim.replay import Replay
from quire.sim.scripts import ScriptedRequest
from quire.sim.settings import SimulatedLink
from quire.sim.tiers import SimulatedCopies
from quire.sim.trace_request import TraceRequest
from quire.spec.events import Namespace
from quire.spec.ids import Ids
from quire.tiers.prefill import PrefillPeers
from quire.tiers.transfer import Transfer
from quire.transfer.connector import Connector, Spans, Write
from quire.transfer.decode import Asking, DecodeSide
from quire.transfer.messages import Answer, Request, Send
from quire.transfer.prefill import PrefillSide

_ONE_TOKEN: Ids = np.zeros(1, dtype=np.int32)


class Wires:
    """The link, and the engines at its ends by name: where their messages arrive, and their connectors."""

    def __init__(self, link: SimulatedLink) -> None:
        self.link = link
        self.inboxes: dict[str, Inbox[Send]] = {}
        self.connectors: dict[str, VirtualConnector] = {}

    def sender(self, name: str, clock: VirtualClock) -> Callable[[Send], None]:
        """Sends messages of one engine, which arrive with its name as their peer."""

        def send(effect: Send) -> None:
            self.inboxes[effect.peer].push(clock.now + self.link.latency, Send(name, effect.message))

        return send


class VirtualConnector(Connector):
    """The connector of one engine of a replay. Writes from it, and to it, take their bandwidth one after the other. A
    span is a record: its place among the records of all groups, and the bytes that it has on a real device."""

    kind: ClassVar[str] = "virtual"

    def __init__(self, name: str, wires: Wires, copies: SimulatedCopies, clock: VirtualClock) -> None:
        self._wires, self._copies, self._clock = wires, copies, clock
        self._first = np.cumsum([0] + [len(copies.rows(group)) for group in range(copies.num_groups)])
        self._open: dict[int, Spans] = {}  # key: tag
        self._free_at = 0.0
        self._writes: dict[str, list[tuple[float, Write, Callable[[], str]]]] = {}  # key: peer; end, and what it does
        self._chances = np.random.default_rng([wires.link.failure_seed, len(name), *name.encode()])
        wires.connectors[name] = self

    @property
    def next_time(self) -> float | None:
        """When the next write ends."""
        return min((each[0] for writes in self._writes.values() for each in writes), default=None)

    def spans(self, group: int, frames: Ids) -> Spans:
        """See `quire.transfer.connector.Records`."""
        sizes = np.full(len(frames), self._copies.bytes_of(group), dtype=np.int64)
        return np.stack((self._first[group] + frames, sizes), axis=1)

    def address(self) -> bytes:
        return b""

    def connect(self, peer: str, address: bytes) -> None:
        """Engines of a replay find each other by name."""

    def open(self, tag: int, spans: Spans) -> bytes:
        self._open[tag] = spans
        return b""

    def write(self, peer: str, tag: int, spans: Spans, target: bytes) -> Write:
        """Begin a write, which ends when `settle` is called at its time or later."""
        link, there = self._wires.link, self._wires.connectors[peer]
        begins = max(self._clock.now, self._free_at, there._free_at)
        self._free_at = there._free_at = begins + int(spans[:, 1].sum()) / link.link_rate
        fails = self._chances.random() < link.link_failures
        write = Write()
        to_peer = self._writes.setdefault(peer, [])
        to_peer.append((self._free_at, write, lambda: "link" if fails else there._land(tag, spans, self)))
        return write

    def settle(self) -> None:
        """End the writes whose time has come."""
        for writes in self._writes.values():
            while writes and writes[0][0] <= self._clock.now:
                _, write, act = writes.pop(0)
                write.end(act())

    def shut(self, tag: int) -> bool:
        self._open.pop(tag, None)
        return True

    def disconnect(self, peer: str) -> None:
        for _, write, _ in self._writes.pop(peer, []):
            write.end("disconnected")

    def close(self) -> None:
        """There is nothing to free."""

    def _land(self, tag: int, spans: Spans, source: VirtualConnector) -> str:
        """Copy the records of a write; returns why not."""
        if tag not in self._open:
            return "the tag is shut"
        here, there = self._open[tag][:, 0], spans[:, 0]
        groups = np.searchsorted(self._first, here, side="right") - 1
        for group in np.unique(groups).tolist():
            ours, theirs = here[groups == group], there[groups == group]
            rows = source._copies.rows(group)[theirs - source._first[group]]
            self._copies.rows(group)[ours - self._first[group]] = rows
        return ""


class PrefillEngine:
    """An engine that computes prompts for others: what they send takes the place of its requests
    (`quire.sim.arrivals.Requests`)."""

    def __init__(self, name: str, wires: Wires) -> None:
        self.name = name
        self._wires = wires
        self._messages = wires.inboxes[name] = Inbox[Send]()

    def start(self, replay: Replay) -> None:
        """The engine behind it, whose requests come from here."""
        on_host, clock = replay.tiers.on_host, replay.clock
        self._clock = clock
        self._connector = VirtualConnector(self.name, self._wires, on_host.copies, clock)

        def begin(request_id: str, tokens: Ids, namespace: Namespace) -> None:
            request = TraceRequest(request_id, tokens, _ONE_TOKEN, namespace=namespace)
            replay.add(ScriptedRequest(request, clock.now, is_for_peer=True))

        self.side = PrefillSide(
            self._connector,
            self._connector,
            on_host.tiering,
            self._wires.sender(self.name, clock),
            lambda peer: None,
            page_size=replay.cache.page_size,
            begin=begin,
            abort=replay.abort,
            clock=lambda: clock.now,
        )

    @property
    def next_time(self) -> float | None:
        """When the next message arrives, or the next write ends."""
        times = [each for each in (self._messages.next_time, self._connector.next_time) if each is not None]
        return min(times, default=None)

    def until(self, now: float) -> Iterator[ScriptedRequest]:
        """Do what peers have asked for by `now`. The requests that this begins are queued already."""
        for sent in self._messages.until(now):
            assert isinstance(sent.message, Request)
            self.side.asked(sent.peer, sent.message)
        self.serve()
        return iter(())

    def serve(self) -> None:
        """Go on with writes."""
        self._connector.settle()
        self.side.settle()

    def ended(self, request_id: str, now: float) -> None:
        """A request has ended."""
        self.side.ended(request_id)


class DecodePeers(PrefillPeers):
    """The prefill engines as one decode engine sees them."""

    asks = True

    def __init__(self, name: str, wires: Wires, engines: Sequence[PrefillEngine]) -> None:
        self.name = name
        self._wires, self._engines = wires, engines
        self._messages = wires.inboxes[name] = Inbox[Send]()

    def start(self, replay: Replay) -> None:
        """The engine that asks. The prefill engines have started."""
        on_host, clock, link = replay.tiers.on_host, replay.clock, self._wires.link
        tiers, self._clock = on_host.tiering, clock
        self._counters = tiers.counters
        connector = VirtualConnector(self.name, self._wires, on_host.copies, clock)
        self.side = DecodeSide(
            connector,
            connector,
            tiers.names.scope,
            self._wires.sender(self.name, clock),
            num_groups=len(tiers.hosts),
            page_size=replay.cache.page_size,
            seconds=link.transfer_seconds,
            least_tokens=link.least_tokens,
            clock=lambda: clock.now,
            warn=lambda text: None,
        )
        for engine in self._engines:
            self.side.counts.connected(engine.name, engine.name)
            self.side.ready(engine.name, is_ready=True)
            engine.side.connected(self.name, connector.address(), self.name)

    @property
    def num_hits(self) -> int:
        """Prompt tokens that peers have computed for its requests."""
        return self._counters.peer_hit_tokens

    def next_event(self) -> float | None:
        """When the next message arrives; infinity if that is not known, None if nothing is asked."""
        if not self.side.is_busy:
            return None
        found = self._messages.next_time
        return math.inf if found is None else found

    def ask(self, tokens: Ids, namespace: Namespace, num_missing: int) -> Asking | None:
        return self.side.ask(tokens, namespace, num_missing)

    def why_local(self, num_missing: int) -> str:
        return self.side.why_local(num_missing)

    def settle(self) -> list[tuple[Transfer, str]]:
        for sent in self._messages.until(self._clock.now):
            assert isinstance(sent.message, Answer)
            self.side.do(self.side.receiver.receive(sent.peer, sent.message))
        return self.side.settle()

    @property
    def fallbacks(self) -> Counter[str]:
        """Prompts that were computed by the decode engine after all, by cause."""
        found: Counter[str] = Counter()
        for counts in self.side.counts.by_label().values():
            found.update(counts.fallbacks)
        return found
