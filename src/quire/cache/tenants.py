"""Tenants: what each holds of a cache, what it may lose, and whose request is next.

A namespace is that of one tenant, and so is each page: the part of its salt before "/" is the name of a key, and a
tenant has keys. In each room:

    used = held + idle                         held: by running requests, sessions, retentions; idle: evictable
    used <= ceiling                            of each tenant; its own idle pages go first for its requests
    sum of max(held, floor) <= room            so a floor is lent to caches of others, and never to what they hold
    an eviction for others leaves a tenant     min(used before, floor)

So a request within its tenant's floor needs no preemption: what lies there can be evicted. Where floors and ceilings
leave a choice, the tenant with most above its floor loses first, by weight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from quire.cache.room import Room
from quire.cache.running import Lengths, Rows
from quire.cache.states import GroupCache
from quire.errors import InvalidInput, OutOfPages
from quire.memory.residency import Residency
from quire.plan.budget import MemoryPlan
from quire.prefix.radix_cache import RadixCache
from quire.prefix.tenant_policies import TenantShares
from quire.settings.tenants import TenantTerms, check_tenants
from quire.spec.events import Namespace
from quire.spec.ids import Bools, Ids, Tier
from quire.spec.pages import pages_for
from quire.spec.rank import Rank

R = TypeVar("R")

_FEW = 16  # tenants, which are counted one by one
_ENDLESS = 1e6  # times the memory: no ceiling


@dataclass(slots=True)
class TenantUse:
    """What became of one tenant's requests."""

    prompt_tokens: int = 0
    hit_tokens: int = 0
    lost_pages: int = 0  # cached pages that left the device for requests of others


@dataclass(slots=True, eq=False)
class Account:
    """One room, or the page ids of a cache without a group that is read whole. `strides` are units by group, and for a
    page id; `per_page` are those of a page that leaves with all its frames, 0 where no page leaves for this room."""

    room: Room | None
    group: int
    strides: Lengths
    per_page: int

    def total(self, plan: MemoryPlan, *, now: bool) -> int:
        """Its units now, or those that it has when a change of its size has ended, which `plan` is the goal of."""
        if self.room is None:
            return plan.num_pages
        return self.room.total if now or self.room.is_shared else plan.split[self.group]


@dataclass(slots=True)
class Turns:
    """Weighted fair queueing: tokens of each tenant's requests divided by its weight; `now` is what it was before the
    last one that began."""

    spent: list[float]
    now: float = 0.0


class Tenants(TenantShares):
    """The tenants of one cache, by number; 0 is `default`. Only the thread of the step loop may use it. Arrays of
    amounts are int64 `[accounts, tenants]`, in units of each room."""

    def __init__(self, terms: Sequence[TenantTerms], plan: MemoryPlan, num_pages: int) -> None:
        self.terms = list(terms)
        self.of_page = np.zeros(num_pages + 1, dtype=np.uint8)
        self.of_row = np.zeros(plan.max_requests, dtype=np.uint8)
        self.uses = [TenantUse() for _ in terms]
        self.num_tenants = len(terms)
        self.over: Bools = np.ones(len(terms), dtype=np.bool_)
        """Those that hold more than they are promised, as of the last question: what they hold may end for others."""
        self._numbers = {key: number for number, each in enumerate(terms) for key in each.keys}
        self._plan = plan  # that of the size that was asked for last
        self._turns = Turns([0.0] * len(terms))
        self._limits: dict[bool, tuple[Lengths, Lengths, Lengths]] = {}  # keys: now, or later; totals, floors, ceilings
        self._is_limited = False  # tenants lose only what those who ask let them lose
        self._only: int | None = None  # the one that makes room within its ceiling now
        self._kept = [0] * len(terms)  # idle pages of each that stay now
        self._passed = [False] * len(terms)  # those whose first request lacks room in this round of admissions
        self._is_short = False  # and others may begin within their floors only

    def attach(
        self,
        groups: Sequence[GroupCache],
        rooms: Sequence[Room],
        frames: Residency,
        tree: RadixCache,
        num_free_pages: Callable[[], int],
        changed: Callable[[], None],
    ) -> None:
        """The cache is built of these parts. `changed` reports that requests that did not fit may fit now."""
        self._groups, self._rooms, self._frames, self._tree = tuple(groups), tuple(rooms), frames, tree
        self._num_free_pages, self._changed = num_free_pages, changed
        num_groups, whole = len(groups), [group.reach.whole for group in groups]
        self._accounts: list[Account] = []
        for room in rooms:
            strides = np.zeros(num_groups + 1, dtype=np.int64)
            strides[list(room.indices)] = room.strides
            leaves = any(whole[index] for index in room.indices)
            self._accounts.append(Account(room, room.indices[0], strides, int(strides.sum()) * leaves))
        if not any(whole):
            strides = np.zeros(num_groups + 1, dtype=np.int64)
            strides[-1] = 1
            self._accounts.append(Account(None, 0, strides, 1))
        self._strides = np.stack([each.strides for each in self._accounts])
        self._main = next(at for at, each in enumerate(self._accounts) if each.per_page)
        self._bound: npt.NDArray[np.float64] = np.full((len(self._accounts), len(self.terms)), np.inf)
        self._wanted = np.zeros_like(self._bound, dtype=np.int64)
        self._look()
        self.check(self.terms)

    def number(self, namespace: Namespace) -> int:
        """The tenant of requests in that namespace."""
        return self._numbers.get(namespace.salt.partition("/")[0], 0)

    def name(self, tenant: int) -> str:
        return self.terms[tenant].name

    def is_over(self, namespace: Namespace) -> bool:
        return bool(self.over[self.number(namespace)])

    # -- terms

    @property
    def num_bytes(self) -> int:
        """The KV memory that is shared, in bytes, when a change of its size has ended."""
        return self._bytes_of(self._totals(now=False))

    def _bytes_of(self, totals: Lengths) -> int:
        layouts = [group.layout.bytes_per_frame for group in self._plan.groups]
        units = [1 if room.is_shared else layouts[room.indices[0]] for room in self._rooms]
        return sum(int(total) * size for total, size in zip(totals.tolist(), units, strict=False))

    def check(self, terms: Sequence[TenantTerms], num_bytes: int | None = None) -> None:
        """Raise InvalidInput unless the cache can keep these terms, now or with so many bytes."""
        check_tenants(terms, self.num_bytes if num_bytes is None else num_bytes)

    def change(
        self,
        name: str,
        given: Mapping[str, Any],
        requests: Iterable[tuple[str, Namespace, int]] = (),
        num_pinned: int = 0,
    ) -> None:
        """Other terms for a tenant, from now on. `requests` are ids, namespaces and pages at their end of those that
        wait or run; callers have pinned `num_pinned` pages. Raises InvalidInput; nothing has changed then."""
        at = next((at for at, each in enumerate(self.terms) if each.name == name), None)
        if at is None:
            known = ", ".join(each.name for each in self.terms)
            raise InvalidInput(f"there is no tenant '{name}'.", fix=f"use one of {known}.")
        before, after = self.terms, list(self.terms)
        after[at] = after[at].changed(given)
        self.check(after)
        plan = self._plan
        self.terms, self._limits = after, {}
        for request_id, namespace, num_pages in requests:
            if num_pages > (most := self.most_pages(namespace)):
                self.terms, self._limits = before, {}
                whose = before[self.number(namespace)].name
                raise InvalidInput(
                    f"request {request_id} of tenant '{whose}' needs {num_pages} pages, and could have {most} then.",
                    fix="wait until it has ended, or end it.",
                )
        room = (
            plan.num_pages
            - pages_for(plan.largest_request, plan.page_size)
            - self.promised_in(plan.num_pages, plan.pool_bytes)
        )
        if num_pinned and (num_pinned > room or self.terms[at].ceiling is not None):
            self.terms, self._limits = before, {}
            raise InvalidInput(
                f"retentions have pinned {num_pinned} pages, and with these terms {max(0, room)} could be, of tenants "
                f"without a ceiling.",
                fix="release pins (POST /v1/cache/release), or wait until they have expired.",
            )
        self._bound[:] = np.inf
        self._changed()

    def limits(self, *, now: bool = True) -> tuple[Lengths, Lengths]:
        """Floors and ceilings now, or when a change of the size has ended. Without a ceiling all may be held, also what
        a smaller size will not have."""
        totals = self._totals(now=now)
        kept = self._limits.get(now)
        if kept is None or not np.array_equal(totals, kept[0]):
            total_bytes = max(1, self._bytes_of(totals))
            floors = [min(1.0, each.floor.of(total_bytes)) for each in self.terms]
            ceilings = [_ENDLESS if each.ceiling is None else each.ceiling.of(total_bytes) for each in self.terms]
            found = [(totals[:, None] * np.array(part)).astype(np.int64) for part in (floors, ceilings)]
            kept = self._limits[now] = totals, found[0], found[1]
        return kept[1:]

    def promised_in(self, num_pages: int, num_bytes: int) -> int:
        return int(num_pages * min(1.0, sum(each.floor.of(num_bytes) for each in self.terms)))

    def got_pages(self, pages: Ids, tenant: int) -> None:
        self.of_page[pages] = tenant

    def got_row(self, row: int, tenant: int) -> None:
        self.of_row[row] = tenant

    def is_capped(self, namespace: Namespace) -> bool:
        return self.terms[self.number(namespace)].ceiling is not None

    def most_pages(self, namespace: Namespace) -> int:
        """Pages of the largest request of a namespace that can ever run: within its ceiling, beside the floors of
        others."""
        tenant, (floors, ceilings) = self.number(namespace), self.limits(now=False)
        most = np.minimum(ceilings[:, tenant], self._totals(now=False) - floors.sum(axis=1) + floors[:, tenant])
        low, high = 0, self._plan.num_pages
        while low < high:
            middle = (low + high + 1) // 2
            needs = np.array([g.needs(middle, 0) + g.reach.in_place for g in self._groups] + [middle])
            low, high = (middle, high) if (self._strides @ needs <= most).all() else (low, middle - 1)
        return low

    # -- what is held

    def _totals(self, *, now: bool = True) -> Lengths:
        return np.array([each.total(self._plan, now=now) for each in self._accounts])

    def resized(self, plan: MemoryPlan) -> None:
        """The size becomes that of this plan."""
        self._plan = plan

    def frames_for(self, namespace: Namespace, num_pages: int) -> list[int]:
        """Frames that each group must have in all, so that a request of so many pages fits within its limits."""
        tenant, (floors, _) = self.number(namespace), self.limits()
        others = [each for at, each in enumerate(self.terms) if at != tenant]
        ceiling, shares = self.terms[tenant].ceiling, sum(each.floor.share for each in others if not each.floor.bytes)
        sizes = floors @ np.array([at != tenant and each.floor.bytes > 0 for at, each in enumerate(self.terms)])
        needs = self._strides @ np.array([*(g.needs(num_pages, 0) + g.reach.in_place for g in self._groups), num_pages])
        part = 1.0 if ceiling is None or ceiling.bytes else max(ceiling.share, 1e-9)
        least = np.ceil(np.maximum(needs / part, (needs + sizes) / max(1 - shares, 1e-9)))
        found = [int(each.total(self._plan, now=True)) for each in self._accounts]
        return [
            min(found[at], int(least[at])) // int(self._strides[at, index])
            for index in range(len(self._groups))
            for at in [next(at for at, each in enumerate(self._accounts) if each.strides[index])]
        ]

    def _count(self, pages: Bools) -> Lengths:
        """Pages by tenant."""
        if len(self.terms) > _FEW:
            return np.bincount(self.of_page[pages], minlength=len(self.terms))
        return np.array([np.count_nonzero(pages & (self.of_page == each)) for each in range(len(self.terms))])

    def _look(self) -> None:
        """Count what is used, and what of it is idle, from the residency table. O(page ids)."""
        groups, frames = self._groups, self._frames
        used = np.zeros((len(groups) + 1, len(self.terms)), dtype=np.int64)
        idle, unheld = np.zeros_like(used), self._tree.num_unheld
        taken = [0] * (len(groups) + 1)
        for at, group in enumerate(groups):
            used[at] = self._count(group.table.frame != 0)
            idle[at] = self._count(group.table.ticket != 0) if group.table.reclaims else unheld
            if group.reach.in_place:
                used[at] += np.bincount(self.of_row, group.num_own(), len(self.terms)).astype(np.int64)
            taken[at] = group.frames.num_used
        used[-1], idle[-1] = self._count(frames.anchor(Tier.DEVICE).frame != 0), unheld
        taken[-1] = int(used[-1].sum())
        self.used, self.idle = self._strides @ used, self._strides @ idle
        self._others = self._strides @ np.array(taken) - self.used.sum(axis=1)
        self._unheld = list(unheld)
        self._bound[:] = self.used

    def in_bytes(self) -> tuple[Lengths, Lengths]:
        """Bytes that each tenant holds, and those that are idle, of the groups' frames."""
        self._look()
        rooms, layouts = self._rooms, [group.layout.bytes_per_frame for group in self._plan.groups]
        units = np.array([1 if room.is_shared else layouts[room.indices[0]] for room in rooms])
        held = (self.used - self.idle)[: len(rooms)]
        return units @ held, units @ self.idle[: len(rooms)]

    def wanted_by(self, rows: Rows, counts: Lengths, growing: Rows) -> Lengths:
        """Frames by group and tenant, and page ids in the last line, that `growing` rows need for `counts[i]` pages
        more, and all `rows` for their next step."""
        num = len(self.terms)
        new = np.bincount(self.of_row[growing], counts, num).astype(np.int64)
        wanted = np.tile(new, (len(self._groups) + 1, 1))
        for at, group in enumerate(self._groups):
            if group.reach.in_place:
                tenants = self.of_row[rows]
                wanted[at] = [group.wanted(rows[tenants == each], int(new[each])) for each in range(num)]
        return wanted

    def pages_by(self, pages: Sequence[Ids]) -> Lengths:
        """As `wanted_by`, for these pages of each group, and in the last line."""
        return np.stack([np.bincount(self.of_page[each], minlength=len(self.terms)) for each in pages])

    # -- who may grow

    def granted(self, wanted: Lengths) -> None:
        """These frames are allocated next."""
        self._bound += self._strides @ wanted

    def is_tight(self, wanted: Lengths) -> bool:
        """Whether so many frames more may need an eviction, or a refusal. It counts only if that is not plain."""
        units = self._strides @ wanted
        floors, ceilings = self.limits()
        self._bound += units
        free = self._totals() - self._strides @ np.array([*(g.frames.num_used for g in self._groups), 0])
        if self._accounts[-1].strides[-1]:
            free[-1] = self._num_free_pages()
        if (units.sum(axis=1) + floors.sum(axis=1) <= free).all() and (self._bound <= ceilings).all():
            return False
        refused = self.refusal(wanted)
        self.granted(wanted)
        return bool(refused) or bool((self.used + units > ceilings).any())

    def refusal(self, wanted: Lengths, freed: Lengths | None = None, *, begins: bool = False) -> str:
        """Why these frames, by group and tenant, cannot be had even if all is evicted that may be; "" if they can. Idle
        are also units that would be `freed`. What a smaller size will not have is only for requests that run,
        and not for one that `begins`. Says who is `over`, and what each may lose."""
        self._look()
        self._wanted = self._strides @ wanted
        floors, ceilings = self.limits()
        after = self.used - self.idle + self._wanted
        if freed is not None:
            after -= freed
        beyond = (after > ceilings) & (self._wanted > 0)
        if beyond.any():
            self.over = np.logical_or.reduce(beyond)
            at, tenant = np.argwhere(beyond)[0].tolist()
            excess = (after - ceilings).max(axis=1, where=beyond, initial=0)
            self.lack_pages = self._in_pages(excess)
            return self._told(at, tenant, int(after[at, tenant]), int(ceilings[at, tenant]))
        above = after > floors
        leaving = [each.room.leaving if begins and each.room is not None else 0 for each in self._accounts]
        lack = np.maximum(after, floors).sum(axis=1) + self._others - self._totals() + leaving
        self.over = np.logical_or.reduce(above[lack > 0] if (lack > 0).any() else above)
        if not self.over.any():
            self.over = np.ones_like(self.over)
        self.lack_pages = self._in_pages(lack)
        if (lack <= 0).all():
            return ""
        promised = "; the rest is promised to other tenants" if (floors > after)[lack > 0].any() else ""
        return f"{int(lack.max())} units are missing beside what tenants hold{promised}"

    def _in_pages(self, units: Lengths) -> int:
        """Pages that make up for so many units of each account."""
        pages = [-(-int(n) // each.per_page) for n, each in zip(units, self._accounts, strict=True) if each.per_page]
        return max(0, *pages)

    def _told(self, at: int, tenant: int, need: int, most: int) -> str:
        total = max(1, int(self._totals()[at]))
        share, held = f"{need / total:.1%}", int((self.used - self.idle)[at, tenant]) / total
        name, ceiling = self.terms[tenant].name, most / total
        return (
            f"tenant '{name}' would hold {share} of the KV memory, and its ceiling is {ceiling:.1%}: its running "
            f"requests, sessions and retentions hold {held:.1%}"
        )

    def pages_left(self, row: int, groups: Sequence[int]) -> int:
        """How many pages more a row may have, with frames in all groups of the rooms of these."""
        self._look()
        tenant, (floors, ceilings) = self.of_row[row], self.limits()
        held = self.used - self.idle
        others = np.maximum(held, floors).sum(axis=1) - np.maximum(held, floors)[:, tenant]
        most = np.minimum(ceilings[:, tenant], self._totals() - self._others - others) - held[:, tenant]
        rooms = [at for at, each in enumerate(self._accounts) if each.strides[list(groups)].any()]
        return min(int(most[at]) // int(self._strides[at].sum()) for at in rooms)

    # -- who loses

    def begin_eviction(self) -> None:
        """From now on tenants lose only what the last call of `refusal` lets them lose. `end_eviction` follows."""
        self._is_limited, spare = True, self._spared()
        per_page = [(at, each.per_page) for at, each in enumerate(self._accounts) if each.per_page]
        pages = np.minimum.reduce([spare[at] // units for at, units in per_page])
        self._kept = [unheld - max(0, count) for unheld, count in zip(self._unheld, pages.tolist(), strict=True)]

    def end_eviction(self) -> None:
        """Callers may evict what they like."""
        self._kept = [0] * len(self.terms)
        self._is_limited, self._only = False, None

    def _spared(self) -> Lengths:
        """Units that each tenant may lose."""
        floors, _ = self.limits()
        held = self.used - self.idle
        spare: Lengths = np.maximum(0, self.idle - np.maximum(0, floors - held - self._wanted))
        return spare

    def overflows(self) -> Iterator[tuple[int, int, int]]:
        """Accounts and tenants that would pass a ceiling, and by how many units."""
        _, ceilings = self.limits()
        excess = self.used + self._wanted - ceilings
        for at, tenant in np.argwhere((excess > 0) & (self._wanted > 0)).tolist():
            yield at, tenant, int(excess[at, tenant])

    def cut(self, at: int, tenant: int, units: int) -> int:
        """From now on only this tenant loses pages: returns how many to evict for an account, 0 where its frames go
        without pages; these are reclaimed."""
        account = self._accounts[at]
        if account.per_page:
            self._only = tenant
            return max(1, units // account.per_page)
        for index in np.flatnonzero(account.strides[:-1]).tolist():
            group = self._groups[index]
            group.evict(-(-units // int(account.strides[index])), Rank.USED, self._is_of(tenant))
        return 0

    def losers(self) -> Iterator[int]:
        """For `TenantPolicies`: most above its floor first, by weight."""
        if self._only is not None:
            return iter((self._only,))
        if not self._is_limited:  # a caller evicts
            self._look()
            self._wanted[:] = 0
        return iter(self._order(self._main, self._tree.num_unheld))

    def may_lose(self, tenant: int) -> int:
        """For `TenantPolicies`."""
        unheld = self._tree.num_unheld[tenant]
        return unheld if self._only is not None else max(0, unheld - self._kept[tenant])

    def lost(self, before: Sequence[int]) -> None:
        """An eviction has ended: `before` it tenants had so many idle pages."""
        for tenant, (had, has) in enumerate(zip(before, self._tree.num_unheld, strict=True)):
            if self._is_limited and not self._wanted[self._main, tenant]:
                self.uses[tenant].lost_pages += had - has

    def evict_frames(self, group: int, num_frames: int, most: Rank) -> int:
        """Reclaim frames of a group that is read in part, from tenants that may lose them. Returns how many."""
        self._look()
        at = next(at for at, each in enumerate(self._accounts) if each.strides[group])
        spare = self._spared()[at] if self._is_limited else self.idle[at]
        stride, num_left = int(self._strides[at, group]), num_frames
        for tenant in self._order(at, None):
            count = min(num_left, int(spare[tenant]) // stride)
            if count > 0:
                num_left -= self._groups[group].evict(count, most, self._is_of(tenant))
        return num_frames - num_left

    def may_keep(self, group: int, row: int, rank: Rank) -> bool:
        """Whether a row may have one frame more of a group, for a checkpoint of this rank, which is free then."""
        wanted = np.zeros((len(self._groups) + 1, len(self.terms)), dtype=np.int64)
        wanted[group, self.of_row[row]] = 1
        if self.refusal(wanted) or any(self.overflows()):
            return False
        if not self._groups[group].num_free:
            self.begin_eviction()
            self.evict_frames(group, 1, rank)
            self.end_eviction()
        self.granted(wanted)
        return bool(self._groups[group].num_free)

    def _is_of(self, tenant: int) -> Any:
        return lambda pages: self.of_page[pages] == tenant

    def _order(self, at: int, unheld: Sequence[int] | None) -> list[int]:
        """Tenants that may lose pages, or frames of an account: most above its floor first, by weight."""
        floors, _ = self.limits()
        used = self.used[at] + self._wanted[at] - floors[at]
        if unheld is not None:  # pages have gone since the last look
            used = used - self._accounts[at].per_page * (np.array(self._unheld) - np.array(unheld))
        first = sorted(range(len(self.terms)), key=lambda each: -float(used[each]) / self.terms[each].weight)
        return first if unheld is None else [each for each in first if self.may_lose(each) > 0]

    # -- whose request is next

    def take_turns(self, queues: dict[int, deque[R]], cost: Any) -> list[R]:
        """Requests of several tenants in the order of weighted fair queueing, each tenant's in its own order. A round
        of admissions begins."""
        turns = self._turns
        self._passed, self._is_short = [False] * len(self.terms), False
        for tenant in queues:  # who was away, or could not begin, has saved nothing
            turns.spent[tenant] = max(turns.spent[tenant], turns.now)
        spent, order = {tenant: turns.spent[tenant] for tenant in queues}, list[R]()
        while spent:
            tenant = min(spent, key=lambda each: (spent[each], each))
            order.append(queues[tenant].popleft())
            spent[tenant] += cost(order[-1]) / self.terms[tenant].weight
            if not queues[tenant]:
                del spent[tenant]
        return order

    def charge(self, namespace: Namespace, num_tokens: int, *, begins: bool = False) -> None:
        """A request of this namespace takes so many tokens of steps, now that it `begins` or after it."""
        tenant, turns = self.number(namespace), self._turns
        if begins:
            turns.now = max(turns.now, turns.spent[tenant])
        turns.spent[tenant] += num_tokens / self.terms[tenant].weight

    def objection(self, namespace: Namespace, wanted: Lengths, soft: Lengths, more: int) -> str | None:
        """Why a request with these claims, by group and tenant, does not begin now; "" if its tenant allows it, or
        would if `more` pages were idle. None: it is within its tenant's floor, so it has room."""
        tenant = self.number(namespace)
        over = self.over
        freed = np.array([each.per_page for each in self._accounts])[:, None] * soft
        freed = freed + self._strides.sum(axis=1)[:, None] * (more * over)
        refused = self.refusal(wanted, freed, begins=True)
        if more:  # what if: whose rows may end for it was answered before
            self.over = over
        floors, _ = self.limits()
        if ((self.used - self.idle + self._wanted)[:, tenant] <= floors[:, tenant]).all():
            return None
        if not refused and self._is_short:
            return "a request of another tenant, which came before, waits for room"
        return refused

    def passes(self, namespace: Namespace) -> bool:
        """A request of this namespace lacks room: those of other tenants may begin before it. Beside a full tenant
        these are all, else those within their floors."""
        tenant = self.number(namespace)
        self._passed[tenant] = True
        _, ceilings = self.limits()
        own = (self.used - self.idle + self._wanted)[:, tenant] > ceilings[:, tenant]
        self._is_short = self._is_short or not own.any()
        return True

    def was_passed(self, namespace: Namespace) -> bool:
        """Whether an earlier request of the same tenant lacks room in this round."""
        return self._passed[self.number(namespace)]

    # -- for messages

    def out_of_pages(self, num_new: int, free: int, why: str) -> OutOfPages:
        """The error for `refusal`."""
        return OutOfPages(group="pages", wanted=num_new, free=free, evictable=0, held_by=why)

    def too_large(self, namespace: Namespace, num_pages: int) -> str:
        """Why a request of so many pages can never run; "" if it can."""
        most = self.most_pages(namespace)
        if num_pages <= most:
            return ""
        each = self.terms[self.number(namespace)]
        ceiling = f"its ceiling is {each.ceiling}" if each.ceiling is not None else "it has no ceiling"
        floors = self.limits(now=False)[0][self._main]
        promised = (floors.sum() - floors[self.number(namespace)]) / max(1, int(self._totals(now=False)[self._main]))
        told = f"{ceiling}; promised to others: {promised:.1%}"
        return f"needs {num_pages} pages; tenant '{each.name}' can have {most} of {self._plan.num_pages} ({told})"
