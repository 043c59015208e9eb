"""Mistakes of eviction orders, of replays of page ids, and of the optimum that they are compared with."""

from __future__ import annotations

from functools import partial
from heapq import heappush
from typing import Any

import numpy as np
from bench.eviction.sequential import SequentialReplay

from quire.cache.sessions import Sessions
from quire.prefix import evict, hit_density, placement, radix_cache, stay_table
from quire.prefix.endings import Endings
from quire.prefix.evict import GDSF, Order
from quire.prefix.hit_density import HitDensity, Stay
from quire.prefix.node import EvictedEdges, Node, User, used_by
from quire.prefix.placement import NodeTiers
from quire.sim import hit_bounds
from quire.sim.hit_bounds import PagedRequest
from quire.spec.ending import Ending
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


@mutant("density", "a candidate that was leased since is a victim, or its slot is never free again")
def leased_leaves_keep_their_slots(patch: Patch) -> None:
    patch.setattr(HitDensity, "_release", lambda policy, slot: None)


@mutant("density", "the rest of a leaf that lost its end waits for the next choice, and many leaves lose their ends")
def the_rest_of_a_victim_stays(patch: Patch) -> None:
    patch.setattr(hit_density, "insort", lambda entries, entry: None)


@mutant("density", "evicted pages that come back are a new conversation, and turns begin again")
def evicted_turns_are_forgotten(patch: Patch) -> None:
    real = HitDensity.stored
    patch.setattr(HitDensity, "stored", lambda policy, node, num_pages, returned: real(policy, node, num_pages, []))


@mutant(
    "density", "a turn that goes on behind evicted pages counts as a use of the cached end: a conversation is shared"
)
def every_end_may_be_shared(patch: Patch) -> None:
    patch.setattr(HitDensity, "_not_shared", lambda policy, stay, uses: None)


@mutant("density", "an answer behind a long prompt has a stay of its own: what goes on seems to be left for ever")
def long_paths_have_several_stays(patch: Patch) -> None:
    real = HitDensity.stored

    def stored(policy: HitDensity, node: Node, num_pages: int, returned: Any) -> None:
        real(policy, node, num_pages, returned)
        if node.parent is not None and isinstance(node.memo, Stay) and node.memo is node.parent.memo:
            node.memo = Stay(node.memo.since, node.memo.turn, node.memo.pace)

    patch.setattr(HitDensity, "stored", stored)


@mutant(
    "density", "turns that go on while their session holds its row are not counted, and sessions seem to rest longer"
)
def held_stays_are_not_counted(patch: Patch) -> None:
    patch.setattr(HitDensity, "ended", lambda policy, node: node.memo)


@mutant("density", "a shared prompt takes the stay of the last conversation that used it")
def nothing_is_shared(patch: Patch) -> None:
    patch.setattr(hit_density, "SHARED", 1 << 30)


@mutant("density", "what a conversation has left out of its history is worth as much as the rest")
def nothing_is_superseded(patch: Patch) -> None:
    patch.setattr(hit_density, "SUPERSEDED", 1.0)


@mutant("density", "a leaf is worth what the next moment brings, and what returns on time is evicted just before")
def worth_looks_no_further(patch: Patch) -> None:
    patch.setattr(stay_table, "worth", lambda hazards: np.append(hazards / stay_table._WIDTHS, 0.0))


@mutant("density", "what a kind is worth is never computed again, and nothing that is learned counts")
def the_first_worth_stays(patch: Patch) -> None:
    patch.setattr(stay_table.StayTable, "refresh", lambda table: table.stale.clear())


@mutant("density", "all outputs end alike, and sessions that wait for a tool go before those that wait for a person")
def endings_are_all_alike(patch: Patch) -> None:
    patch.setattr(Endings, "class_of", lambda endings, token: (0, False))


@mutant("density", "an ending is told, and nothing follows from it")
def what_is_told_is_ignored(patch: Patch) -> None:
    patch.setattr(HitDensity, "told", lambda policy, memo, ending: None)


@mutant("density", "an ending counts for what is learned, and the leaf stays where its last token had put it")
def what_is_told_moves_no_candidate(patch: Patch) -> None:
    patch.setattr(HitDensity, "_has_slot", lambda policy, stay: False)


@mutant("density", "an answer is taken for a call of a tool, and a session that is over stays for the next result")
def answers_are_calls(patch: Patch) -> None:
    real = HitDensity.told
    patch.setattr(HitDensity, "told", lambda policy, memo, ending: real(policy, memo, Ending.TOOL))


@mutant("density", "what pages cost to compute does not count")
def pages_cost_the_same(patch: Patch) -> None:
    patch.setattr(HitDensity, "priced_by", lambda policy, growth: None)


@mutant("copies below", "copies go by their last use, whatever the policy expects of them")
def copies_go_by_last_use(patch: Patch) -> None:
    patch.setattr(HitDensity, "worth", lambda policy, node: 0.0)


@mutant("copies below", "what is compared goes before what a closed session has left")
def ended_copies_wait(patch: Patch) -> None:
    patch.setattr(placement, "_OVER", 1 << 60)


@mutant("stay table", "a forecast counts from the begin of a stay, and what has waited long seems to return as often")
def forecasts_have_no_age(patch: Patch) -> None:
    real = stay_table.StayTable.outlook
    patch.setattr(stay_table.StayTable, "outlook", lambda table, kind, age: real(table, kind, 0.0))


@mutant("stay table", "stays that are still open do not count, and a kind that seldom returns seems to return")
def open_stays_are_left_out(patch: Patch) -> None:
    real = stay_table.StayTable.fit

    def fit(table: stay_table.StayTable, now: float) -> None:
        open_stays, table._kinds = table._kinds, np.full_like(table._kinds, -1)
        real(table, now)
        table._kinds = open_stays

    patch.setattr(stay_table.StayTable, "fit", fit)


@mutant("stay table", "a kind learns nothing from related ones")
def kinds_lend_nothing(patch: Patch) -> None:
    patch.setattr(stay_table, "PRIOR", 1e-3)
    real = stay_table.StayTable.fit

    def fit(table: stay_table.StayTable, now: float) -> None:
        groups, size, classes = table._shape
        table._shape = groups * size, 1, classes
        real(table, now)
        table._shape = groups, size, classes

    patch.setattr(stay_table.StayTable, "fit", fit)


@mutant("stay table", "the oldest stays are overwritten without a trace, and what never returned is forgotten")
def overwritten_stays_are_lost(patch: Patch) -> None:
    real = stay_table.StayTable.begin

    def begin(table: stay_table.StayTable, kind: int, since: float, now: float) -> int:
        table._kinds[table._begun % stay_table.OPEN] = -1
        return real(table, kind, since, now)

    patch.setattr(stay_table.StayTable, "begin", begin)


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
