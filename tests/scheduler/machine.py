"""One random life of a scheduler on a small cache, with a model that needs no device.

Requests arrive and are aborted at any step; every request that ends by itself must have exactly the tokens of its solo
run, something must always progress, and nothing may be held at the end.
"""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pytest

from quire.cache import KVCache
from quire.cache.audit import audit, private_pages
from quire.errors import ContextTooLong, RequestTooLarge
from quire.prefix.evict import POLICIES as EVICTION
from quire.scheduler.batch import Batch
from quire.scheduler.policy import POLICIES, scheduling_policy
from quire.scheduler.request import Request, RequestState
from quire.scheduler.sampling_params import SamplingParams
from quire.scheduler.scheduler import Scheduler
from quire.spec.events import Namespace
from quire.testing import FakeModel, FakeStep
from quire.testing.fuzz.choices import Choices
from quire.testing.fuzz.plans import hybrid_plan

NAMESPACES = (Namespace(), Namespace(salt="a"))


class SchedulerMachine:
    """An engine without an engine: schedule, launch, settle, with one step in flight or none."""

    def __init__(self, choices: Choices) -> None:
        page_size = choices.between(1, 4)
        self.plan = hybrid_plan(
            choices,
            choices.between(3, 16),
            page_size,
            context=choices.between(8, 40),
            max_requests=choices.between(1, 5),
        )
        self.overlap = choices.chance(50)
        self.max_tokens = choices.between(1, 8)
        self.cache = KVCache(
            self.plan,
            eviction=choices.one_of(sorted(EVICTION)),
            share_prefixes=not choices.chance(10),
            checkpoint_interval=choices.between(1, 12),
        )
        self.scheduler = Scheduler(
            self.cache,
            scheduling_policy(choices.one_of(sorted(POLICIES))),
            max_running=choices.between(1, self.plan.max_requests),
            max_tokens=self.max_tokens,
        )
        self.model = FakeModel(self.cache, vocabulary=choices.between(2, 3))
        self.requests: list[Request] = []
        self.expected: dict[Request, list[int]] = {}  # the outputs of solo runs
        self.in_flight: FakeStep | None = None
        self.idle = 0  # steps in a row that did nothing
        self.steps = 0
        self.happened: Counter[str] = Counter()

    def run(self, choices: Choices, num_requests: int) -> Counter[str]:
        """Serve that many requests to their ends and check what is left."""
        while len(self.requests) < num_requests or self.scheduler.has_requests or self.in_flight is not None:
            if len(self.requests) < num_requests and choices.chance(20):
                for _ in range(choices.between(1, 6)):
                    self.arrive(choices)
            if self.requests and choices.chance(3):
                self.abort(choices.one_of(self.requests))
            self.step()
        assert not len(private_pages(self.cache))
        assert not self.cache.retired
        assert self.cache.num_free_pages + self.cache.tree.num_evictable == self.plan.num_pages
        self.cache.clear()
        assert self.cache.num_free_pages == self.plan.num_pages
        assert all(request.state is RequestState.FINISHED for request in self.requests)
        self.happened["preemption"] += self.scheduler.num_preemptions
        self.happened["hit"] += sum(request.num_cached > 0 for request in self.requests)
        self.happened["evicted"] += self.cache.statistics().evicted_pages
        self.happened["finished"] += sum(request.finish_reason != "abort" for request in self.requests)
        return self.happened

    # -- operations

    def arrive(self, choices: Choices) -> None:
        """A new request; one in six asks for about as much as the server can hold."""
        prompt = self._prompt(choices)
        max_tokens = choices.between(1, min(12, self.plan.largest_request - len(prompt)))
        if choices.chance(16):
            total = max(2, self.plan.largest_request + choices.between(-2, 2))
            prompt = (prompt * total)[: choices.between(1, total - 1)]
            max_tokens = total - len(prompt)
            self.happened["at the limit"] += 1
        request = Request(
            f"r{self.happened['arrived']}",
            np.array(prompt, dtype=np.int32),
            SamplingParams(max_tokens=max_tokens, presence_penalty=choices.chance(15) / 2),  # waits for its own tokens
            max_tokens=max_tokens,
            stop_ids=frozenset([0]) if choices.chance(15) else frozenset(),
            namespace=NAMESPACES[choices.chance(20)],
            priority=choices.between(0, 2) if choices.chance(30) else 0,
        )
        self.happened["arrived"] += 1
        if len(prompt) + max_tokens > self.plan.largest_request:
            self._refused(request)
            return
        self.scheduler.add(request)
        self.requests.append(request)
        self.expected[request] = self.model.solo(request)

    def abort(self, request: Request) -> None:
        if request.state is not RequestState.FINISHED:
            self.happened[f"abort {request.state.name.lower()}"] += 1
            self.happened["abort in flight"] += request.num_launched > request.num_settled
            assert self.scheduler.abort(request.request_id) is request
        else:
            assert self.scheduler.abort(request.request_id) is None

    def step(self) -> None:
        """One turn of an engine, and all checks."""
        first = min(self._running(), key=lambda request: request.order, default=None)
        preemptions = first.num_preemptions if first is not None else 0
        batch = self.scheduler.schedule()
        assert first is None or first.num_preemptions == preemptions, "the first in order was preempted"
        self._check_batch(batch)
        launched = self.model.launch(batch, self.in_flight) if batch.works else None
        settled = self.in_flight is not None
        if self.in_flight is not None:
            self._settle(self.in_flight)
        self.in_flight = launched
        if launched is not None and not self.overlap:
            self._settle(launched)
            self.in_flight = None
        self._check(progress=settled or launched is not None)

    # -- checks

    def _check_batch(self, batch: Batch) -> None:
        assert batch.num_tokens <= self.max_tokens
        assert all(work.count > 0 for work in batch.works)
        assert len({work.request.request_id for work in batch.works}) == len(batch.works)
        self.happened["chunk"] += any(not work.samples for work in batch.works)
        self.happened["mixed"] += any(work.count > 1 for work in batch.works) and len(batch.works) > 1
        self.happened["prefix wait"] += any("prefix" in request.wait_reason for request in self.scheduler.waiting)

    def _settle(self, step: FakeStep) -> None:
        drawn = self.model.execute(step)
        for request in self.scheduler.settle(step.batch, drawn):
            if request.state is RequestState.FINISHED:
                assert request.output_tokens.tolist() == self.expected[request], "the output is not the solo run's"
                self.happened[f"finished by {request.finish_reason}"] += 1
        self.cache.close_fence(step.fence)

    def _check(self, *, progress: bool) -> None:
        audit(self.cache)
        self.model.oracle.check_cached()
        for request in self._running():
            assert request.num_settled <= request.num_launched <= request.num_known
            assert request.output_tokens.tolist() == self.expected[request][: request.num_outputs]
        assert all(request.wait_reason for request in self.scheduler.waiting)
        self.steps += 1
        self.idle = 0 if progress or not self.scheduler.has_requests else self.idle + 1
        assert self.idle < 2, f"nothing progresses: {[request.wait_reason for request in self.scheduler.waiting]}"
        work = sum(request.num_prompt_tokens + request.max_tokens for request in self.requests)
        assert self.steps < 500 + 50 * work, "requests thrash instead of finishing"

    def _refused(self, request: Request) -> None:
        """Too much is refused at once, with the numbers."""
        total = request.num_prompt_tokens + request.max_tokens
        kind = ContextTooLong if total > self.plan.context else RequestTooLarge
        before = self.cache.statistics(), len(self.scheduler.waiting)
        with pytest.raises(kind) as caught:
            self.scheduler.add(request)
        numbers = {int(n) for n in re.findall(r"\d+", str(caught.value))}
        assert {request.num_prompt_tokens, request.max_tokens} <= numbers
        assert numbers & {self.plan.context, self.plan.num_pages}
        assert before == (self.cache.statistics(), len(self.scheduler.waiting))
        self.happened["refused"] += 1

    # -- inside

    def _running(self) -> list[Request]:
        return [request for request in self.requests if request.state is RequestState.RUNNING]

    def _prompt(self, choices: Choices) -> list[int]:
        """Mostly the beginning of an earlier sequence, then a few tokens of its own."""
        room = self.plan.largest_request - 1
        earlier = choices.one_of((*self.requests, *self.requests[-1:] * 5)) if self.requests else None
        source = earlier.tokens.tolist() if earlier is not None and choices.chance(80) else []
        tokens = source[: choices.between(0, len(source))] if choices.chance(30) else source
        tokens = tokens + [choices.below(3) for _ in range(choices.between(0, 6))]
        return tokens[: choices.between(1, room) if choices.chance(50) else max(1, room // 2)] or [1]


def run_scheduler(seed: int, num_requests: int = 12) -> Counter[str]:
    """One life with that seed; returns what has happened."""
    choices = Choices.seeded(seed)
    return SchedulerMachine(choices).run(choices, num_requests)
