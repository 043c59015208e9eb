"""Routers of a replay: which of several engines gets a request, and the events of engines on their way to a router."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from quire.loop import Part
from quire.observe.kv_batch import KvBatches, KvEvent
from quire.observe.kv_publisher import MOST_KEPT
from quire.routing.page_index import EventOrder, PageIndex
from quire.routing.upstream import Upstream, preference_of, preferred
from quire.sim.arrivals import Inbox
from quire.sim.replay import Replay
from quire.sim.scripts import ScriptedRequest
from quire.sim.settings import Fleet
from quire.sim.trace_request import Trace
from quire.spec.events import AllCleared, CacheEvent

_BEAT_S = 1.0  # after a batch was lost, a message without events shows the gap, as one of the real publisher does
_LONGEST = 512  # tokens of a message: more than a router reads of it


@dataclass(slots=True)
class Behind:
    """One engine as its router sees it: the requests that it sent there and that have not ended, each with the tokens
    that it expected to be computed."""

    upstream: Upstream
    requests: dict[str, tuple[ScriptedRequest, float]] = field(default_factory=dict)

    def begin(self, request: ScriptedRequest, num_tokens: float) -> None:
        """A request is sent there."""
        self.requests[request.request_id] = request, num_tokens
        self.upstream.in_flight = len(self.requests)

    def end(self, request_id: str) -> None:
        """The request has ended."""
        del self.requests[request_id]
        self.upstream.in_flight = len(self.requests)

    @property
    def num_tokens(self) -> int:
        """Prompt tokens of its requests."""
        return sum(request.num_prompt_tokens for request, _ in self.requests.values())

    def num_waiting(self, now: float) -> float:
        """Tokens to compute before the first tokens of its requests."""
        waiting = [
            tokens for each, tokens in self.requests.values() if each.first_token is None or each.first_token > now
        ]
        return sum(waiting)


class RequestRouter:
    """Chooses an engine for each request."""

    def __init__(self, trace: Trace, fleet: Fleet, page_size: int) -> None:
        self.fleet = fleet

    def parts(self, engine: int) -> Sequence[Part]:
        """What an engine needs for it."""
        return ()

    def begin(self, engines: Sequence[Replay]) -> None:
        """These are the engines, all empty."""

    def lost(self, engine: int, now: float, *, restarted: bool) -> None:
        """An engine has lost its cache: it was flushed, or `restarted`."""

    def events(self) -> dict[str, int]:
        """What became of the events that it reads."""
        return {}

    def choose(self, request: ScriptedRequest, behind: Sequence[Behind]) -> tuple[int, float]:
        """The engine, and how many tokens of the prompt it has to compute, as far as the router knows."""
        raise NotImplementedError


class RoundRobin(RequestRouter):
    """One after the other."""

    _next = -1

    def choose(self, request: ScriptedRequest, behind: Sequence[Behind]) -> tuple[int, float]:
        self._next = (self._next + 1) % len(behind)
        return self._next, request.num_prompt_tokens


class LeastLoaded(RequestRouter):
    """The fewest prompt tokens of requests that wait and run."""

    def choose(self, request: ScriptedRequest, behind: Sequence[Behind]) -> tuple[int, float]:
        loads = [each.num_tokens for each in behind]
        return loads.index(min(loads)), request.num_prompt_tokens


class ByPrefix(RequestRouter):
    """As the router of `quire up`: by the beginning of the prompt. What all prompts of a trace begin with is taken for
    the message of the system, and what follows for the first one of the user."""

    def __init__(self, trace: Trace, fleet: Fleet, page_size: int) -> None:
        super().__init__(trace, fleet, page_size)
        self._num_shared = shared_tokens(trace)

    def choose(self, request: ScriptedRequest, behind: Sequence[Behind]) -> tuple[int, float]:
        upstreams = [each.upstream for each in behind]
        return upstreams.index(preferred(upstreams, self.key(request))[0]), request.num_prompt_tokens

    def key(self, request: ScriptedRequest) -> bytes:
        """What requests with the same beginning have in common."""
        tokens, shared = request.script[: request.num_prompt_tokens], self._num_shared
        messages = [
            {"role": "system", "content": tokens[: min(shared, _LONGEST)].tolist()},
            {"role": "user", "content": tokens[shared : shared + _LONGEST].tolist()},
        ]
        named = dict.fromkeys(["session_id"] * bool(request.session), request.session)
        body = {"messages": messages, "cache_salt": request.namespace.salt} | named
        return preference_of(json.dumps(body).encode()).key


class SimulatedPublisher(Part):
    """Publishes the events of one engine: a batch for each step that has any. As `quire.observe.kv_publisher` does, it
    keeps batches for readers that missed some, and begins with a higher number when it is started again. `sends` takes
    the time, the number and the events of a batch."""

    def __init__(self, sends: Callable[[float, int, Sequence[KvEvent]], None]) -> None:
        self._sends = sends
        self._first = self._next = 0
        self._queue: list[CacheEvent] = []
        self._kept: deque[tuple[int, Sequence[KvEvent]]] = deque(maxlen=MOST_KEPT)

    def follow(self, replay: Replay) -> None:
        """The engine whose events these are; it is empty."""
        self._clock, self._tree = replay.clock, replay.cache.tree
        self._batches = KvBatches(replay.cache.page_size, self._tree.names.seed)
        self._tree.names.follow(self._queue.append)

    def after_step(self, *, idle: bool) -> None:
        self.publish(self._clock.now)

    def publish(self, now: float) -> None:
        """Send what has happened since the last batch, if anything has: at this time, or when the engine is further."""
        if self._queue:
            events, number = self._batches.events(self._queue), self._next
            self._queue.clear()
            self._next += 1
            self._kept.append((number, events))
            self._sends(max(now, self._clock.now), number, events)

    def started_again(self, now: float) -> None:
        """The engine was started again at this time, and has nothing."""
        self._queue[:] = [AllCleared()]
        self._kept.clear()
        self._first = self._next = max(self._next, round(1e6 * now)) + 1
        self.publish(now)

    def again(self, start: int, now: float) -> list[tuple[int, Sequence[KvEvent]]]:
        """The batches from number `start` on that are kept. Everything cached is told anew if that is not all."""
        found = [batch for batch in self._kept if batch[0] >= start]
        if self._kept[0][0] > max(start, self._first):
            self._tree.tell_all()
            self.publish(now)
        return found


class EventWire:
    """Carries batches to an index: each arrives `delay` seconds after it was sent, or never, with a chance of `loss`
    that is drawn from `seed`. What was asked for again arrives after twice the delay, and is never lost."""

    def __init__(self, index: PageIndex, num_engines: int, *, delay: float, loss: float, seed: int) -> None:
        self._index, self._delay, self._loss = index, delay, loss
        self._chances = np.random.default_rng(seed)
        self._due: Inbox[Callable[[], None]] = Inbox()
        self._orders = [EventOrder() for _ in range(num_engines)]
        self.publishers = [SimulatedPublisher(partial(self._send, at)) for at in range(num_engines)]
        self.num_lost = self.num_asked = 0

    def pass_until(self, now: float) -> None:
        """Apply what has arrived by this time."""
        for arrive in self._due.until(now):
            arrive()

    def _send(self, engine: int, now: float, number: int, events: Sequence[KvEvent]) -> None:
        arrives = now + self._delay
        if self._chances.random() >= self._loss:
            self._due.push(arrives, partial(self._receive, engine, arrives, number, events))
        else:
            self.num_lost += 1
            self._due.push(arrives + _BEAT_S, partial(self._ask, engine, arrives + _BEAT_S, number + 1))

    def _receive(self, engine: int, now: float, number: int, events: Sequence[KvEvent]) -> None:
        self._index.apply(engine, self._orders[engine].receive(number, events))
        self._ask(engine, now)

    def _ask(self, engine: int, now: float, known: int = 0) -> None:
        start = self._orders[engine].asks(known)
        if start is not None:
            self.num_asked += 1
            answered = now + 2 * self._delay
            self._due.push(answered, partial(self._answered, engine, answered, start))

    def _answered(self, engine: int, now: float, start: int) -> None:
        self._index.apply(engine, self._orders[engine].told_again(self.publishers[engine].again(start, now)))
        self._ask(engine, now)


class ByEvents(RequestRouter):
    """The fewest tokens to compute before the first one: those of the prompt that events do not say are cached, and
    those that wait there. Tokens in host memory count as much as they take to load."""

    def __init__(self, trace: Trace, fleet: Fleet, page_size: int) -> None:
        super().__init__(trace, fleet, page_size)
        self.index = PageIndex(fleet.num_replicas, page_size)
        self.wire = EventWire(
            self.index, fleet.num_replicas, delay=fleet.event_delay, loss=fleet.event_loss, seed=fleet.loss_seed
        )
        self._load_cost = 0.0

    def parts(self, engine: int) -> Sequence[Part]:
        return [self.wire.publishers[engine]]

    def begin(self, engines: Sequence[Replay]) -> None:
        self._load_cost = engines[0].tiers.load_cost
        for publisher, engine in zip(self.wire.publishers, engines, strict=True):
            publisher.follow(engine)

    def lost(self, engine: int, now: float, *, restarted: bool) -> None:
        publisher = self.wire.publishers[engine]
        if restarted:
            publisher.started_again(now)
        else:
            publisher.publish(now)

    def events(self) -> dict[str, int]:
        return {"lost": self.wire.num_lost, "asked": self.wire.num_asked}

    def choose(self, request: ScriptedRequest, behind: Sequence[Behind]) -> tuple[int, float]:
        now = request.arrived
        self.wire.pass_until(now)
        prompt = request.script[: request.num_prompt_tokens]
        held = self.index.held(prompt, request.namespace)
        costs = [len(prompt) - device - (both - device) * (1 - self._load_cost) for device, both in held]

        def cost(at: int) -> tuple[float, int, int]:
            each = behind[at]
            return costs[at] + each.num_waiting(now), each.upstream.in_flight, self.index.num_pages(at)

        found = min(range(len(behind)), key=cost)
        return found, costs[found]


ROUTERS: dict[str, type[RequestRouter]] = {
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "prefix": ByPrefix,
    "events": ByEvents,
}
"""Routers by the names that users give."""


def shared_tokens(trace: Trace) -> int:
    """How many first tokens all prompts of a trace have in common."""
    requests = iter(trace)
    first = next(requests).prompt
    shared = len(first)
    for request in requests:
        both = min(shared, len(request.prompt))
        differs = np.flatnonzero(first[:both] != request.prompt[:both])
        shared = int(differs[0]) if len(differs) else both
        if not shared:
            break
    return shared
