"""A scheduler on a hybrid cache with a model that needs no device: prompts in, outputs and hits out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count

import numpy as np

from quire.cache import KVCache
from quire.cache.statistics import FrameCounts
from quire.scheduler.policy import scheduling_policy
from quire.scheduler.request import Request
from quire.scheduler.sampling_params import SamplingParams
from quire.scheduler.scheduler import Scheduler
from quire.spec.group import ReachSpec
from quire.spec.hisparse import HotBuffers
from quire.spec.ids import Ids
from quire.testing import FakeModel, small_plan

FULL, STATE = ReachSpec(), ReachSpec("state")
VOCABULARY = 50


class HybridServer:
    """Serves prompts to their ends, a step at a time, and checks every output against its solo run."""

    def __init__(
        self,
        *reaches: ReachSpec,
        num_pages: int,
        page_size: int = 16,
        frames: Sequence[int] = (),
        max_requests: int = 4,
        chunk: int = 64,
        interval: int = 512,
        hot: HotBuffers | None = None,
    ) -> None:
        plan = small_plan(
            num_pages,
            page_size,
            max_requests=max_requests,
            groups=tuple(f"{reach.kind}{index}" for index, reach in enumerate(reaches)),
            reaches=reaches,
            frames=tuple(frames),
        )
        self.cache = KVCache(replace(plan, hot=hot), checkpoint_interval=interval)
        self.scheduler = Scheduler(self.cache, scheduling_policy("fcfs"), max_running=max_requests, max_tokens=chunk)
        self.model = FakeModel(self.cache, VOCABULARY)
        self._names = count()
        self._open: list[Request] = []

    def serve(self, *prompts: Sequence[int], max_tokens: int = 1) -> list[Request]:
        """Serve these at once; the requests, finished."""
        requests = [self.submit(prompt, max_tokens) for prompt in prompts]
        self.finish()
        return requests

    def submit(self, prompt: Sequence[int], max_tokens: int = 1) -> Request:
        """Queue a prompt."""
        params = SamplingParams(max_tokens=max_tokens)
        request = Request(f"r{next(self._names)}", ids(prompt), params, max_tokens=max_tokens)
        self.scheduler.add(request)
        self._open.append(request)
        return request

    def step(self) -> None:
        """One step, launched and settled."""
        step = self.scheduler.schedule()
        assert len(step), f"nothing progresses: {[request.wait_reason for request in self.scheduler.waiting]}"
        launched = self.model.launch(step)
        self.scheduler.settle(step, self.model.execute(launched))
        self.cache.close_fence(launched.fence)

    def finish(self) -> None:
        """Serve all that is queued to its end."""
        while self.scheduler.has_requests:
            self.step()
        self.cache.audit()
        while self._open:
            request = self._open.pop()
            assert request.output_tokens.tolist() == self.model.solo(request)

    def hit(self, prompt: Sequence[int], max_tokens: int = 1) -> int:
        """Tokens of this prompt that were cached when it came."""
        return self.serve(prompt, max_tokens=max_tokens)[0].num_cached

    def frames(self, group: int) -> FrameCounts:
        return list(self.cache.statistics().frames.values())[group]


def prompt(seed: int, length: int) -> list[int]:
    """Random tokens."""
    found: list[int] = np.random.default_rng(seed).integers(0, VOCABULARY, length).tolist()
    return found


def ids(tokens: Sequence[int]) -> Ids:
    """Tokens as the cache takes them."""
    return np.array(tokens, dtype=np.int32)
