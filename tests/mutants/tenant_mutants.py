"""Mistakes with tenants. `tests/scheduler/test_tenants.py` and its machine must notice each of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from quire.cache.page_owners import OwnedColumn, PageOwners
from quire.cache.states import StateGroup
from quire.cache.tenant_growth import TenantGrowth
from quire.cache.tenants import Tenants
from quire.memory.residency import Column
from quire.prefix.node import Levels, Node
from quire.prefix.tenant_policies import TenantPolicies
from quire.scheduler.policy import TenantsRequests
from quire.scheduler.scheduler import Scheduler
from quire.spec.ids import Ids
from quire.spec.rank import Rank
from tests.mutants.mutants import Patch, mutant


@mutant("tenants", "a noisy tenant pushes out what a quiet one is promised")
def floors_do_not_hold(patch: Patch) -> None:
    patch.setattr(Tenants, "may_lose", lambda tenants, node: node.num_pages)


@mutant("tenants", "a floor is a page short")
def floors_are_a_page_short(patch: Patch) -> None:
    real = Tenants.limits

    def limits(tenants: Tenants, *, now: bool = True) -> tuple[Any, Any]:
        floors, ceilings = real(tenants, now=now)
        return np.maximum(0, floors - 1), ceilings

    patch.setattr(Tenants, "limits", limits)


@mutant("tenants", "of a leaf that lies on both sides of a floor all pages go")
def whole_leaves_go(patch: Patch) -> None:
    patch.setattr(TenantPolicies, "most", lambda policies, node: node.num_pages)


@mutant("tenants", "running requests of others hold what a tenant is promised, and its own are preempted or wait")
def floors_are_lent_to_leases(patch: Patch) -> None:
    real = Tenants.refusal

    def refusal(tenants: Tenants, wanted: Any, freed: Any = None, *, begins: bool = False) -> str:
        terms = tenants.terms
        tenants.terms, tenants._limits = [each.changed({"floor": "0"}) for each in terms], {}
        found = real(tenants, wanted, freed, begins=begins)
        tenants.terms, tenants._limits = terms, {}
        return found

    patch.setattr(Tenants, "refusal", refusal)


@mutant("tenants", "a tenant's cached pages are not counted, and it holds more than its ceiling")
def ceilings_are_for_running_requests(patch: Patch) -> None:
    patch.setattr(Tenants, "overflows", lambda tenants: iter(()))


@mutant("tenants", "a tenant grows beyond its ceiling while memory is free")
def free_memory_has_no_ceiling(patch: Patch) -> None:
    patch.setattr(TenantGrowth, "_is_bound", lambda growth: False)


@mutant("tenants", "all wait behind one tenant that is full")
def a_full_tenant_blocks_the_others(patch: Patch) -> None:
    patch.setattr(Tenants, "passes", lambda tenants, namespace: False)


@mutant("tenants", "a tenant within its floor waits for the next tokens of others' requests")
def a_floor_waits_for_reserves(patch: Patch) -> None:
    real = Tenants.objection

    def objection(tenants: Tenants, *given: Any) -> str | None:
        return real(tenants, *given) or tenants.refusal(given[1])

    patch.setattr(Tenants, "objection", objection)


@mutant("tenants", "small requests pass a large one for ever")
def all_may_pass(patch: Patch) -> None:
    real = Tenants.passes

    def passes(tenants: Tenants, namespace: Any) -> bool:
        found = real(tenants, namespace)
        tenants._is_short = False
        tenants._blocked[tenants._blocked == 2] = 0
        return found

    patch.setattr(Tenants, "passes", passes)


@mutant("tenants", "the request of a tenant within its floor is preempted for one of another, which gets nothing of it")
def any_request_is_preempted(patch: Patch) -> None:
    patch.setattr(Scheduler, "_victim", lambda scheduler: scheduler._rows.running[-1])


@mutant("tenants", "what clients keep of a quiet tenant ends for a noisy one, which gets nothing of it")
def any_retention_gives_way(patch: Patch) -> None:
    patch.setattr(Tenants, "is_over", lambda tenants, namespace: True)


def evict_any(tenants: Tenants, group: int, num_frames: int, most: Rank) -> int:
    """Frames of a group go, whoever may lose them."""
    left = num_frames
    for tenant in range(tenants.num_tenants):
        left -= tenants._groups[group].evict(left, most, tenant)
    return num_frames - left


@mutant("tenants", "checkpoints of a tenant go for those of another")
def any_checkpoint_goes(patch: Patch) -> None:
    def may_keep(tenants: Tenants, group: int, row: int, rank: Rank) -> bool:
        return bool(tenants._groups[group].num_free or evict_any(tenants, group, 1, rank))

    patch.setattr(Tenants, "may_keep", may_keep)


@mutant("tenants", "frames of windows and states are reclaimed from any tenant")
def frames_have_no_floor(patch: Patch) -> None:
    patch.setattr(Tenants, "evict_frames", evict_any)


@mutant("tenants", "states of running requests are not counted")
def states_are_not_counted(patch: Patch) -> None:
    real = StateGroup.num_own
    patch.setattr(StateGroup, "num_own", lambda group: real(group) * 0)


@mutant("tenants", "pages of a new request count to the tenant that had its row before")
def rows_keep_their_tenant(patch: Patch) -> None:
    real = Tenants.wanted_by

    def wanted_by(tenants: Tenants, rows: Any, counts: Any, growing: Any) -> Any:
        found = real(tenants, rows, counts, growing)
        tenants.of_row = tenants.of_row.copy()
        tenants.of_row[: len(tenants.of_row) // 2] = 0
        return found

    patch.setattr(Tenants, "wanted_by", wanted_by)


@mutant("tenants", "pages that requests hold still count as evictable ones of their tenant")
def leases_are_not_counted(patch: Patch) -> None:
    real = Levels.hold

    def hold(levels: Levels, end: Node) -> None:
        before = levels.num_unheld[:]
        real(levels, end)
        levels.num_unheld[:] = before

    patch.setattr(Levels, "hold", hold)


@mutant("tenants", "the tenant that came first gets all turns")
def weights_do_not_count(patch: Patch) -> None:
    patch.setattr(TenantsRequests, "charge", lambda queue, namespace, num_tokens, **begins: None)


@mutant("tenants", "a tenant that was away for long keeps all others out when it comes back")
def who_was_away_saves_turns(patch: Patch) -> None:
    real = TenantsRequests.take_turns

    def take_turns(queue: TenantsRequests, queues: Any, cost: Any) -> Any:
        queue._now = 0.0
        return real(queue, queues, cost)

    patch.setattr(TenantsRequests, "take_turns", take_turns)


@mutant("tenants", "the tenant with least above its floor loses first")
def the_smallest_loses_first(patch: Patch) -> None:
    real = Tenants._order

    def order(tenants: Tenants, *given: Any) -> Iterator[int]:
        return reversed(list(real(tenants, *given)))

    patch.setattr(Tenants, "_order", order)


@mutant("tenants", "terms that are refused are kept")
def refused_terms_stay(patch: Patch) -> None:
    real = Tenants.check

    def check(tenants: Tenants, terms: Any, plan: Any = None) -> None:
        if hasattr(tenants, "_groups"):
            tenants.terms = list(terms)
        real(tenants, terms, plan)

    patch.setattr(Tenants, "check", check)


@mutant("tenants", "what others may never have is counted without the floors of others, and waits for ever")
def no_request_is_too_large(patch: Patch) -> None:
    patch.setattr(Tenants, "most_pages", lambda tenants, namespace: tenants._plan.num_pages)


@mutant("tenants", "retained pages of any tenant are taken as room of the one that asks")
def all_pages_are_of_one_tenant(patch: Patch) -> None:
    def counts(owners: PageOwners, pages: Ids) -> Any:
        return np.bincount(owners.of_page[pages] * 0, minlength=owners.num_owners)

    patch.setattr(PageOwners, "counts", counts)


@mutant("tenants", "pages that change their tenant stay counted to the one that had their ids before")
def counts_stay_behind(patch: Patch) -> None:
    def give(owners: PageOwners, pages: Ids, numbers: Any) -> None:
        owners.of_page[pages] = numbers

    patch.setattr(PageOwners, "give", give)


@mutant("tenants", "frames that a request frees stay counted to its tenant, until it can hold nothing")
def what_is_freed_stays_counted(patch: Patch) -> None:
    patch.setattr(OwnedColumn, "unbind", Column.unbind)


@mutant("page owners", "a window that a duplicate leaves to a cached page is counted to none")
def what_moves_is_not_counted(patch: Patch) -> None:
    def move(column: OwnedColumn, old_pages: Ids, new_pages: Ids) -> None:
        Column.move(column, old_pages, new_pages)
        column.count(old_pages, -1)

    patch.setattr(OwnedColumn, "move", move)


@mutant("tenants", "idle frames count as idle once more when they are queued again, and a tenant seems to hold nothing")
def what_is_pinned_again_counts_as_idle(patch: Patch) -> None:
    patch.setattr(OwnedColumn, "_unqueue", Column._unqueue)


@mutant("tenants", "a small request of a tenant passes its own large one, which never runs")
def a_tenants_own_order_is_not_kept(patch: Patch) -> None:
    real = Tenants.passes

    def passes(tenants: Tenants, namespace: Any) -> bool:
        found = real(tenants, namespace)
        tenants._blocked[tenants.number(namespace)] = 0
        return found

    patch.setattr(Tenants, "passes", passes)


@mutant("tenants", "a tenant whose request is larger than its floor waits, and so do its small ones within the floor")
def any_request_is_more_than_a_floor(patch: Patch) -> None:
    real = Tenants.blocks
    patch.setattr(Tenants, "blocks", lambda tenants, namespace, num_pages: real(tenants, namespace, num_pages + 99))


@mutant("path ends of tenants", "a tenant's leaves that no request can begin after wait behind those that some can")
def useless_leaves_wait_their_turn(patch: Patch) -> None:
    real = TenantPolicies.offered

    def offered(policies: TenantPolicies, node: Node) -> None:
        share, node.share = node.share, node.share or 1.0
        real(policies, node)
        node.share = share

    patch.setattr(TenantPolicies, "offered", offered)


@mutant("tenant rooms", "a tenant that is above its floor by less than a window keeps all, and others wait for ever")
def what_is_less_than_a_page_stays(patch: Patch) -> None:
    real = Tenants._left

    def left(tenants: Tenants) -> Any:
        at, units, gone = real(tenants)
        per_page = tenants._accounts[at].per_page or 1
        return at, units // per_page * per_page, gone

    patch.setattr(Tenants, "_left", left)


@mutant("tenant rooms", "pages of an arena count without the frames that they take along, and pass a floor by many")
def frames_of_pages_are_not_counted(patch: Patch) -> None:
    def may_lose(tenants: Tenants, node: Node) -> int:
        at, left, _ = tenants._left()
        return int(left[node.tenant]) // tenants._accounts[at].least or 1

    patch.setattr(Tenants, "may_lose", may_lose)


@mutant("tenant rooms", "frames that cannot move keep bytes from a request, and cached pages within floors stay")
def floors_hold_beside_frames_that_stay(patch: Patch) -> None:
    real = Tenants.begin_eviction

    def begin_eviction(tenants: Tenants, at: int, spare: Any = None) -> None:
        real(tenants, at, None if spare is not None and np.array_equal(spare, tenants.idle[at]) else spare)

    patch.setattr(Tenants, "begin_eviction", begin_eviction)


@mutant("tenant rooms", "windows and states that go without pages stay, and a tenant holds more than its ceiling")
def idle_frames_stay_above_a_ceiling(patch: Patch) -> None:
    patch.setattr(Tenants, "evict_all_frames", lambda tenants, most: None)


@mutant("tenant rooms", "checkpoints of running requests push out what is within floors")
def checkpoints_pass_floors(patch: Patch) -> None:
    patch.setattr(Tenants, "has_beside", lambda tenants, wanted, more: True)


@mutant("tenant rooms", "page ids of an arena have no floors, and a request waits for those that others keep")
def ids_are_of_the_arena(patch: Patch) -> None:
    real = Tenants.attach

    def attach(tenants: Tenants, *given: Any) -> None:
        real(tenants, *given)
        tenants.at_ids = tenants._main

    patch.setattr(Tenants, "attach", attach)


@mutant("tenant rooms", "frames that are set apart are promised, and no request ever runs")
def what_is_set_apart_is_promised(patch: Patch) -> None:
    real = Tenants.limits
    patch.setattr(Tenants, "limits", lambda tenants, *, now=True: real(tenants, now=False))
