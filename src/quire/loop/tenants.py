"""TenantsPart: counts what each tenant's requests take, for the order of admissions and for statistics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from quire.cache import KVCache
from quire.cache.tenants import Tenants
from quire.counters import Section, counter, gauge, labelled
from quire.loop.loop import Loop
from quire.loop.part import End, Part
from quire.plan.budget import MemoryPlan
from quire.scheduler.policy import TenantsRequests
from quire.scheduler.request import Request
from quire.scheduler.step import Step


@dataclass(frozen=True, kw_only=True)
class TenantCounters:
    """One tenant: what it is promised, what it has, and what became of its prompts. Bytes are those of frames on the
    device, in all groups."""

    PREFIX: ClassVar = "tenant_"
    floor_bytes: int = gauge("KV memory that no other tenant takes from it.")
    ceiling_bytes: int = gauge("KV memory that it may have at most; without a ceiling all of it.")
    weight: float = gauge("Its part of admissions where requests of several tenants wait.", start=1.0)
    held_bytes: int = gauge("KV memory of its running requests, sessions and retentions.")
    cached_bytes: int = gauge("KV memory of its cached pages that could be evicted.")
    waiting_requests: int = gauge("Requests that wait for room.")
    prompt_tokens: int = counter("Prompt tokens of admitted requests.")
    hit_tokens: int = counter("Prompt tokens that came from the cache.")
    lost_pages: int = counter("Cached pages that left the device for requests of other tenants, or for a smaller size.")


@dataclass(kw_only=True)
class AllTenants:
    """All tenants by name."""

    tenants: dict[str, TenantCounters] = labelled("tenant", TenantCounters)


@dataclass(frozen=True, kw_only=True)
class TenantState:
    """A tenant: the names of its keys, its terms, sizes in bytes, and its counters."""

    name: str
    keys: tuple[str, ...]
    floor: str
    ceiling: str | None
    weight: float
    now: TenantCounters


def parts_for_tenants(cache: KVCache) -> list[TenantsPart]:
    """The part of a cache with tenants; none without them."""
    return [TenantsPart(cache.parts.tenants)] if cache.parts.tenants is not None else []


class TenantsPart(Part):
    """The tenants of one cache."""

    def __init__(self, tenants: Tenants) -> None:
        self.tenants = tenants
        self._loop: Loop | None = None
        self._prompt_tokens, self._hit_tokens = [0] * tenants.num_tenants, [0] * tenants.num_tenants

    def attach(self, loop: Loop) -> None:
        queue = loop.scheduler.queue
        assert isinstance(queue, TenantsRequests)
        self._loop, self._queue = loop, queue

    def scheduled(self, step: Step) -> None:
        for request in step.admitted:
            number = self.tenants.number(request.namespace)
            self._prompt_tokens[number] += request.num_prompt_tokens
            self._hit_tokens[number] += request.num_cached
            self._queue.charge(request.namespace, request.num_tokens - request.num_cached, begins=True)

    def ended(self, request: Request, end: End, error: Exception | None) -> None:
        self._queue.charge(request.namespace, request.num_outputs)

    def fits(self, plan: MemoryPlan) -> None:
        """Raise what `Tenants.check` raises if a plan is too small for their terms."""
        self.tenants.check(self.tenants.terms, plan)

    def states(self) -> dict[str, TenantCounters]:
        """All tenants now."""
        assert self._loop is not None
        tenants, waiting = self.tenants, [0] * len(self.tenants.terms)
        for request in self._loop.scheduler.waiting:
            waiting[tenants.number(request.namespace)] += 1
        held, idle = tenants.in_bytes()
        total = tenants.num_bytes
        return {
            each.name: TenantCounters(
                floor_bytes=int(each.floor.of(total) * total),
                ceiling_bytes=total if each.ceiling is None else min(total, int(each.ceiling.of(total) * total)),
                weight=each.weight,
                held_bytes=int(held[at]),
                cached_bytes=int(idle[at]),
                waiting_requests=waiting[at],
                prompt_tokens=self._prompt_tokens[at],
                hit_tokens=self._hit_tokens[at],
                lost_pages=int(tenants.lost_pages[at]),
            )
            for at, each in enumerate(tenants.terms)
        }

    def listing(self) -> list[TenantState]:
        """All tenants, with their terms."""
        return [
            TenantState(
                name=each.name,
                keys=each.keys,
                floor=str(each.floor),
                ceiling=None if each.ceiling is None else str(each.ceiling),
                weight=each.weight,
                now=now,
            )
            for each, now in zip(self.tenants.terms, self.states().values(), strict=True)
        ]

    def change(self, name: str, terms: Mapping[str, Any]) -> list[TenantState]:
        """Other terms for a tenant (`Tenants.change`). Returns all of them."""
        assert self._loop is not None
        plan, requests = self._loop.cache.plan, self._loop.scheduler.requests
        pages = [(r.request_id, r.namespace, plan.pages_of(r.num_prompt_tokens + r.max_tokens)) for r in requests]
        self.tenants.change(name, terms, pages, self._loop.cache.offload.retention.num_pinned)
        return self.listing()

    def counters(self) -> list[Section]:
        return [("", AllTenants(tenants=self.states()))]
