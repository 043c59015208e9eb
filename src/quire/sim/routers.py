"""Routers of a replay: which of several engines gets a request."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from quire.loop import Part
from quire.routing.page_index import PageIndex
from quire.routing.upstream import Upstream, preference_of, preferred
from quire.sim.published_events import EventWire
from quire.sim.replay import Replay
from quire.sim.scripts import ScriptedRequest
from quire.sim.trace_request import Trace

_LONGEST = 512  # tokens of a message: more than a router reads of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Engines behind a router. Their events arrive after `event_delay` seconds, or are lost with a chance of
    `event_loss`, drawn from `seed`. Each `restart_every` seconds the next engine in turn loses its cache, and each
    `flush_every` all of them do; None: never."""

    num_engines: int
    event_delay: float = 0.0
    event_loss: float = 0.0
    restart_every: float | None = None
    flush_every: float | None = None
    seed: int = 0


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


class ByEvents(RequestRouter):
    """The fewest tokens to compute before the first one: those of the prompt that events do not say are cached, and
    those that wait there. Tokens in host memory count as much as they take to load."""

    def __init__(self, trace: Trace, fleet: Fleet, page_size: int) -> None:
        super().__init__(trace, fleet, page_size)
        self.index = PageIndex(fleet.num_engines, page_size)
        self.wire = EventWire(
            self.index, fleet.num_engines, delay=fleet.event_delay, loss=fleet.event_loss, seed=fleet.seed
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
