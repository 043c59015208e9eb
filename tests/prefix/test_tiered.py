"""The tree with copies below the device, against a dictionary of prefixes. A page is one token; its prefix names it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire.errors import LeaseError
from quire.prefix.evict import POLICIES, eviction_policy
from quire.prefix.node import Lease, Node, User, pages_to
from quire.prefix.radix_cache import RadixCache
from quire.spec.events import AllCleared, CacheEvent, Namespace, PagesRemoved, PagesStored
from quire.spec.ids import Bools, Ids, Tier
from tests.clear import clear_tree

NAMESPACE = Namespace()
Prefix = tuple[int, ...]
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=7).map(tuple)


def ids(numbers: Prefix | list[int]) -> Ids:
    return np.array(numbers, dtype=np.int32)


@dataclass
class Page:
    """A cached page of the model."""

    number: int
    here: bool
    kept: bool
    user: User | None = field(default=None, compare=False)  # the only one


class Model:
    """What is cached, and which prefixes are held. `fresh` numbers were never a page's before."""

    def __init__(self) -> None:
        self.pages: dict[Prefix, Page] = {}
        self.held: Counter[Prefix] = Counter()
        self._last = 0

    def fresh(self, count: int) -> list[int]:
        self._last += count
        return list(range(self._last - count + 1, self._last + 1))

    def use(self, prefix: Prefix, user: User | None) -> None:
        """A request uses a path."""
        for n in range(len(prefix)):
            page = self.pages[prefix[: n + 1]]
            if page.user is not user and (user is None or not user.ended):
                page.user = user if page.user is not None and page.user.ended else None

    def matched(self, tokens: Prefix) -> int:
        return next((n for n in range(len(tokens)) if tokens[: n + 1] not in self.pages), len(tokens))

    def is_held(self, prefix: Prefix) -> bool:
        return any(count and end[: len(prefix)] == prefix for end, count in self.held.items())

    def named(self, number: int) -> Prefix:
        return next(prefix for prefix, page in self.pages.items() if page.number == number)


class Where:
    """Which pages are on the device and which have copies below: what a residency table would say."""

    def __init__(self) -> None:
        self.device: set[int] = set()
        self.host: set[int] = set()

    def on_device(self, page: int) -> bool:
        return page in self.device

    def have_copies(self, pages: Ids) -> Bools:
        return np.array([page in self.host for page in pages.tolist()], dtype=np.bool_)

    def copy(self, tree: RadixCache, lease: Lease, start: int, stop: int) -> int:
        """Make copies of pages `start..stop - 1` of a pinned path, as far as they count."""
        end = tree.countable(lease, start, stop)
        fresh = [at for at in range(start, end) if int(pages_to(lease.node)[at]) not in self.host]
        self.host.update(pages_to(lease.node)[start:end].tolist())
        for at in fresh:
            tree.copied(lease, at, at + 1)
        return end

    def leave_device(self, pages: Ids) -> None:
        assert self.device >= set(pages.tolist())
        self.device -= set(pages.tolist())

    def leave_host(self, pages: Ids) -> None:
        assert self.host >= set(pages.tolist())
        self.host -= set(pages.tolist())

    def forget(self, pages: Ids) -> None:
        self.device -= set(pages.tolist())
        self.host -= set(pages.tolist())


class TieredTree(RuleBasedStateMachine):
    """Every verb of the tree, on leases of requests, which bring what they hold to the device, and on pins."""

    @initialize(policy=st.sampled_from(sorted(POLICIES)), compares=st.booleans())
    def start(self, policy: str, *, compares: bool) -> None:
        self.events: list[CacheEvent] = []
        self.where = Where()
        self.tree = RadixCache(
            1, eviction_policy(policy), emit=self.events.append, remembered=100, placement=self.where
        )
        if compares:
            self.tree.compare_copies()
        self.model = Model()
        self.leases: list[tuple[Lease, Prefix, bool]] = []  # whether it is a pin
        self.users: list[User | None] = [None, User(), User()]
        self.all_users = self.users[1:]
        self.told: dict[Tier, set[bytes]] = {Tier.DEVICE: set(), Tier.HOST: set()}

    # -- holding

    @rule(tokens=TOKENS, who=st.integers(0, 2))
    def begin(self, tokens: Prefix, who: int) -> None:
        """A request begins: what it holds comes to the device."""
        match = self.tree.match(NAMESPACE, ids(tokens))
        count = self.model.matched(tokens)
        assert match.pages.tolist() == [self.model.pages[tokens[: n + 1]].number for n in range(count)]
        assert match.num_here == sum(self.model.pages[tokens[: n + 1]].here for n in range(count))
        lease = self.tree.lease(match, user=self.users[who])
        self.tree.arrive(lease, match.num_here, count)
        self.model.use(tokens[:count], self.users[who])
        self.where.device.update(match.pages.tolist())
        self.leases.append((lease, tokens[:count], False))
        self.model.held[tokens[:count]] += 1
        for n in range(count):
            self.model.pages[tokens[: n + 1]].here = True

    @rule(tokens=TOKENS)
    def pin(self, tokens: Prefix) -> None:
        match = self.tree.match(NAMESPACE, ids(tokens))
        count = self.model.matched(tokens)
        self.leases.append((self.tree.pin_path(match, count), tokens[:count], True))
        self.model.held[tokens[:count]] += 1

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        lease, prefix, _ = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        end = self.tree.release
        end(lease)
        self.model.held[prefix] -= 1
        with pytest.raises(LeaseError):
            end(lease)

    @rule(who=st.integers(1, 2))
    def close(self, who: int) -> None:
        """A session ends; another one follows. Requests of the one that ended may still run."""
        user, self.users[who] = self.users[who], User()
        self.all_users.append(self.users[who])
        assert user is not None
        self.tree.end(user)

    # -- growing

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), tokens=TOKENS)
    def grow(self, data: st.DataObject, tokens: Prefix) -> None:
        """A request's lease inserts on the device, a pin's grafts below it."""
        at = data.draw(st.integers(0, len(self.leases) - 1))
        lease, prefix, is_pin = self.leases[at]
        whole, numbers = prefix + tokens, self.model.fresh(len(tokens))
        self.where.device.update(numbers if not is_pin else ())  # a request's own pages are there
        grown = (self.tree.graft if is_pin else self.tree.insert)(lease, ids(tokens), ids(numbers))
        duplicates = self.model.matched(whole) - len(prefix)
        if is_pin:
            self.where.host.update(grown.pages[duplicates:].tolist())
        else:
            self.where.device.difference_update(numbers)
            self.where.device.update(grown.pages.tolist())
        assert grown.duplicates.tolist() == numbers[:duplicates]
        for n, number in enumerate(numbers):
            where = whole[: len(prefix) + n + 1]
            if where not in self.model.pages:
                self.model.pages[where] = Page(number, not is_pin, is_pin, self._first_user(where, lease, is_pin))
            page = self.model.pages[where]
            page.here |= not is_pin
            assert int(grown.pages[n]) == page.number
        if not is_pin:
            self.model.use(whole, lease.user)
        self.model.held[prefix] -= 1
        self.model.held[whole] += 1
        self.leases[at] = lease, whole, is_pin

    def _first_user(self, prefix: Prefix, lease: Lease, is_pin: bool) -> User | None:
        """The user of a new page. What a pin grafts belongs to the page before."""
        before = self.model.pages.get(prefix[:-1])
        return lease.user if not is_pin else before.user if before is not None else None

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def copy(self, data: st.DataObject) -> None:
        """Copies below are made of a part of a held path."""
        lease, prefix, _ = self.leases[data.draw(st.integers(0, len(self.leases) - 1))]
        start = data.draw(st.integers(0, len(prefix)))
        stop = data.draw(st.integers(start, len(prefix)))
        before = [self.model.pages[prefix[: n + 1]].kept for n in range(len(prefix))]
        end = self.where.copy(self.tree, lease, start, stop)
        assert start <= end <= stop
        if start and before[start - 1]:
            assert end > start or start == stop, "a copy behind another one on the path does not count"
        for n in range(start, min(end, len(prefix))):
            self.model.pages[prefix[: n + 1]].kept |= n < stop

    # -- shrinking

    @rule(count=st.integers(0, 9), most=st.sampled_from((0, 1, 99)))
    def evict_device(self, count: int, most: int) -> None:
        """The callback copies all of a node, its first page, or nothing. Pages of ended sessions go first."""
        idle = [prefix for prefix, page in self.model.pages.items() if page.here and not self.model.is_held(prefix)]
        over = {number for node in self.tree.nodes() if node.is_over for number in node.pages.tolist()}
        first = [prefix for prefix in idle if self.model.pages[prefix].number in over]

        def keep(node: Node) -> int:
            lease = self.tree.pin(node)
            self.where.copy(self.tree, lease, node.depth, node.depth + min(most, node.num_pages))
            self.tree.release(lease)
            assert not node.is_over, "pages of an ended session are written back"
            return self.tree.num_copies(node)

        left: list[int] = []

        def leave(pages: Ids) -> None:
            left.extend(pages.tolist())
            self.where.leave_device(pages)

        evicted = self.tree.demote(count, "", keep, leave)
        moved = [self.model.named(number) for number in left]
        assert len(moved) == evicted.num_moved
        for prefix in moved:
            self.model.pages[prefix].here, self.model.pages[prefix].kept = False, True
        removed = self._forget(evicted.removed)  # of which some may have moved before
        assert set(moved) <= set(idle)
        left_now = {*moved, *(prefix for prefix in removed if prefix in idle)}
        assert len(left_now) == min(count, len(idle))
        assert len(left_now.intersection(first)) >= min(count, len(first)), "pages of an ended session stay"

    @rule(count=st.integers(0, 9))
    def evict_lower(self, count: int) -> None:
        copies = [prefix for prefix, page in self.model.pages.items() if page.kept and not self.model.is_held(prefix)]
        over = {number for node in self.tree.nodes() if node.is_over for number in node.pages.tolist()}
        first = [prefix for prefix in copies if self.model.pages[prefix].number in over]
        left: list[int] = []

        def leave(pages: Ids) -> None:
            left.extend(pages.tolist())
            self.where.leave_host(pages)

        evicted = self.tree.evict_lower(count, leave)
        moved = [self.model.named(number) for number in left]
        assert len(moved) == evicted.num_moved
        for prefix in moved:
            assert self.model.pages[prefix].here
            self.model.pages[prefix].kept = False
        removed = self._forget(evicted.removed)
        assert {*moved, *removed} <= set(copies)
        assert len(moved) + len(removed) == min(count, len(copies))
        assert len({*moved, *removed}.intersection(first)) >= min(count, len(first)), "copies of an ended session stay"

    @precondition(lambda self: self.model.pages)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        """A page and all pages after it are removed, unless a lease holds its node or one after it."""
        node = data.draw(st.sampled_from(sorted(self.tree.nodes(), key=lambda node: node.pages.tolist())))
        start = data.draw(st.integers(0, node.num_pages - 1))
        top = self.model.named(int(node.pages[0]))
        below = [prefix for prefix in self.model.pages if prefix[: len(top)] == top]
        gone = self.tree.discard(node, start)
        if any(map(self.model.is_held, below)):
            assert gone is None
            return
        assert gone is not None
        first = self.model.named(int(gone.min()))[: len(top) + start]
        assert set(self._forget(gone)) == {prefix for prefix in below if prefix[: len(first)] == first}

    @rule()
    def clear(self) -> None:
        self._forget(clear_tree(self.tree))
        assert all(map(self.model.is_held, self.model.pages))

    def _forget(self, numbers: Ids) -> list[Prefix]:
        self.where.forget(numbers)
        gone = [self.model.named(number) for number in numbers.tolist()]
        for prefix in gone:
            assert not self.model.is_held(prefix), "a page was evicted that a lease holds"
            del self.model.pages[prefix]
        return gone

    # -- laws

    @invariant()
    def what_the_tree_holds(self) -> None:
        found: dict[Prefix, Page] = {}
        tokens: dict[Node, Prefix] = dict.fromkeys(self.tree.all_roots(), ())
        for node in self.tree.nodes():
            assert node.parent is not None
            above = tokens[node.parent]
            tokens[node] = above + tuple(np.frombuffer(node.key, dtype=np.int32).tolist())
            for at, number in enumerate(node.pages.tolist()):
                found[tokens[node][: len(above) + at + 1]] = Page(
                    number, self.tree.is_here(node), at < self.tree.num_copies(node)
                )
            here = self.tree.is_here(node)
            assert {page in self.where.device for page in node.pages.tolist()} == {here}, "half a node is on the device"
            assert self.tree.is_here(node.parent) or not here, "a page is on the device and the one before it is not"
            assert here or self.tree.num_copies(node) == node.num_pages, "a page is nowhere"
        assert self.where.host == {page.number for page in found.values() if page.kept}
        assert found == self.model.pages

    @invariant()
    def what_only_one_session_has_used(self) -> None:
        """The tree may take pages of one session for those of several: it remembers who used them before eviction."""
        nodes = list(self.tree.nodes())
        for node in nodes:
            users = {self.model.pages[self.model.named(number)].user for number in node.pages.tolist()}
            assert node.user is None or users == {node.user}, "another session's pages would go first"
            below = [each for each in nodes if node.user is not None and each.parent is node]
            assert all(each.user is not None for each in below), "a page would go before the one that needs it"
        for user in self.all_users:
            assert user is None or user.nodes.keys() == {node for node in nodes if node.user is user}

    @invariant()
    def counters(self) -> None:
        tree, model = self.tree, self.model
        here = [prefix for prefix, page in model.pages.items() if page.here]
        assert tree.num_pages == len(here)
        assert tree.num_below == len(model.pages) - len(here)
        assert tree.num_protected == sum(map(model.is_held, here))

    @invariant()
    def whatever_can_go_is_queued(self) -> None:
        queued, lower = self.tree.queued(), self.tree.queued(Tier.HOST)
        for node in self.tree.nodes():
            here, copies = self.tree.is_here(node), self.tree.num_copies(node)
            if not node.level and here and not any(map(self.tree.is_here, node.children.values())):
                assert node in queued, "a leaf on the device can never be evicted"
            else:
                assert node not in queued, "what is held, or read by a child, is evicted"
            if not node.level and copies and not any(map(self.tree.num_copies, node.children.values())):
                assert node in lower, "copies can never be given up"

    @invariant()
    def events_add_up(self) -> None:
        for event in self.events:
            if isinstance(event, PagesStored):
                assert self.told[event.tier].isdisjoint(event.hashes)
                self.told[event.tier].update(event.hashes)
            elif isinstance(event, PagesRemoved):
                assert self.told[event.tier].issuperset(event.hashes)
                self.told[event.tier].difference_update(event.hashes)
            else:
                assert isinstance(event, AllCleared)
                assert not any(self.told.values()), "all is said to be cleared, and something was not removed"
        self.events.clear()
        assert len(self.told[Tier.DEVICE]) == self.tree.num_pages
        assert len(self.told[Tier.HOST]) == sum(page.kept for page in self.model.pages.values())


TieredTree.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestTieredTree = TieredTree.TestCase


# -- what random operations have found, once


def tree_of(text: str, *, below: str = "") -> tuple[RadixCache, list[CacheEvent], Where]:
    """`text` is cached on the device, and `below` after it on the host; no lease holds any of it."""
    events: list[CacheEvent] = []
    where = Where()
    tree = RadixCache(1, eviction_policy("lru"), emit=events.append, placement=where)
    lease = tree.lease(tree.match(NAMESPACE, tokens_of(text)))
    pages = np.arange(1, len(text + below) + 1, dtype=np.int32)
    where.device.update(pages[: len(text)].tolist())
    tree.insert(lease, tokens_of(text), pages[: len(text)])
    if below:
        pin = tree.pin(lease.node)
        tree.graft(pin, tokens_of(below), pages[len(text) :])
        where.host.update(pages[len(text) :].tolist())
        tree.release(pin)
    tree.release(lease)
    return tree, events, where


def tokens_of(text: str) -> Ids:
    return ids([ord(letter) for letter in text])


def test_a_copy_above_pages_without_one_can_be_given_up_when_their_lease_ends() -> None:
    tree, _, where = tree_of("abcd")
    lease = tree.lease(tree.match(NAMESPACE, tokens_of("ab")))
    assert where.copy(tree, lease, 0, 2) == 2
    longer = tree.lease(tree.match(NAMESPACE, tokens_of("abcd")))
    tree.release(lease)
    tree.release(longer)
    assert tree.evict_lower(9, where.leave_host).num_moved == 2 and not where.host


def test_copies_above_and_below_a_gap_can_both_be_given_up() -> None:
    tree, _, where = tree_of("abc", below="d")
    lease = tree.lease(tree.match(NAMESPACE, tokens_of("a")))
    where.copy(tree, lease, 0, 1)
    tree.release(lease)
    below = tree.pin_path(tree.match(NAMESPACE, tokens_of("abcd")), 4)
    assert not tree.evict_lower(9, where.leave_host).num_moved  # both are held, and were candidates before
    tree.release(below)
    evicted = tree.evict_lower(9, where.leave_host)
    assert (evicted.removed.tolist(), evicted.num_moved, where.host) == ([4], 1, {4})


def test_a_leaf_on_the_device_can_go_when_what_hangs_below_it_is_let_go_of() -> None:
    tree, _, _ = tree_of("ab", below="c")
    pin = tree.pin_path(tree.match(NAMESPACE, tokens_of("abc")), 3)
    assert not len(tree.evict(9))
    tree.release(pin)
    assert sorted(tree.evict(9).tolist()) == [1, 2, 3]


def test_all_is_said_to_be_cleared_last() -> None:
    tree, events, where = tree_of("ab", below="c")
    where.forget(tree.demote(2, "", lambda node: 0, where.leave_device).removed)
    pin = tree.pin(tree.root(NAMESPACE))
    tree.graft(pin, tokens_of("x"), ids([9]))
    where.host.add(9)
    tree.release(pin)
    events.clear()
    assert clear_tree(tree).tolist() == [9]
    assert isinstance(events[-1], AllCleared)
    assert [type(event) for event in events[:-1]] == [PagesRemoved]


class Counting(Where):
    """How often it was asked for copies."""

    num_asked = 0

    def have_copies(self, pages: Ids) -> Bools:
        self.num_asked += 1
        return super().have_copies(pages)


@pytest.mark.parametrize("leaves", [False, True], ids=["copies", "device"])
def test_an_eviction_asks_no_more_on_a_long_path(*, leaves: bool) -> None:
    """Of copies, and of pages that have some: of a path of 8 nodes and of one of 64, from which others branch off."""
    asked = []
    for depth in (8, 64):
        where = Counting()
        tree = RadixCache(1, eviction_policy("lru"), placement=where)
        for end in range(depth, 0, -1):  # so that the longest path is used first
            tokens = ids([*range(end), 1000 + end])
            lease = tree.lease(tree.match(NAMESPACE, tokens))
            first, last = lease.num_pages, 100 * end
            pages = np.arange(last, last + len(tokens) - first, dtype=np.int32)
            where.device.update(pages.tolist())
            tree.insert(lease, tokens[first:], pages)
            where.copy(tree, lease, 0, len(tokens))
            tree.release(lease)
        counts = []
        for _ in range(4):  # queues leave out what is not valid any more from time to time
            where.num_asked = 0
            if leaves:
                assert tree.demote(1, "", None, where.leave_device).num_moved == 1
            else:
                assert tree.evict_lower(1, where.leave_host).num_moved == 1
            counts.append(where.num_asked)
        asked.append(min(counts))
    assert asked[0] == asked[1] < 12


@pytest.mark.parametrize("copied", ["none", "half"])
def test_an_eviction_asks_no_more_below_a_page_with_many_children(copied: str) -> None:
    """Of many prompts that begin with one page, which has a copy; of the others none has, or the older half."""
    asked = []
    for children in (40, 400):
        where = Counting()
        tree = RadixCache(1, eviction_policy("lru"), placement=where, num_named=1000)
        for at in range(children):
            tokens = ids([7, 1000 + at])
            lease = tree.lease(tree.match(NAMESPACE, tokens))
            first = lease.num_pages
            pages = np.arange(first + 1 + at, 3 + at, dtype=np.int32) if at else np.array([1, 2], dtype=np.int32)
            where.device.update(pages.tolist())
            tree.insert(lease, tokens[first:], pages)
            if not at or (copied == "half" and at < children // 2):
                where.copy(tree, lease, 0, 1 + (copied == "half"))
            tree.release(lease)
        where.num_asked = 0
        for _ in range(children // 2 - 10):
            assert len(tree.demote(1, "", None, where.leave_device).removed) or copied == "half"
        asked.append(where.num_asked / (children // 2 - 10))
    assert asked[1] <= 2 * asked[0] + 4, asked


def test_removed_nodes_are_not_kept_for_their_copies() -> None:
    """Where the lower tier always has room, nothing is ever evicted there."""
    where = Where()
    tree = RadixCache(1, eviction_policy("lru"), placement=where)
    for turn in range(8):
        for at in range(60):
            page = 1 + at
            where.device.add(page)
            lease = tree.lease(tree.match(NAMESPACE, ids([1000 * turn + at])))
            tree.insert(lease, ids([1000 * turn + at]), np.array([page], dtype=np.int32))
            where.copy(tree, lease, 0, 1)
            tree.release(lease)
        where.forget(clear_tree(tree))
    assert len(tree._tiers._copies) < 300
