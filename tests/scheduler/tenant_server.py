"""TenantServer: requests of tenants on a scheduler, with a model that needs no device."""

from __future__ import annotations

from typing import Any

import numpy as np

from quire.cache import KVCache
from quire.offload import Offloads
from quire.plan.budget import MemoryPlan
from quire.scheduler.policy import TenantsRequests, scheduling_policy
from quire.scheduler.request import Request, RequestState
from quire.scheduler.sampling_params import SamplingParams
from quire.scheduler.scheduler import Scheduler
from quire.settings.tenants import tenants_of
from quire.spec.events import Namespace
from quire.spec.group import ReachSpec
from quire.testing import FakeModel, small_plan

QUIET, NOISY = Namespace(salt="quiet/"), Namespace(salt="noisy/")


class TenantServer:
    """Serves requests of tenants to their ends, in pages of one token."""

    def __init__(
        self,
        terms: dict[str, Any],
        *,
        num_pages: int = 40,
        max_running: int = 4,
        kinds: str = "full",
        context: int = 0,
        plan: MemoryPlan | None = None,
    ) -> None:
        reaches = (ReachSpec(),) if kinds == "full" else (ReachSpec(), ReachSpec(kinds, 4 * (kinds == "window")))
        plan = plan or small_plan(
            num_pages,
            1,
            context=context,
            max_requests=max_running,
            groups=tuple(reach.kind for reach in reaches),
            reaches=reaches,
            frames=(num_pages, 12)[: len(reaches)],
        )
        self.cache = KVCache(plan, offload=Offloads(retain_share=0.9), tenants=tenants_of(terms), checkpoint_interval=4)
        tenants = self.cache.parts.tenants
        assert tenants is not None
        self.tenants = tenants
        policy = scheduling_policy("fcfs", tenants)
        assert isinstance(policy, TenantsRequests)
        self.turns = policy
        self.scheduler = Scheduler(self.cache, policy, max_running=max_running, max_tokens=64)
        self.model = FakeModel(self.cache, 3)
        self.cache.parts.moved.append(self.model.oracle.move)
        self.arrived = 0

    def add(self, namespace: Namespace, prompt: list[int], most: int = 1, session: str = "") -> Request:
        """A request waits."""
        params = SamplingParams(max_tokens=most)
        tokens = np.array(prompt, dtype=np.int32)
        name, owner = f"r{self.arrived}", namespace.salt.rstrip("/")
        request = Request(name, tokens, params, max_tokens=most, namespace=namespace, owner=owner, session_id=session)
        self.arrived += 1
        self.scheduler.add(request)
        return request

    def step(self) -> list[Request]:
        """One step; returns the requests that began in it."""
        step = self.scheduler.schedule()
        if len(step):
            launched = self.model.launch(step)
            self.scheduler.settle(step, self.model.execute(launched))
            self.cache.close_fence(launched.fence)
        self.cache.audit()
        return list(step.admitted)

    def run(self, *requests: Request) -> None:
        """Until all of these have ended."""
        for _ in range(200):
            if all(request.state is RequestState.FINISHED for request in requests):
                return
            self.step()
        raise AssertionError([request.wait_reason for request in requests])

    def serve(self, namespace: Namespace, prompt: list[int], most: int = 1, session: str = "") -> int:
        """One request alone; returns its hit tokens."""
        request = self.add(namespace, prompt, most, session)
        self.run(request)
        return request.num_cached


def text(number: int, length: int) -> list[int]:
    """A prompt that begins as no other."""
    return [number] * length
