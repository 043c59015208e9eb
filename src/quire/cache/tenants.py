"""Tenants: what each holds of a cache, what it may lose, and whose request is next.

A namespace is that of one tenant, and so is each page: the part of its salt before "/" is the name of a key, and a
tenant has keys. In each room:

    used = held + idle                         held: by running requests, sessions, retentions; idle: evictable
    used <= ceiling                            of each tenant; its own idle pages go first for its requests
    sum of max(held, floor) <= room            so a floor is lent to caches of others, and never to what they hold
    an eviction for others leaves a tenant     min(used before, floor); of an arena a page and its frames less

So a request within its tenant's floor needs no preemption: what lies there can be evicted. Where floors and ceilings
leave a choice, the tenant with most above its floor loses first, by weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.cache.page_owners import OwnedColumn, PageOwners
from quire.cache.room import Room
from quire.cache.running import NO_ROWS, Lengths, Rows
from quire.cache.states import GroupCache
from quire.errors import InvalidInput, RequestTooLarge
from quire.memory.residency import Residency
from quire.plan.budget import MemoryPlan
from quire.prefix.node import Node
from quire.prefix.radix_cache import RadixCache
from quire.prefix.tenant_policies import TenantShares
from quire.settings.tenants import NEARLY, TenantTerms, check_tenants
from quire.spec.events import Namespace
from quire.spec.ids import Bools, Ids, Tier
from quire.spec.pages import pages_for
from quire.spec.rank import Rank

_ENDLESS = 1e6  # times the memory: no ceiling
_BLOCKED = (
    "",
    "an earlier request of its tenant waits for room",
    "a request of another tenant, which came before, waits for room",
)


@dataclass(slots=True, eq=False)
class Account:
    """One room, or the `num_ids` page ids where these can be short alone: without a whole group, or with an arena. A
    page frees at least `least` units, `per_page` with all frames, or 0. `strides` are units by group, and of an id."""

    room: Room | None
    strides: Lengths
    least: int
    per_page: int
    num_ids: int

    def total(self, plan: MemoryPlan, *, now: bool) -> int:
        """Its units now, or those that it has when a change of its size has ended, which `plan` is the goal of."""
        if self.room is None:
            return self.num_ids if now else plan.num_pages
        return self.room.total if now else self.room.size_in(plan)


class Tenants(TenantShares):
    """The tenants of one cache, by number; 0 is `default`. Only the thread of the step loop may use it. Arrays of
    amounts are int64 `[accounts, tenants]`, in units of each room. A step costs O(tenants) in numpy."""

    def __init__(self, terms: Sequence[TenantTerms], plan: MemoryPlan, num_pages: int) -> None:
        self.num_tenants = len(terms)
        self.owners = PageOwners(num_pages, len(terms))
        self.of_row = np.zeros(plan.max_requests, dtype=np.uint16)
        self.lost_pages: Lengths = np.zeros(len(terms), dtype=np.int64)
        """Cached pages of each that left the device for requests of others."""
        self.over: Bools = np.ones(len(terms), dtype=np.bool_)
        """Those that hold more than they are promised, as of the last question: what they hold may end for others."""
        self._numbers = {key: number for number, each in enumerate(terms) for key in each.keys}
        self._plan = plan  # that of the size that was asked for last
        self._have(list(terms))
        self._for: int | None = None  # the account that an eviction makes room in, None: callers evict what they like
        self._blocked: Lengths = np.zeros(len(terms), dtype=np.int64)  # in this round of admissions, see `_BLOCKED`
        self._is_short = False  # others may begin within their floors only

    def _have(self, terms: list[TenantTerms]) -> None:
        self.terms, self._weights = terms, np.array([each.weight for each in terms])
        self._limits: dict[bool, tuple[Lengths, Lengths, Lengths]] = {}  # keys: now, or later; totals, floors, ceilings

    def attach(
        self,
        groups: Sequence[GroupCache],
        rooms: Sequence[Room],
        frames: Residency,
        tree: RadixCache,
        changed: Callable[[], None],
    ) -> None:
        """The cache is built of these parts. `changed` reports that requests that did not fit may fit now."""
        self._groups, self._changed = groups, changed
        num_groups, whole = len(groups), [group.reach.whole for group in groups]
        self.num_unheld: Lengths = np.frombuffer(tree.num_unheld, dtype=np.int64)  # those of the tree, live
        tables = [*(group.table for group in groups), frames.anchor(Tier.DEVICE)]
        self.tables = [table for table in tables if isinstance(table, OwnedColumn)]
        self._accounts: list[Account] = []
        self.rooms = [*rooms, *([] if any(whole) and not rooms[0].is_shared else [None])]  # None: page ids
        for room in self.rooms:
            strides = np.zeros(num_groups + 1, dtype=np.int64)
            strides[[-1] if room is None else list(room.indices)] = 1 if room is None else room.strides
            least = int(strides @ np.array([*whole, True]))
            self._accounts.append(Account(room, strides, least, int(strides.sum()) * (least > 0), self._plan.num_pages))
        layouts = [group.layout.bytes_per_frame for group in self._plan.groups]
        sizes = [1 if room.is_shared else layouts[room.indices[0]] for room in rooms]
        self._unit_bytes = np.array([*sizes, 0][: len(self._accounts)])
        self._strides = np.stack([each.strides for each in self._accounts])
        self._main = next(at for at, each in enumerate(self._accounts) if each.least)
        self.at_ids = self.rooms.index(None) if None in self.rooms else self._main  # is short if page ids are
        self._wanted: Lengths = np.zeros((len(self._accounts), len(self.terms)), dtype=np.int64)
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
        return self._plan.room_bytes

    def check(self, terms: Sequence[TenantTerms], plan: MemoryPlan | None = None) -> None:
        """Raise InvalidInput unless the cache can keep these terms, now or with another plan."""
        plan = plan or self._plan
        least = self._need(plan.pages_of(2)) / np.maximum(1, self._totals(now=False, plan=plan))
        check_tenants(terms, plan.room_bytes, float(least.max()), max(0, plan.pool_bytes - plan.room_bytes))

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
        self._have(after)
        for request_id, namespace, num_pages in requests:
            if num_pages > (most := self.most_pages(namespace)):
                self._have(before)
                raise InvalidInput(
                    f"request {request_id} of tenant '{self.name(self.number(namespace))}' needs {num_pages} pages, "
                    f"and could have {most} then.",
                    fix="wait until it has ended, or end it.",
                )
        room = plan.num_pages - pages_for(plan.largest_request, plan.page_size) - self.promised_in(plan)
        if num_pinned and (num_pinned > room or self.terms[at].ceiling is not None):
            self._have(before)
            raise InvalidInput(
                f"retentions have pinned {num_pinned} pages, and with these terms {max(0, room)} could be, of tenants "
                f"without a ceiling.",
                fix="release pins (POST /v1/cache/release), or wait until they have expired.",
            )
        self._changed()

    def limits(self, *, now: bool = True) -> tuple[Lengths, Lengths]:
        """Floors and ceilings now, or when a change of the size has ended. Without a ceiling all of now may be held."""
        totals = self._totals(now=now)
        have = np.stack((totals, totals - self._others * now))  # what is no tenant's is promised to none
        kept = self._limits.get(now)
        if kept is None or not np.array_equal(have, kept[0]):
            total_bytes = max(1, int(self._unit_bytes @ totals))
            floors = [min(1.0, each.floor.of(total_bytes)) for each in self.terms]
            ceilings = [_ENDLESS if each.ceiling is None else each.ceiling.of(total_bytes) for each in self.terms]
            parts = [np.array(part) * NEARLY for part in (floors, ceilings)]
            found = [(totals[:, None] * part).astype(np.int64) for part in parts]
            promised = np.maximum(1, found[0].sum(axis=1))
            exact = found[0].astype(object)  # bytes times bytes are more than 64 bits hold
            fitting = (exact * np.clip(have[1], 0, promised)[:, None] // promised[:, None]).astype(np.int64)
            kept = self._limits[now] = have, fitting, found[1]
        return kept[1:]

    def promised_in(self, plan: MemoryPlan) -> int:
        return int(plan.num_pages * min(1.0, sum(each.floor.of(plan.room_bytes) for each in self.terms)))

    def got_pages(self, pages: Ids, tenant: int) -> None:
        self.owners.give(pages, tenant)

    def got_row(self, row: int, tenant: int) -> None:
        self.of_row[row] = tenant

    def is_capped(self, namespace: Namespace) -> bool:
        return self.terms[self.number(namespace)].ceiling is not None

    def most_pages(self, namespace: Namespace) -> int:
        """Pages of the largest request of a namespace: within its ceiling, beside the floors of others."""
        tenant, (floors, ceilings) = self.number(namespace), self.limits(now=False)
        most = np.minimum(ceilings[:, tenant], self._totals(now=False) - floors.sum(axis=1) + floors[:, tenant])
        low, high = 0, self._plan.num_pages
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if (self._need(middle) <= most).all() else (low, middle - 1)
        return low

    def _need(self, num_pages: int) -> Lengths:
        """Units of a request of so many pages, by account."""
        frames = [group.needs(num_pages, 0) + group.reach.in_place for group in self._groups]
        return np.array(self._strides @ np.array([*frames, num_pages]))

    # -- what is held

    def _totals(self, *, now: bool = True, plan: MemoryPlan | None = None) -> Lengths:
        return np.array([each.total(plan or self._plan, now=now) for each in self._accounts])

    def resized(self, plan: MemoryPlan) -> None:
        """The size becomes that of this plan."""
        self._plan = plan

    def units_for(self, namespace: Namespace, num_pages: int) -> list[int]:
        """Units that each room must have in all, so that a request of so many pages fits within its limits."""
        tenant, (floors, _) = self.number(namespace), self.limits(now=False)
        others = [each for at, each in enumerate(self.terms) if at != tenant]
        ceiling, shares = self.terms[tenant].ceiling, sum(each.floor.share for each in others if not each.floor.bytes)
        sizes = floors @ np.array([at != tenant and each.floor.bytes > 0 for at, each in enumerate(self.terms)])
        needs = self._need(num_pages)
        part = 1.0 if ceiling is None or ceiling.bytes else max(ceiling.share, 1e-9)
        least = np.ceil(np.maximum(needs / part, (needs + sizes) / max(1 - shares, 1e-9)))
        rooms = zip([each.room for each in self._accounts], least.tolist(), strict=True)
        return [int(units) for room, units in rooms if room is not None]

    def by_tenant(self, rows: Rows, amounts: Lengths) -> Lengths:
        """The sums of `amounts[i]` of each row, by tenant."""
        return np.bincount(self.of_row[rows], amounts, self.num_tenants).astype(np.int64)

    def _look(self) -> None:
        """What is used now, and what of it is idle. O(tenants + rows)."""
        used = self._in_frames()
        idle = np.array([each.idle_by.sum(axis=0) if each.reclaims else self.num_unheld for each in self.tables])
        for at, group in enumerate(self._groups):
            if group.reach.in_place:
                own = group.num_own()
                used[at] += self.by_tenant(np.arange(len(own)), own)
        taken = np.array([*(group.frames.num_used for group in self._groups), int(used[-1].sum())])
        self.used, self.idle = self._strides @ used, self._strides @ idle
        self._others = self._strides @ taken - self.used.sum(axis=1)
        self._unheld = idle[-1]

    def in_bytes(self) -> tuple[Lengths, Lengths]:
        """Bytes that each tenant holds, and those that are idle, of the groups' frames."""
        self._look()
        return self._unit_bytes @ (self.used - self.idle), self._unit_bytes @ self.idle

    def wanted_by(self, rows: Rows, counts: Lengths, growing: Rows) -> Lengths:
        """Frames by group and tenant, and page ids last: `counts[i]` pages of `growing`, the next step of `rows`."""
        wanted = np.tile(self.by_tenant(growing, counts), (len(self._groups) + 1, 1))
        for at, group in enumerate(self._groups):
            if group.reach.in_place:
                lacking = rows[group.remaining(rows, NO_ROWS, NO_ROWS) > 0]
                tenants, new = self.of_row[lacking], wanted[at].copy()
                wanted[at] = 0
                for each in np.unique(tenants).tolist():
                    wanted[at, each] = group.wanted(lacking[tenants == each], int(new[each]))
        return wanted

    def pages_by(self, pages: Sequence[Ids]) -> Lengths:
        """As `wanted_by`, for these pages of each group, and in the last line."""
        return np.array([self.owners.counts(each) for each in pages])

    # -- who may grow

    def refusal(self, wanted: Lengths, freed: Lengths | None = None, *, begins: bool = False) -> str:
        """Why these frames, by group and tenant, cannot be had even if all is evicted that may be, or "". Units
        `freed` are idle. One that `begins` gets nothing that a smaller size will not have. Says who is `over`."""
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
        self.lack_pages, self._lack = self._in_pages(lack), lack
        if (lack <= 0).all():
            return ""
        promised = "; the rest is promised to other tenants" if (floors > after)[lack > 0].any() else ""
        return f"{int(lack.max())} units are missing beside what tenants hold{promised}"

    def has_beside(self, wanted: Lengths, more: Lengths) -> bool:
        """Whether there is room for `more` frames of each group too, whichever tenant gets them."""
        return not self.refusal(wanted) and bool((self._lack + self._strides @ more <= 0).all())

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

    def begin_eviction(self, at: int, spare: Lengths | None = None) -> None:
        """From now on tenants lose what makes room in one account: no more than `spare` units each, by default what the
        last call of `refusal` lets them lose. The last page or frame may be larger. `end_eviction` follows."""
        self._look()
        if spare is None:
            floors, held = self.limits()[0][at], self.used[at] - self.idle[at]
            spare = self.idle[at] - np.maximum(0, floors - held - self._wanted[at])
        self._for, self._spare, self._before, self._seen = at, spare, self._in_frames(), self.num_unheld.copy()

    def end_eviction(self) -> None:
        """Callers may evict what they like."""
        self._for = None
        self._look()

    def _in_frames(self) -> Lengths:
        """Frames of each tenant's pages, by group, and page ids in the last line."""
        return np.array([table.frames_by for table in self.tables])

    def _left(self) -> tuple[int, Lengths, Lengths]:
        """The account of an eviction, what each tenant may lose of it, and what it has lost since the last look."""
        if self._for is None:  # a caller evicts
            self._look()
            self._wanted[:] = 0
            return self._main, self.idle[self._main], np.zeros_like(self.num_unheld)
        in_leaves = self._accounts[self._for].least * (self._unheld - self.num_unheld)  # some not freed yet
        gone = np.maximum(self._strides[self._for] @ (self._before - self._in_frames()), in_leaves)
        return self._for, self._spare - gone, gone

    def overflows(self) -> Iterator[tuple[int, Lengths]]:
        """Accounts of tenants that ask and would pass a ceiling, and by how many units each would."""
        excess = (self.used + self._wanted - self.limits()[1]) * (self._wanted > 0)
        for at in np.flatnonzero((excess > 0).any(axis=1)).tolist():
            yield at, np.maximum(0, excess[at])

    def losers(self) -> Iterator[int]:
        """For `TenantPolicies`: most above its floor first, by weight. Of an arena one leaf, until that is freed."""
        at, left, gone = self._left()
        room = self._accounts[at].room
        waits = room is not None and room.is_shared and self._for is not None and (self._seen != self.num_unheld).any()
        return self._order(at, gone, (left > 0) & (self.num_unheld > 0) & (not waits and self._accounts[at].least > 0))

    def may_lose(self, node: Node) -> int:
        """For `TenantPolicies`. A page takes its frames along, so those of an arena differ in size."""
        at, left, _ = self._left()
        units, room = int(left[node.tenant]), self._accounts[at].room
        if room is None or not room.is_shared or self._for is None:
            return units // self._accounts[at].least
        strides, pages = self._strides[at].tolist(), node.pages[::-1]
        sizes = sum(n * (t.frame[pages] != 0) for n, t in zip(strides, self.tables, strict=True) if n)
        return 1 + int(np.searchsorted(np.cumsum(sizes), units))

    def count_lost(self) -> int:
        """Leaves were evicted, and are freed. Returns how many pages."""
        lost, self._seen = self._seen - self.num_unheld, self.num_unheld.copy()
        self.lost_pages += lost * (self._wanted[self._main] == 0)
        return int(lost.sum())

    def evict_frames(self, group: int, num_frames: int, most: Rank) -> int:
        """Reclaim frames of a group that is read in part, from tenants that may lose them. Returns how many."""
        at, left, gone = self._left()
        stride, num_left = int(self._strides[at, group]), num_frames
        has = self.tables[group].idle_by[: most + 1].any(axis=0)
        for tenant in self._order(at, gone, has & (left > 0)):
            num_left -= self._groups[group].evict(min(num_left, -(-int(left[tenant]) // stride)), most, tenant)
            if not num_left:
                break
        return num_frames - num_left

    def evict_all_frames(self, most: Rank) -> None:
        """As `evict_frames`, all that tenants may lose in groups of the account that an eviction makes room in."""
        for group in self._groups:
            if not group.reach.whole and self._strides[self._left()[0], group.index]:
                self.evict_frames(group.index, group.frames.num_used, most)

    def may_keep(self, group: int, row: int, rank: Rank) -> bool:
        """Whether a row may have one frame more of a group, for a checkpoint of this rank, which is free then."""
        wanted = np.zeros((len(self._groups) + 1, len(self.terms)), dtype=np.int64)
        wanted[group, self.of_row[row]] = 1
        if self.refusal(wanted) or any(self.overflows()):
            return False
        if not self._groups[group].num_free:
            self.begin_eviction(int(np.flatnonzero(self._strides[:, group])[0]))
            self.evict_frames(group, 1, rank)
            self.end_eviction()
        return bool(self._groups[group].num_free)

    def _order(self, at: int, gone: Lengths, may: Bools) -> Iterator[int]:
        """Those that `may` lose pages or frames of an account: most above its floor first, by weight. Each has `gone`
        units less than at the last look."""
        above = (self.used[at] + self._wanted[at] - self.limits()[0][at] - gone) / self._weights
        left = np.where(may, above, -np.inf)
        while left[first := int(left.argmax())] > -np.inf:
            yield first
            left[first] = -np.inf

    # -- whose request is next

    def begin_round(self) -> None:
        """A round of admissions begins."""
        self._blocked[:], self._is_short = 0, False

    def is_blocked(self, tenant: int) -> bool:
        """Whether none of its requests begins any more in this round."""
        return bool(self._blocked[tenant])

    def objection(self, namespace: Namespace, wanted: Lengths, soft: Lengths, more: int) -> str | None:
        """Why a request with these claims, by group and tenant, does not begin now; "" if its tenant allows it, or
        would if `more` pages were idle. None: it is within its tenant's floor, so it has room."""
        tenant = self.number(namespace)
        over = self.over
        freed = np.array([each.least for each in self._accounts])[:, None] * soft
        freed = freed + self._strides.sum(axis=1)[:, None] * (more * over)
        refused = self.refusal(wanted, freed, begins=True)
        if more:  # what if: whose rows may end for it was answered before
            self.over = over
        floors, _ = self.limits()
        if ((self.used - self.idle + self._wanted)[:, tenant] <= floors[:, tenant]).all():
            return None
        return refused or _BLOCKED[2 * self._is_short]

    def passes(self, namespace: Namespace) -> bool:
        """A request of this namespace lacks room: those of other tenants may begin before it. Beside a full tenant
        these are all, else those within their floors."""
        tenant, (floors, ceilings), held = self.number(namespace), self.limits(), self.used - self.idle
        if not ((held + self._wanted)[:, tenant] > ceilings[:, tenant]).any():
            pages = [line // each.least for line, each in zip(floors, self._accounts, strict=True) if each.least]
            self._is_short, self._promised = True, np.minimum.reduce(pages)
            self._blocked[(held >= floors)[self._main] & (self._blocked == 0)] = 2
        self._blocked[tenant] = 1
        return True

    def blocks(self, namespace: Namespace, num_pages: int) -> str:
        """Why a request of so many pages, and those of its tenant after it, do not begin in this round; "" if they may.
        It is plain where they are more than a floor."""
        tenant = self.number(namespace)
        if self._is_short and num_pages > self._promised[tenant]:
            self._blocked[tenant] = self._blocked[tenant] or 2
        return _BLOCKED[self._blocked[tenant]]

    # -- for messages

    def check_request(self, namespace: Namespace, num_tokens: int, num_pages: int) -> None:
        """Raise RequestTooLarge if a request of so many tokens, in so many pages, can never run."""
        if num_pages <= (most := self.most_pages(namespace)):
            return
        tenant, (floors, _), total = self.number(namespace), self.limits(now=False), self._totals(now=False)[self._main]
        each, promised = self.terms[tenant], np.delete(floors[self._main], tenant).sum() / max(1, total)
        ceiling = f"its ceiling is {each.ceiling}" if each.ceiling is not None else "it has no ceiling"
        raise RequestTooLarge(
            f"a request of {num_tokens:,} tokens needs {num_pages} pages; tenant '{each.name}' can have {most} of "
            f"{self._plan.num_pages} ({ceiling}; promised to others: {promised:.1%}).",
            fix="lower max_tokens, shorten the prompt, or raise the tenant's ceiling.",
        )
