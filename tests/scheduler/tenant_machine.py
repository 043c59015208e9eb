"""TenantMachine: random requests of tenants on a small cache, beside a plain model of who holds what.

The model knows no array of tenants. It knows of each cached prefix who computed it first, because it saw that, and of
each row whose request is in it. So it counts frames itself, and from them follow the laws: ceilings, floors that others
take for caches only, refusals that are true, and an end for every request.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from quire.cache import KVCache
from quire.cache.request_kv import RequestKV
from quire.cache.room import Room
from quire.cache.session import SessionSettings
from quire.errors import InvalidInput, RequestTooLarge
from quire.offload import Offloads, offload_of
from quire.plan.budget import MemoryPlan
from quire.prefix.node import nodes_below, path_to
from quire.scheduler.policy import scheduling_policy
from quire.scheduler.request import Request, RequestState
from quire.scheduler.sampling_params import SamplingParams
from quire.scheduler.scheduler import Scheduler
from quire.settings.tenants import tenants_of
from quire.spec.arena import ArenaLayout
from quire.spec.events import Namespace
from quire.spec.group import GroupSpec, ReachSpec
from quire.spec.ids import Tier
from quire.spec.layout import DType, Field, PageLayout
from quire.spec.pages import pages_for
from quire.testing import FakeModel
from quire.testing.choices import Choices
from quire.testing.fake_model import FakeStep

NAMES = ("default", "quiet", "noisy", "third")
KINDS = ("", "window", "state", "full", "arena window", "arena state")
FLOORS = ("0", "10%", "25%", "40%")
CEILINGS = (None, None, "30%", "50%", "80%")
MOST_TURNS = 3000
LACKS = ("would hold", "are missing", "needs ", "of another tenant, which came before")

Counts = dict[int, list[int]]
"""By group: frames of each tenant."""


@dataclass(frozen=True)
class Count:
    """What the model counts at one moment. `cached` are prefixes with their owner, and whether a lease holds them;
    `frames` the groups in which each has a frame."""

    used: Counts
    held: Counts
    cached: dict[tuple[Namespace, bytes], int]
    frames: dict[tuple[Namespace, bytes], frozenset[int]]


class TenantMachine:
    """An engine without an engine: requests of four tenants arrive, run, leave; terms change; flushes."""

    def __init__(self, choices: Choices) -> None:
        kind = choices.one_of(KINDS)
        self.is_plain = not kind
        plan = _plan(choices, kind)
        num_pages, max_requests = plan.num_pages, plan.max_requests
        given = {name: self._terms(choices) for name in NAMES}
        while True:
            try:
                terms = tenants_of(given)
                self.cache = KVCache(
                    plan,
                    eviction=choices.one_of(("density", "lru", "s3fifo")),
                    checkpoint_interval=choices.between(1, 12),
                    seconds=lambda: self.now,
                    sessions=SessionSettings(share=0.5, ttl_s=10.0),
                    offload=Offloads(),
                    tenants=terms,
                )
                break
            except InvalidInput:
                given[choices.one_of(NAMES)] = {}
        self.now = 0.0
        self.tenants = self.cache.parts.tenants
        assert self.tenants is not None
        self.scheduler = Scheduler(
            self.cache,
            scheduling_policy(choices.one_of(("fcfs", "lpm")), self.tenants),
            max_running=max_requests,
            max_tokens=choices.one_of((4, 16, 64)),
        )
        self.model = FakeModel(self.cache, 3)
        self.cache.parts.moved.append(self.model.oracle.move)
        self.rooms = self.cache.parts.rooms
        self.overlap = choices.chance(40) and plan.arena is None  # this model does not order moves behind its steps
        self.open: list[Request] = []
        self.rows: dict[RequestKV, int] = {}
        self.owner: dict[int, int] = {}  # of each page, as last seen
        self.first: dict[tuple[Namespace, bytes], tuple[int, int]] = {}  # tenant and page of each cached prefix
        self.flight: FakeStep | None = None
        self.given_up = 0  # rows of sessions that had ended for others before this turn
        self.freeing: set[int] = set()  # tenants of requests that have ended in this turn, whose own pages are free
        self.arrived = 0
        self.happened = Counter[str]()
        self.num_pages = num_pages

    def _terms(self, choices: Choices) -> dict[str, object]:
        return {
            "floor": choices.one_of(FLOORS),
            "ceiling": choices.one_of(CEILINGS),
            "weight": choices.one_of((0.5, 1, 3)),
        }

    # -- operations

    def step(self, choices: Choices) -> None:
        """Something happens; all is checked."""
        before, self.given_up = self.count(), self.cache.sessions.totals.sessions_given_up
        asks, self.freeing = set(range(len(NAMES))), set()
        if len(self.open) < 10 and choices.chance(45 if self.open else 90):
            self.arrive(choices)
        elif self.open and choices.chance(5):
            self.abort(choices.one_of(self.open))
        elif choices.chance(4):
            self.change(choices)
        elif choices.chance(2):
            self.flush(choices)
            before = self.count()
        elif choices.chance(5):
            self.now += 4.0
        elif choices.chance(4):
            self.retain(choices)
        else:
            asks = self.turn(before)
        self.check(before, asks)

    def arrive(self, choices: Choices) -> None:
        """A request, which mostly begins as others of its tenant do."""
        tenant = choices.below(len(NAMES))
        size, opening = self.cache.page_size, choices.below(3)
        prompt = [(opening + at) % 3 for at in range(choices.between(0, 4) * size)]
        prompt += [choices.below(3) for _ in range(choices.between(1, 2 * size + 3))]
        most = choices.between(1, 6)
        prompt = prompt[: self.cache.plan.largest_request - most]
        request = Request(
            f"r{self.arrived}",
            np.array(prompt or [1], dtype=np.int32),
            SamplingParams(max_tokens=most),
            max_tokens=most,
            namespace=_namespace(tenant, choices.below(2)),
            priority=choices.below(2),
            session_id=choices.one_of(("", "", "s")),
            owner=NAMES[tenant],
        )
        self.arrived += 1
        try:
            self.scheduler.add(request)
            self.open.append(request)
        except RequestTooLarge as error:
            refused = f"'{NAMES[tenant]}'" in error.message and error.fix
            self.happened["too large" if refused else "refused without a reason"] += 1
        if self.is_plain:
            need, most_pages = self.cache.plan.pages_of(len(request.tokens) + most), self._most(tenant)
            assert (request in self.open) == (need <= most_pages), f"{need} pages are needed, {most_pages} can be had"

    def abort(self, request: Request) -> None:
        self.scheduler.abort(request.request_id)
        self.open.remove(request)

    def change(self, choices: Choices) -> None:
        """Terms change, or are refused and stay."""
        tenants, name = self.tenants, choices.one_of(NAMES)
        assert tenants is not None
        before = list(tenants.terms)
        plan = self.cache.plan
        requests = [(r.request_id, r.namespace, plan.pages_of(r.num_prompt_tokens + r.max_tokens)) for r in self.open]
        try:
            tenants.change(name, self._terms(choices), requests)
            self.happened["changed"] += 1
        except InvalidInput:
            self.happened["not changed" if tenants.terms == before else "half changed"] += 1

    def flush(self, choices: Choices) -> None:
        offload_of(self.cache).flush(_namespace(choices.below(len(NAMES)), choices.below(2)))

    def retain(self, choices: Choices) -> None:
        """A client keeps a cached prefix for a time."""
        nodes = list(self.cache.tree.nodes())
        if nodes:
            node = choices.one_of(nodes)
            tokens = np.frombuffer(b"".join(each.key for each in reversed(path_to(node))), dtype=np.int32)
            offload_of(self.cache).retention.retain(tokens, node.namespace, ttl_seconds=20.0)

    def turn(self, before_it: Count) -> set[int]:
        """One turn of an engine. Returns the tenants that asked for room in it."""
        preempted, given_up = self.scheduler.num_preemptions, self.cache.sessions.totals.sessions_given_up
        self.cache.sessions.expire()
        offload_of(self.cache).retention.expire()
        for request in self.scheduler.waiting:  # a reason is checked that was found in this turn
            request.wait_reason = ""
        step = self.scheduler.schedule()
        self.see_rows()
        if self.scheduler.num_preemptions > preempted:
            self.happened["preempted"] += 1
        else:
            self.check_refusals()
            if self.cache.sessions.totals.sessions_given_up == given_up:  # a row that ends frees pages of its own
                self.check_evicted(before_it, self.count())
        asks = {NAMES.index(request.owner) for request in [*step.requests, *self.open]}
        asks &= {NAMES.index(r.owner) for r in self.open if r.state is RequestState.RUNNING}
        if self.scheduler.num_preemptions > preempted:
            asks = set(range(len(NAMES)))
        launched = self.model.launch(step, self.flight) if len(step) else None
        before, self.flight = self.flight, launched
        if before is not None:
            self.settle(before)
        if launched is not None and not self.overlap:
            self.settle(launched)
            self.flight = None
        return asks

    def settle(self, launched: FakeStep) -> None:
        self.scheduler.settle(launched.step, self.model.execute(launched))
        for request in launched.step.requests:
            if request in self.open and request.state is RequestState.FINISHED:
                assert request.output_tokens.tolist() == self.model.solo(request), "the tokens differ from those alone"
                self.open.remove(request)
                self.freeing.add(NAMES.index(request.owner))
                self.happened["finished"] += 1
                self.happened["hit"] += request.num_cached > 0
        self.cache.close_fence(launched.fence)

    def end(self) -> None:
        """Every request ends."""
        for _ in range(MOST_TURNS):
            if not self.open and self.flight is None:
                break
            self.now += 0.5
            self.freeing, self.given_up = set(), self.cache.sessions.totals.sessions_given_up
            before = self.count()
            self.check(before, self.turn(before))
        assert not self.happened["half changed"] + self.happened["refused without a reason"]
        assert not self.open, f"{[(r.request_id, r.owner, r.wait_reason) for r in self.open]} never ended"

    # -- the model

    def see_rows(self) -> None:
        for request in self.open:
            if request.kv is not None:
                self.rows[request.kv] = NAMES.index(request.owner)
        for kv in self.cache.rows.live.values():
            pages = self.cache.rows.page_ids(kv)[kv.lease.num_pages :]
            self.owner |= dict.fromkeys(pages.tolist(), self.rows[kv])

    def count(self) -> Count:
        """Who uses what now."""
        self.see_rows()
        cache, size = self.cache, self.cache.page_size
        live = list(cache.rows.live.values())
        self.rows = {kv: self.rows[kv] for kv in live}
        owners: dict[int, int] = {}
        for kv in live:
            pages = cache.rows.page_ids(kv)[kv.lease.num_pages :]
            owners |= dict.fromkeys(pages.tolist(), self.rows[kv])
        cached: dict[tuple[Namespace, bytes], int] = {}
        free: set[int] = set()
        of_page: dict[int, tuple[Namespace, bytes]] = {}
        held = {id(above) for lease in cache.parts.holds.leases() for above in path_to(lease.node)}
        visible = {id(node) for root in cache.tree.roots.values() for node in nodes_below(root)}
        first: dict[tuple[Namespace, bytes], tuple[int, int]] = {}
        for node in cache.tree.nodes():
            start = b"".join(above.key for above in reversed(path_to(node)))[: node.depth * size * 4]
            for at, page in enumerate(node.pages.tolist()):
                key = (node.namespace, start + node.key[: (at + 1) * size * 4])
                owners[page] = self._first(key, page)
                if id(node) not in held:
                    free.add(page)
                if id(node) in visible:
                    cached[key], of_page[page], first[key] = owners[page], key, (owners[page], page)
        self.first = first
        frames: dict[tuple[Namespace, bytes], set[int]] = {key: set() for key in cached}
        used: Counts = {}
        holding: Counts = {}
        for at, group in enumerate(cache.groups):
            column = cache.parts.frames.of(Tier.DEVICE, at)
            used[at], holding[at] = [0] * len(NAMES), [0] * len(NAMES)
            for page in np.flatnonzero(column.frame).tolist():
                owner = owners.get(page, self.owner.get(page, 0))
                is_idle = page in free if group.reach.whole else bool(column.ticket[page])
                used[at][owner] += 1
                holding[at][owner] += not is_idle
                if page in of_page:
                    frames[of_page[page]].add(at)
            for kv in live:
                used[at][self.rows[kv]] += len(group.frames_of(kv.row))
                holding[at][self.rows[kv]] += len(group.frames_of(kv.row))
        self.owner |= owners
        return Count(used, holding, cached, {key: frozenset(each) for key, each in frames.items()})

    def _first(self, key: tuple[Namespace, bytes], page: int) -> int:
        """Who computed a prefix first. One that is new is of a request that the model saw with that page."""
        known = self.first.get(key)
        if known is not None and known[1] == page:
            return known[0]
        seen = self.owner[page]
        assert seen == NAMES.index(key[0].salt.partition("/")[0] or "default"), "a page is another tenant's"
        return seen

    def _units(self, room: Room | None, ceiling: bool) -> list[int]:
        """Units of a room, or page ids, that each is promised, or may have."""
        assert self.tenants is not None
        total = self.num_pages if room is None else room.total
        found = []
        for each in self.tenants.terms:
            amount = each.ceiling if ceiling else each.floor
            found.append(total if amount is None else int(total * amount.share))
        return found

    def _most(self, tenant: int) -> int:
        floors = self._units(None, ceiling=False)
        return min(self._units(None, ceiling=True)[tenant], self.num_pages - sum(floors) + floors[tenant])

    def _in_room(self, room: Room | None, counts: Counts) -> list[int]:
        """The units of a room, or page ids, that each has."""
        if room is None:
            return counts[0]
        parts = [[stride * n for n in counts[at]] for at, stride in zip(room.indices, room.strides, strict=True)]
        return [sum(each) for each in zip(*parts, strict=True)]

    def _keeps(self, tenant: int, now: Count) -> bool:
        """Whether a tenant that has lost pages still has its floor in a room that they were evicted for. Of an arena a
        page with all its frames may have gone."""
        rooms: list[Room | None] = [room for room in self.rooms if room.groups[0].reach.whole]
        rooms += [None] * self.rooms[0].is_shared
        slack = [sum(room.strides) - 1 if room is not None and room.is_shared else 0 for room in rooms]
        return any(
            self._in_room(room, now.used)[tenant] >= self._units(room, ceiling=False)[tenant] - less
            for room, less in zip(rooms, slack, strict=True)
        )

    # -- laws

    def check(self, before: Count, asks: set[int]) -> None:
        """Ceilings and floors, and that the cache counts as the model does."""
        now = self.count()
        for room in self.rooms:
            ceilings, had = self._units(room, ceiling=True), self._in_room(room, before.used)
            for tenant, used in enumerate(self._in_room(room, now.used)):
                assert used <= max(ceilings[tenant], had[tenant]), f"{NAMES[tenant]} is above its ceiling"
        for at, group in enumerate(self.cache.groups):
            floors = self._units(group.room, ceiling=False)
            retained = offload_of(self.cache).retention
            if self.is_plain and not len(retained):
                promised = sum(map(max, now.held[at], floors))
                allowed = max(group.room.total, sum(map(max, before.held[at], floors)))
                assert promised <= allowed, "others hold what is promised"
            for tenant in range(len(NAMES)):
                lost = [k for k, own in before.cached.items() if own == tenant and at in before.frames[k]]
                # A frame that goes with its page is counted in the room of pages.
                lost = [k for k in lost if at not in now.frames.get(k, () if group.reach.whole else (at,))]
                gave_way = (
                    self.cache.sessions.totals.sessions_given_up > self.given_up
                )  # a row that ended frees its own
                if (
                    not lost or gave_way or group.reach.whole or tenant in self.freeing | asks
                ):  # of pages see `check_evicted`
                    continue
                least = min(before.used[at][tenant], floors[tenant])
                kept = self._keeps(tenant, now) if group.room.is_shared else now.used[at][tenant] >= least
                assert kept, f"{NAMES[tenant]} lost what it is promised"
                self.happened["lost frames to others"] += 1
        self.compare(now)

    def compare(self, now: Count) -> None:
        tenants = self.tenants
        assert tenants is not None
        tenants._look()
        for at, room in enumerate(self.rooms):
            used, held = self._in_room(room, now.used), self._in_room(room, now.held)
            assert tenants.used[at].tolist() == used, f"room {at} is used by {used}"
            assert (tenants.used - tenants.idle)[at].tolist() == held, f"room {at} is held by {held}"
        unheld = [0] * len(NAMES)
        for node in self.cache.tree.nodes():
            unheld[node.tenant] += 0 if node.level else node.num_pages
        assert self.cache.tree.num_unheld.tolist() == unheld
        self.cache.audit()

    def check_evicted(self, before: Count, now: Count) -> None:
        """The scheduler has made a step, and nothing was freed since: no tenant has lost cached pages below its floor,
        to others or to its own requests."""
        for tenant in range(len(NAMES)):
            lost = sum(own == tenant and key not in now.cached for key, own in before.cached.items())
            assert not lost or self._keeps(tenant, now), f"{NAMES[tenant]} lost {lost} pages within its floor"
            self.happened["evicted"] += lost > 0

    def check_refusals(self) -> None:
        """A request that waits for room lacks it: within its floor none does. Only where pages are all there is."""
        if not self.is_plain or self.flight is not None or len(offload_of(self.cache).retention):
            return
        now = self.count()
        floors, size = self._units(None, ceiling=False), self.cache.page_size
        claims = list(now.held[0])
        running = [r for r in self.open if r.state is RequestState.RUNNING]
        for request in running:
            assert request.kv is not None
            have = pages_for(self.cache.rows.allocated(request.kv), size)
            claims[NAMES.index(request.owner)] += pages_for(request.num_tokens + request.pending, size) - have + 1
        seen = set()
        for request in self.scheduler.waiting:
            tenant = NAMES.index(request.owner)
            is_first = tenant not in seen
            seen.add(tenant)
            if not is_first or not any(text in request.wait_reason for text in LACKS) or request.turn is not None:
                continue
            self.happened["lacks room"] += 1
            ahead = min(request.num_tokens + 1, request.num_prompt_tokens + request.max_tokens)
            need = self.cache.plan.pages_of(ahead)
            assert claims[tenant] + need > floors[tenant], f"{request.owner} waits within its floor"


def _plan(choices: Choices, kind: str) -> MemoryPlan:
    """Pages of one group, or of two: with rooms of their own, which may differ in size, or with an arena."""
    size, num_pages, max_requests = choices.one_of((1, 2, 4)), choices.between(12, 40), choices.between(2, 6)
    is_shared, _, last = kind.rpartition(" ")
    kinds = ("full", last)[: 1 + (last != "")]
    reaches = tuple(ReachSpec() if each == "full" else ReachSpec(each, 5 * (each == "window")) for each in kinds)
    states = max_requests * 2 + choices.between(2, 8)
    widths = (1, choices.between(1, 12) if is_shared else 1)
    layouts = [PageLayout(size, (Field(name="k", shape=(n,), dtype=DType.UINT8, layers=(0,)),)) for n in widths]
    groups = tuple(
        GroupSpec(name=f"{each.kind}{at}", layout=layout, reach=each)
        for at, (each, layout) in enumerate(zip(reaches, layouts, strict=False))
    )
    larger = choices.between(num_pages, 2 * num_pages) if last == "full" else num_pages
    frames = (larger, {"state": states}.get(last, num_pages))[: len(kinds)]
    arena = None
    if is_shared:
        needs = states if last == "state" else 8
        arena = ArenaLayout(size * (1 + widths[1] + num_pages + needs * widths[1]), (size, size * widths[1]))
        num_pages = min(num_pages, arena.most(0, needs))
    return MemoryPlan(
        page_size=size,
        groups=groups,
        num_pages=num_pages,
        context=100,
        max_requests=max_requests,
        frames=frames,
        arena=arena,
    )


def _namespace(tenant: int, which: int) -> Namespace:
    """One of the two namespaces of a tenant."""
    return Namespace(salt=f"{NAMES[tenant]}/{'x' * which}" if tenant else "")


def run_tenants(seed: int, steps: int) -> Counter[str]:
    """One life of a machine, from a seed; what happened in it."""
    choices = Choices.seeded(seed)
    machine = TenantMachine(choices)
    for _ in range(steps):
        machine.step(choices)
    machine.end()
    return machine.happened
