"""Mistakes of eviction orders, of replays of page ids, and of the optimum that they are compared with."""

from __future__ import annotations

from functools import partial
from heapq import heappush
from typing import Any

from quire.prefix import evict, lru_bound
from quire.prefix.endings import Endings
from quire.prefix.evict import GDSF, Order
from quire.prefix.guarded_density import GuardedDensity
from quire.prefix.lru_bound import Guard, LRUBound
from quire.sim import hit_bounds, paged_trace
from quire.sim.paged_trace import PagedRequest
from quire.sim.sequential import SequentialReplay
from tests.mutants.mutants import Patch, mutant


@mutant("orders", "greedy dual never ages: what was hit often once stays for ever")
def greedy_dual_never_ages(patch: Patch) -> None:
    patch.setattr(GDSF, "last_key", property(lambda policy: (0.0,), lambda policy, key: None), raising=False)


@mutant("orders", "one hit protects a leaf, and a scan that comes twice evicts what is hit often")
def one_hit_protects(patch: Patch) -> None:
    slru = partial(Order, lambda node: (node.hits >= 1, node.last_used))
    patch.setattr(evict, "POLICIES", {**evict.POLICIES, "slru": slru})


@mutant("orders", "a hit does not move a leaf: LRU is the order of storing")
def a_hit_does_not_count_as_a_use(patch: Patch) -> None:
    lru = partial(Order, lambda node: (node.created,))
    patch.setattr(evict, "POLICIES", {**evict.POLICIES, "lru": lru})


@mutant("page replays", "a replay of page ids uses one page more than its pool has")
def a_replay_exceeds_its_pool(patch: Patch) -> None:
    real = SequentialReplay._make_room
    patch.setattr(SequentialReplay, "_make_room", lambda replay, num_pages: real(replay, num_pages - 1))


@mutant("page replays", "a replay of page ids finds the page of a prompt's last token, which must be computed")
def a_replay_hits_the_last_token(patch: Patch) -> None:
    patch.setattr(PagedRequest, "lookup_pages", property(lambda request: request.prompt_tokens // request.page_size))


@mutant("page replays", "pages that only begin alike have one id, and a replay hits what no cache could")
def pages_that_begin_alike_are_one(patch: Patch) -> None:
    patch.setattr(paged_trace, "page_digests", lambda tokens: tokens[:, 0])


@mutant("optimum", "the optimum evicts what is needed next, and policies seem better than possible")
def the_optimum_evicts_what_is_needed_next(patch: Patch) -> None:
    patch.setattr(hit_bounds, "heappush", lambda heap, entry: heappush(heap, (-entry[0], *entry[1:])))


@mutant("optimum", "the optimum counts what is written again, and never looked up, as a hit")
def the_optimum_hits_what_is_only_written(patch: Patch) -> None:
    real: Any = hit_bounds._PageUse
    patch.setattr(hit_bounds, "_PageUse", lambda last, lookup, held: real(last, last.end, held))


@mutant("guard", "what was evicted and is computed again is not counted, and eviction never gives way to LRU")
def losses_are_not_counted(patch: Patch) -> None:
    patch.setattr(Guard, "returned", lambda guard, edge, num_pages: None)


@mutant("guard", "LRU is taken to have an unlimited pool, and eviction always gives way to it")
def the_bound_never_evicts(patch: Patch) -> None:
    patch.setattr(LRUBound, "limit", lambda bound, num_pages: None)


@mutant("guard", "an order that loses goes on, and hits stay below those of LRU")
def the_guard_never_switches(patch: Patch) -> None:
    patch.setattr(Guard, "_switch", lambda guard, *, by_use: None)


@mutant("guard", "a trial that fails is repeated at once, and its losses add up")
def trials_do_not_wait(patch: Patch) -> None:
    patch.setattr(lru_bound, "FIRST_WAIT", 1)
    patch.setattr(lru_bound, "LONGER", 1)
    real = Guard.__init__

    def no_wait(guard: Guard) -> None:
        real(guard)
        guard._waits = 1

    patch.setattr(Guard, "__init__", no_wait)


@mutant("guard", "candidates of the other order are forgotten when the order changes, and their pages are never free")
def candidates_are_left_behind(patch: Patch) -> None:
    patch.setattr(GuardedDensity, "candidates", lambda policy: iter(policy._by_use))


@mutant("guard", "all outputs end alike, and sessions that wait for a tool go before those that wait for a person")
def endings_are_all_alike(patch: Patch) -> None:
    patch.setattr(Endings, "class_of", lambda endings, token: (0, False))
