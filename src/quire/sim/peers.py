"""Prefill engines of a replay as its decode engines see them, and the link between: pages arrive after the time that
their bytes take. A write that fails twice, or does not arrive in time, leaves the rest of the prompt to the decode
engine."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from quire.errors import InvalidInput
from quire.offload import offload_of
from quire.offload.tiering import Tiering
from quire.sim.replay import Replay
from quire.sim.scripts import ScriptedRequest
from quire.sim.tiers import SimulatedCopies, VirtualTiers
from quire.sim.trace_request import TraceRequest
from quire.spec.events import Namespace
from quire.spec.ids import Ids
from quire.tiers.transfer import Transfer
from quire.transfer.decode import choose_peer

_ONE_TOKEN: Ids = np.zeros(1, dtype=np.int32)
_NO_PLACES: Ids = np.empty(0, dtype=np.int32)
_TRIES = 2  # a write that fails is repeated once, as `PrefillSide` does


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedLink:
    """How pages and messages travel: bytes per second out of each prefill engine and into each decode engine, seconds
    before the first byte or for a message, and the chance of a write to fail, drawn from `seed`. A request waits at
    most `seconds`. Prompts that lack fewer than `least_tokens` are computed by the decode engine."""

    bandwidth: float = 10e9
    latency: float = 2e-4
    failures: float = 0.0
    seconds: float = 30.0
    least_tokens: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        if self.bandwidth <= 0:
            raise InvalidInput(f"a link of {self.bandwidth:g} bytes/s.", fix="give --link a speed: 10GB/s.")
        if not 0 <= self.failures <= 1:
            raise InvalidInput(f"{self.failures:g} of all writes fail.", fix="give a probability: 0 to 1.")


class Inbox:
    """Requests on their way to one engine (`quire.sim.replay.Requests`). `ended` is told of every end."""

    def __init__(self, ended: Callable[[str, float], None] = lambda request_id, now: None) -> None:
        self.ended = ended
        self._due: list[tuple[float, int, ScriptedRequest]] = []
        self._order = 0

    def __len__(self) -> int:
        return len(self._due)

    @property
    def next_time(self) -> float | None:
        """When the next one arrives."""
        return self._due[0][0] if self._due else None

    def push(self, request: ScriptedRequest) -> None:
        """A request that will arrive at its time."""
        heapq.heappush(self._due, (request.arrived, self._order, request))
        self._order += 1

    def until(self, now: float) -> Iterator[ScriptedRequest]:
        """Requests that have arrived by `now`, in order."""
        while self._due and self._due[0][0] <= now:
            yield heapq.heappop(self._due)[2]


@dataclass(slots=True, eq=False)
class _Part:
    """Pages of an ask. `lands` is when its bytes have arrived, or the word that they will not."""

    transfer: Transfer
    places: list[Ids]  # by group
    frames: list[Ids] | None = None  # on the host of the prefill engine, read until it lands
    lands: float | None = None
    error: str = ""


@dataclass(slots=True, eq=False)
class SimulatedAsk:
    """A prompt that a prefill engine computes (`quire.tiers.prefill.PrefillAsk`)."""

    peers: SimulatedPeers
    server: PrefillServer
    label: str
    request_id: str
    tokens: Ids
    namespace: Namespace
    num_tokens: int
    ends_at: float
    seconds: float
    why: str = ""
    is_over: bool = False
    is_done: bool = False  # its request has ended
    is_saved: bool = False  # it was saved once more after that
    parts: list[_Part] = field(default_factory=list)

    def want(self, transfer: Transfer, places: Sequence[np.ndarray]) -> None:
        """See `PrefillAsk.want`."""
        by_group = [_NO_PLACES] * len(self.server.tiers.hosts)
        for units, at in zip(transfer.units, places, strict=True):
            by_group[units.group] = at.astype(np.int32)
        self.parts.append(_Part(transfer, by_group))
        self.server.try_writes(self)

    def stop(self, cause: str = "") -> None:
        """See `PrefillAsk.stop`."""
        if cause:
            self.falls_back(cause)
        self.is_over = True

    def release(self, num_tokens: int) -> None:
        """See `PrefillAsk.release`."""
        if num_tokens < self.num_tokens and not self.is_over:
            self.falls_back("room")
        self.peers.received_tokens += num_tokens
        self.peers.asks_open.remove(self)
        self.peers.open_tokens[self.label] -= self.num_tokens
        self.server.drop(self)

    def falls_back(self, cause: str) -> None:
        """The rest of the prompt is computed by the decode engine. The first cause counts."""
        if not self.why:
            self.why = cause
            self.peers.fallbacks[cause] += 1


class PrefillServer:
    """A prefill engine: what decode engines have asked it for. `serve` is called after each of its turns."""

    def __init__(self, name: str, inbox: Inbox, link: SimulatedLink) -> None:
        self.name = name
        self._inbox = inbox
        self._link = link
        self._asks: dict[str, SimulatedAsk] = {}
        self._free_at = 0.0  # of its side of the link
        self._chances = np.random.default_rng([link.seed, len(name), *name.encode()])
        self._seen = (-1, -1)

    def attach(self, replay: Replay) -> None:
        """The engine behind it."""
        tiers = offload_of(replay.cache).tiers
        assert tiers is not None and isinstance(replay.tiers, VirtualTiers)
        self._replay = replay
        self.tiers: Tiering = tiers
        self.copies: SimulatedCopies = replay.tiers.copies

    def ask(self, ask: SimulatedAsk, now: float) -> None:
        """Queue a request that computes a prompt."""
        self._asks[ask.request_id] = ask
        request = TraceRequest(ask.request_id, ask.tokens, _ONE_TOKEN, namespace=ask.namespace)
        self._inbox.push(ScriptedRequest(request, now + self._link.latency, is_for_peer=True))

    def served(self, request: ScriptedRequest) -> None:
        """Its request has ended."""
        ask = self._asks.get(request.request_id)
        if ask is None:
            return
        ask.is_done = True
        if request.finish_reason == "refused":
            ask.falls_back("refused")
            ask.is_over = True

    def drop(self, ask: SimulatedAsk) -> None:
        """The ask has ended: nothing is computed for it any more."""
        del self._asks[ask.request_id]
        if not ask.is_done:
            self._replay.abort(ask.request_id)

    def serve(self) -> None:
        """Begin the writes whose pages are on the host."""
        seen = self.tiers.counters.saved_frames, len(self.tiers.moving)
        if seen != self._seen or any(ask.is_done for ask in self._asks.values()):
            self._seen = seen
            for ask in self._asks.values():
                self.try_writes(ask)

    def try_writes(self, ask: SimulatedAsk) -> None:
        """Begin the writes of an ask whose pages are on the host."""
        for part in ask.parts:
            if part.lands is None and not ask.is_over:
                self._try(ask, part)

    def _try(self, ask: SimulatedAsk, part: _Part) -> None:
        now = max(self._replay.clock.now, ask.peers.now + self._link.latency)
        part.frames = self.tiers.read(ask.namespace, ask.tokens, part.places)
        if part.frames is not None:
            ends = max(now, self._free_at, ask.peers.free_at)
            for _ in range(_TRIES):
                ends += part.transfer.num_bytes / self._link.bandwidth
                part.error = "link" if self._chances.random() < self._link.failures else ""
                if not part.error:
                    break
            self._free_at = ask.peers.free_at = ends
            part.lands = ends + self._link.latency
        elif ask.is_done and not self.tiers.is_saving(ask.namespace, ask.tokens, part.places):
            if not ask.is_saved:
                ask.is_saved = True
                if self.tiers.save_prompt(ask.namespace, ask.tokens):
                    return
            part.lands, part.error = now + self._link.latency, "unsent"


class SimulatedPeers:
    """The prefill engines as one decode engine sees them (`quire.tiers.prefill.PrefillPeers`)."""

    asks = True

    def __init__(self, name: str, servers: Sequence[PrefillServer], link: SimulatedLink, page_size: int) -> None:
        self.name = name
        self.asks_open: list[SimulatedAsk] = []
        self.open_tokens = {server.name: 0 for server in servers}
        self.free_at = 0.0  # of its side of the link
        self.num_asks = 0
        self.received_tokens = self.received_bytes = 0
        self.fallbacks: Counter[str] = Counter()
        self._servers = {server.name: server for server in servers}
        self._link = link
        self._page_size = page_size

    def attach(self, replay: Replay) -> None:
        """The engine that asks."""
        assert isinstance(replay.tiers, VirtualTiers)
        self._clock = replay.clock
        self._copies = replay.tiers.copies

    @property
    def now(self) -> float:
        """The time of the engine that asks."""
        return self._clock.now

    @property
    def next_time(self) -> float | None:
        """When the next known bytes arrive."""
        lands = [part.lands for ask in self.asks_open for part in ask.parts if part.lands is not None]
        return min(lands, default=None)

    def ask(self, tokens: Ids, namespace: Namespace, num_missing: int) -> SimulatedAsk | None:
        """See `PrefillPeers.ask`."""
        if num_missing < self._link.least_tokens:
            return None
        server = self._servers[choose_peer(self.open_tokens, tokens[: self._page_size])]
        self.num_asks += 1
        name, now, seconds = f"{self.name}-{self.num_asks}", self.now, self._link.seconds
        ask = SimulatedAsk(
            self, server, server.name, name, tokens.copy(), namespace, num_missing, now + seconds, seconds
        )
        self.open_tokens[server.name] += num_missing
        self.asks_open.append(ask)
        server.ask(ask, now)
        return ask

    def why_local(self, num_missing: int) -> str:
        """See `PrefillPeers.why_local`."""
        return ""

    def settle(self) -> list[tuple[Transfer, str]]:
        """See `PrefillPeers.settle`."""
        ended = []
        for ask in self.asks_open:
            if self.now >= ask.ends_at and not ask.is_over:
                ask.stop("deadline")
            over = [part for part in ask.parts if self._is_over(ask, part)]
            if over:
                ask.parts = [part for part in ask.parts if part not in over]
            for part in over:
                why = part.error or ("cancelled" if part.lands is None else "")
                if part.error and not ask.is_over:
                    ask.falls_back(part.error)
                if part.frames is not None:
                    self._land(ask.server, part)
                ended.append((part.transfer, why))
        return ended

    def _is_over(self, ask: SimulatedAsk, part: _Part) -> bool:
        return ask.is_over if part.lands is None else part.lands <= self.now

    def _land(self, server: PrefillServer, part: _Part) -> None:
        assert part.frames is not None
        if not part.error:
            self.received_bytes += part.transfer.num_bytes
            for units in part.transfer.units:
                frames = part.frames[units.group]
                self._copies.rows(units.group)[units.host] = server.copies.rows(units.group)[frames]
        server.tiers.end_reading(part.frames)
