"""replay_scheduled: a trace in pages through `quire.sim.replay`, whose scheduler decides what runs and what it pins.

A token stands for a page, so that a replay has a step for every page of an output, and not for every token. All else is
the production code: scheduler, sessions, cache, pins. The policy is told how many tokens an output has, not pages.
A step takes as long as a page of output does at 50 tokens a second, whatever it computes. So when requests run depends
on the policy only where they wait for room, as in `bench.eviction.pinned`, and its optimum is that of the same times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from bench.eviction.paged_trace import Counts, PagedTrace
from bench.eviction.pinned import TOKENS_PER_S
from bench.eviction.sequential import SequentialResult, closed_sessions

from quire.cache.sessions import Sessions
from quire.loop import End, Loop, Part
from quire.plan.step_cost import CostModel
from quire.scheduler.request import Request
from quire.scheduler.step import Step
from quire.sim.pools import plain_pools
from quire.sim.replay import Replay, ReplaySettings
from quire.sim.scripts import ScriptedRequest
from quire.sim.trace_request import TraceRequest

MAX_RUNNING = 64


def requests_of(trace: PagedTrace) -> Iterator[TraceRequest]:
    """The requests with a token for each page. A prompt's last page, if it is not full, is a token of its own, and so
    is the last token of an output, which no step computes."""
    first_own = int(trace.ids.max()) + 1
    for number, request in enumerate(trace):
        prompt = -(-request.prompt_tokens // trace.page_size)
        own = np.full(max(prompt, len(request.pages)) + 1 - len(request.pages), first_own + number, dtype=np.int32)
        tokens = np.concatenate((request.pages, own))
        yield TraceRequest(
            request_id=str(number),
            prompt=tokens[:prompt],
            output=tokens[prompt:],
            arrival=request.arrival,
            session=request.session,
            namespace=request.namespace,
            calls_tool=request.ending == 2 if request.ending else None,
        )


def replay_scheduled(
    trace: PagedTrace, pool_tokens: int, settings: ReplaySettings, *, growth: float = 0.0, closes: float = 0.0
) -> SequentialResult:
    """Replay a trace in a pool of whole pages. Clients name their sessions and close this share of them after the last
    turn; none are named if it is 0. `growth` is that of `CostModel`, by token."""
    size = trace.page_size
    requests = list(requests_of(trace))
    longest = max(len(each.prompt) + len(each.output) for each in requests)
    plan = plain_pools(max(pool_tokens // size, longest), 1, context=longest, max_running=MAX_RUNNING)
    small = 1e-9  # seconds: what is computed adds nothing to a step
    cost = CostModel(
        launch=0.0, weights=size / TOKENS_PER_S, token=small, pair=small * growth * size, reads=((0.0, 0),)
    )
    parts: list[Part] = [_Lengths(requests, trace.output_tokens)]
    if closes:
        parts.append(_Closing(closed_sessions(trace, closes)[1]))
    replay = (_SessionReplay if closes else Replay)(plan, cost, settings, parts=parts)
    replay.cache.tree.longest_grown //= size  # a token has the bytes of a token, and stands for a page
    found = replay.run(requests)
    hits, refused = np.zeros(len(trace), dtype=np.int64), np.zeros(len(trace), dtype=np.bool_)
    for record in found.records:
        hits[int(record.request_id)] = record.hit_tokens * size
        refused[int(record.request_id)] = record.end == End.REFUSED
    return SequentialResult(hits, refused, found.evicted_tokens, found.manager_seconds)


class _SessionReplay(Replay):
    """Each request names its session."""

    def add(self, request: ScriptedRequest) -> None:
        request.session_id = request.session
        super().add(request)


class _Lengths(Part):
    """The cache counts what these requests generate in tokens, where theirs are pages."""

    def __init__(self, requests: Sequence[TraceRequest], output_tokens: Counts) -> None:
        computed = [len(each.prompt) + len(each.output) - 1 for each in requests]  # all but the last token
        self._begins = (np.array(computed) - output_tokens).tolist()

    def scheduled(self, step: Step) -> None:
        for request in step.requests:
            if request.kv is not None:
                request.kv.num_prompt = self._begins[int(request.request_id)]


class _Closing(Part):
    """The sessions of these requests are closed when they have ended."""

    def __init__(self, last: set[int]) -> None:
        self._last = last
        self._sessions: Sessions  # set with the loop

    def attach(self, loop: Loop) -> None:
        self._sessions = loop.cache.sessions

    def ended(self, request: Request, end: End, error: Exception | None) -> None:
        if int(request.request_id) in self._last:
            self._sessions.close(request.namespace, request.session_id)
