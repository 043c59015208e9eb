"""What only an ended session has used is evicted first, in every order of eviction. A page is one token."""

from __future__ import annotations

import numpy as np
import pytest

from quire.prefix.evict import POLICIES, eviction_policy
from quire.prefix.node import Node, User
from quire.prefix.radix_cache import RadixCache
from quire.spec.events import Namespace
from quire.spec.ids import Ids
from tests.prefix.test_tiered import Where

NAMESPACE = Namespace()


def ids(text: str) -> Ids:
    return np.array([ord(letter) for letter in text], dtype=np.int32)


def serve(tree: RadixCache, text: str, user: User | None = None) -> int:
    """A request caches a text. Returns what it hits."""
    match = tree.match(NAMESPACE, ids(text))
    lease = tree.lease(match, user=user)
    fresh = ids(text)[match.num_pages :]
    tree.insert(lease, fresh, fresh)
    tree.release(lease)
    return match.num_pages


def evicted(tree: RadixCache, count: int) -> str:
    """Of the next pages to go, in the order of the alphabet."""
    return "".join(sorted(map(chr, tree.evict(count).tolist())))


def check_what_is_its_own_goes_first(policy: str) -> None:
    """Two sessions with a common prompt, and a third user."""
    tree = RadixCache(1, eviction_policy(policy), remembered=50)
    one, two = User(), User()
    for user, text in ((None, "xyz"), (two, "abcmn"), (one, "abcde"), (one, "abcdefg"), (two, "abcmno")):
        serve(tree, text, user)
    tree.end(one)
    assert serve(tree, "x") == 1, "others go on"
    assert evicted(tree, 2) == "fg", "the end of a path goes first"
    assert tree.match(NAMESPACE, ids("abcdef")).num_pages == 5, "the rest is there until its room is needed"
    assert evicted(tree, 2) == "de"
    assert tree.match(NAMESPACE, ids("abcmno")).num_pages == 6, "what others have used stays"
    tree.end(two)
    assert evicted(tree, 3) == "mno", "the prompt of both stays"
    assert len(tree.evict(9)) == 6, "and all of it can go"


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_what_only_an_ended_session_has_used_goes_first(policy: str) -> None:
    check_what_is_its_own_goes_first(policy)


def check_a_use_takes_it_back() -> None:
    tree = RadixCache(1, eviction_policy("lru"), remembered=50)
    one, other, later = User(), User(), User()
    serve(tree, "abc", one)
    serve(tree, "pqr", other)
    tree.end(one)
    assert serve(tree, "abcd", later) == 3
    assert evicted(tree, 1) == "r", "another session goes on with it"
    tree.end(later)
    assert evicted(tree, 4) == "abcd", "and has ended too: nobody else is expected"


def test_a_use_by_others_takes_it_back() -> None:
    check_a_use_takes_it_back()


def check_a_turn_that_still_runs() -> None:
    tree = RadixCache(1, eviction_policy("lru"))
    one = User()
    serve(tree, "pq", User())
    lease = tree.lease(tree.match(NAMESPACE, ids("a")), user=one)
    tree.insert(lease, ids("ab"), ids("ab"))
    tree.end(one)
    assert evicted(tree, 1) == "q", "what a turn still holds stays"
    tree.insert(lease, ids("c"), ids("c"))
    tree.release(lease)
    assert evicted(tree, 3) == "abc"


def test_turns_that_still_run_keep_what_they_hold() -> None:
    check_a_turn_that_still_runs()


def check_evicted_pages_know_their_users() -> None:
    """A page that others computed, and that was evicted since, is not one session's alone when it computes it again."""
    tree = RadixCache(1, eviction_policy("lru"), remembered=50)
    one = User()
    serve(tree, "ab")
    assert evicted(tree, 2) == "ab"
    serve(tree, "pq")
    serve(tree, "ab", one)
    tree.end(one)
    assert evicted(tree, 2) == "pq", "by last use"


def test_who_used_pages_before_they_were_evicted_counts() -> None:
    check_evicted_pages_know_their_users()


def test_a_session_does_not_lengthen_the_edge_of_others() -> None:
    """A prompt that was computed once in advance, and a session that goes on with it."""
    tree = RadixCache(1, eviction_policy("lru"))
    one = User()
    serve(tree, "abc")
    serve(tree, "abcde", one)
    serve(tree, "pq")
    tree.end(one)
    assert evicted(tree, 2) == "de" and not one.nodes
    assert evicted(tree, 1) == "c", "by last use"


class TwoTiers:
    """A tree of which all may be copied to the host, with a clock that says a second more at each request."""

    def __init__(self, policy: str) -> None:
        self.where, self.now = Where(), 0.0
        self.tree = RadixCache(1, eviction_policy(policy), placement=self.where, seconds=lambda: self.now)
        self.tree.compare_copies()

    def serve(self, text: str, user: User | None = None) -> None:
        self.now += 1
        self.where.device.update(map(ord, text))
        serve(self.tree, text, user)

    def demoted(self, count: int) -> str:
        """What leaves the device and the cache for so many pages. The others are copied."""
        return "".join(sorted(map(chr, self.tree.demote(count, "", self._keep, self.where.leave_device).removed)))

    def dropped(self, count: int) -> str:
        """The next pages to lose their copies."""
        return "".join(sorted(map(chr, self.tree.evict_lower(count, self.where.leave_host).removed)))

    def _keep(self, node: Node) -> int:
        lease = self.tree.pin(node)
        self.where.copy(self.tree, lease, 0, lease.num_pages)
        self.tree.release(lease)
        return self.tree.num_copies(node)


def check_lower_tiers(policy: str) -> None:
    """An ended session is not written back, and its copies go first, whatever was compared before."""
    tiers = TwoTiers(policy)
    one, two, three = User(), User(), User()
    others = [(chr(number) + chr(number + 1), None) for number in range(500, 540, 2)]
    for text, user in (("ab", one), ("mn", two), *others, ("st", three)):
        tiers.serve(text, user)
    tiers.tree.end(one)
    assert tiers.demoted(46) == "ab" and tiers.tree.num_below == 44, "the others are written back"
    tiers.tree.end(two)
    assert tiers.dropped(2) == "mn", "though others are worth less"
    assert len(tiers.dropped(2)) == 2
    tiers.tree.end(three)
    assert tiers.dropped(2) == "st", "though it was used last"
    assert len(tiers.dropped(99)) == 38, "and all can go"


@pytest.mark.parametrize("policy", ["lru", "density"])
def test_lower_tiers_give_up_what_has_ended_first(policy: str) -> None:
    check_lower_tiers(policy)


def check_worth_below(policy: str, order: list[str]) -> None:
    """A conversation has left "cd". A path that was used earlier is worth more, and less to LRU."""
    tiers = TwoTiers(policy)
    for text in ("mn", "abcd", "abef"):
        tiers.serve(text)
    assert not tiers.demoted(8) and tiers.tree.num_below == 8
    assert [tiers.dropped(2) for _ in order] == order


def test_copies_below_go_by_what_they_are_worth_to_the_policy() -> None:
    check_worth_below("lru", ["mn", "cd", "ef", "ab"])
    check_worth_below("density", ["cd", "mn", "ef", "ab"])


def check_order_of_ends() -> None:
    """Of two sessions, what ended first goes first."""
    tree = RadixCache(1, eviction_policy("lru"))
    one, two = User(), User()
    serve(tree, "ab", one)
    serve(tree, "pq", two)
    tree.end(two)
    tree.end(one)
    assert evicted(tree, 2) == "pq"


def test_the_session_that_ended_first_goes_first() -> None:
    check_order_of_ends()
