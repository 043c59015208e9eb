"""Mistakes of eviction orders, of replays of page ids, and of the optimum that they are compared with."""

from __future__ import annotations

from functools import partial
from heapq import heappush
from typing import Any

from bench.eviction.sequential import SequentialReplay

from quire.cache.sessions import Sessions
from quire.prefix import evict, hit_table, lru_bound, radix_cache
from quire.prefix.evict import GDSF, Order
from quire.prefix.hit_density import Endings, HitDensity
from quire.prefix.lru_bound import Guard, LRUBound
from quire.prefix.node import EvictedEdges, Node, User, used_by
from quire.prefix.placement import NodeTiers
from quire.sim import hit_bounds
from quire.sim.hit_bounds import PagedRequest
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
    patch.setattr(hit_bounds, "page_digests", lambda tokens: tokens[:, 0])


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


@mutant("guard", "what was used last is not protected, however much the order has lost")
def nothing_is_protected(patch: Patch) -> None:
    patch.setattr(Guard, "protected_age", lambda guard: 0)


@mutant("guard", "when runs are merged, later ones are forgotten, and their pages are never free")
def merged_runs_are_forgotten(patch: Patch) -> None:
    real = HitDensity._merge_runs

    def forget(policy: HitDensity) -> None:
        before = {id(run): list(run) for run in policy._runs.values()}
        real(policy)
        for run in policy._runs.values():
            run[:] = before[id(run)]

    patch.setattr(HitDensity, "_merge_runs", forget)


@mutant("guard", "entries of leaves that were leased since stay in their runs, and memory grows without end")
def invalid_entries_stay(patch: Patch) -> None:
    patch.setattr(HitDensity, "_clean", lambda policy: None)


@mutant("guard", "a leaf is worth what the next moment brings, and what returns on time is evicted just before")
def worth_looks_no_further(patch: Patch) -> None:
    real = hit_table.worth

    def next_age(reused: hit_table.Table, begun: float, num_ages: int) -> list[float]:
        return [min(real(reused, begun, at + 1)[at], 1.0) for at in range(num_ages)]

    patch.setattr(hit_table, "worth", next_age)


@mutant("guard", "what a kind is worth is computed once, and nothing that is learned later counts")
def the_first_worth_stays(patch: Patch) -> None:
    real = hit_table.HitTable._update

    def once(table: hit_table.HitTable, kind: int) -> None:
        if not table._passes[kind]:
            real(table, kind)

    patch.setattr(hit_table.HitTable, "_update", once)


@mutant("guard", "all outputs end alike, and sessions that wait for a tool go before those that wait for a person")
def endings_are_all_alike(patch: Patch) -> None:
    patch.setattr(Endings, "class_of", lambda endings, token: (0, False))


@mutant(
    "ended sessions", "a client closes its session, and nothing follows from it: its pages wait for their turn to go"
)
def an_end_is_ignored(patch: Patch) -> None:
    patch.setattr(NodeTiers, "end", lambda tiers, user: None)


@mutant("ended sessions", "a prompt that many sessions share goes when the first of them is closed")
def what_others_use_goes_too(patch: Patch) -> None:
    patch.setattr(radix_cache, "used_by", lambda node, user: None)


@mutant("ended sessions", "a client that closes each session and opens it again never frees what it leaves at last")
def nothing_is_taken_over(patch: Patch) -> None:
    def shared(node: Node, user: User | None) -> None:
        used_by(node, user if node.user is None or not node.user.ended else None)

    patch.setattr(radix_cache, "used_by", shared)


@mutant(
    "ended sessions",
    "who used evicted pages is forgotten: a popular prompt goes with the session that computed it again",
)
def evicted_pages_have_no_users(patch: Patch) -> None:
    real = EvictedEdges.returning

    def returning(edges: EvictedEdges, node: Node, data: bytes) -> Any:
        found = real(edges, node, data)
        for edge, _ in found[2]:
            edge.user = User(ended=True)
        return found

    patch.setattr(EvictedEdges, "returning", returning)


@mutant("ended sessions", "a session that has expired is forgotten, and closing it later frees nothing")
def expired_sessions_have_no_pages(patch: Patch) -> None:
    real = Sessions.expire

    def expire(sessions: Sessions) -> int:
        before, ended = sessions.totals.sessions_expired, real(sessions)
        if sessions.totals.sessions_expired > before:
            sessions._users.clear()
        return ended

    patch.setattr(Sessions, "expire", expire)


@mutant("ended sessions", "pages of closed sessions are copied to the host, and take the room of others there")
def what_has_ended_is_written_back(patch: Patch) -> None:
    real = radix_cache.RadixCache.demote

    def demote(tree: radix_cache.RadixCache, num_pages: int, cause: str, keep: Any, leave: Any) -> Any:
        for node in tree.nodes():
            node.user = None
        return real(tree, num_pages, cause, keep, leave)

    patch.setattr(radix_cache.RadixCache, "demote", demote)
