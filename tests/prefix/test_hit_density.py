"""HitDensity: its table against hand-made records, its candidates against a model, and what it learns against LRU."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from quire.prefix import hit_density
from quire.prefix.evict import eviction_policy
from quire.prefix.hit_density import ANSWERS, KINDS, RUNS, HitDensity
from quire.prefix.hit_table import AGES, HitTable, Table
from quire.prefix.node import Node
from quire.prefix.policy import EvictionPolicy
from quire.prefix.radix_cache import RadixCache
from quire.spec.events import Namespace

NAMESPACE = Namespace()
GROUPS = (KINDS, ANSWERS, 1)


def age(ticks: int) -> int:
    return int(np.searchsorted(AGES, ticks, side="right")) - 1


def table_of(records: dict[int, tuple[int, list[int]]]) -> Table:
    """What is worth [kinds, ages], with stays begun and the ages of those that ended."""
    table = HitTable(GROUPS)
    for kind, (begun, ended) in records.items():
        for _ in range(begun):
            table.begin(kind)
        for ticks in ended:
            table.end(kind, ticks)
    table.begin_pass(range(KINDS), int(AGES[-1]))
    while table.stale:
        table.refresh()
    return table.of_all(*np.meshgrid(np.arange(KINDS), AGES, indexing="ij"))


def brute_force(table: HitTable, kind: int) -> list[float]:
    """The greatest ratio of hits to time over all ends, without a hull."""
    chances = table._reused[kind] + table._guesses[kind // ANSWERS]
    chances = chances * min(1 / (table._begun[kind] + 20), 0.995 / chances.sum())
    hits = np.append(0, chances.cumsum())
    widths = np.diff(np.append(AGES, 2 * AGES[-1]))
    held = np.append(0, ((1 - hits[:-1] - chances / 2) * widths).cumsum())
    return [max((hits[at + 1 :] - hits[at]) / (held[at + 1 :] - held[at])) for at in range(len(AGES))]


def test_with_no_record_the_older_is_worth_less() -> None:
    table = table_of({})
    assert (np.diff(table[:, age(16) :], axis=1) < 0).all(), "not LRU at the start"
    assert (table == table[0]).all()


def test_a_leaf_is_worth_most_shortly_before_its_kind_returns() -> None:
    table = table_of({0: (1_000, [100] * 900)})[0]
    assert table[age(20)] < table[age(50)] < table[age(90)], "worth does not rise towards the return"
    assert table[age(200)] < table[age(20)] / 10, "what missed its time is kept"


def test_what_returns_more_often_is_worth_more_at_every_age_and_relatives_lend_their_record() -> None:
    returns = AGES[age(4) : age(64)].tolist()
    records = {kind: (1_000, returns * round(part * 1_000 / len(returns))) for kind, part in ((0, 0.9), (ANSWERS, 0.1))}
    table = table_of(records)
    young = slice(0, age(32))
    assert (table[0, young] > table[ANSWERS, young]).all()
    assert (table[1, young] > table[ANSWERS + 1, young]).all(), "kinds with no record ignore their relatives"


def check_worth() -> None:
    """After each pass all kinds are worth what brute force finds."""
    draw = np.random.default_rng(3)
    table = HitTable(GROUPS)
    for number in range(16):
        for kind in draw.integers(KINDS, size=200).tolist():
            table.begin(kind)
            if draw.random() < 0.6:
                table.end(kind, int(draw.exponential(3 + 40 * (kind % 5))))
        table.begin_pass(range(KINDS), int(AGES[-1]))
        while table.stale:
            table.refresh()
        for kind in draw.integers(KINDS, size=4).tolist():
            found = table.of_all(np.full(len(AGES), kind), AGES)
            assert found.tolist() == pytest.approx(brute_force(table, kind), rel=1e-9), (number, kind)


def test_worth_is_the_greatest_ratio_of_hits_to_time() -> None:
    check_worth()


def check_candidates(seed: int, patch: pytest.MonkeyPatch) -> None:
    """Leaves are offered, leased and chosen: always just those of the model can be victims, the worst run first."""
    for name, value in (("RUNS", 6), ("PART", 3), ("SLACK", 8)):
        patch.setattr(hit_density, name, value)
    draw = np.random.default_rng(seed)
    policy, root = HitDensity(), Node(NAMESPACE, None, b"", b"", 0, 0)
    policy.guard.num_cached = 1 << 20
    leased = [Node(NAMESPACE, root, bytes(4), bytes(4), 0, 0) for _ in range(40)]
    model: dict[Node, None] = {}
    for number in range(1_500):
        step = draw.random()
        if step < 0.4 and leased:
            node = leased.pop(int(draw.integers(len(leased))))
            node.turn, node.answer = int(draw.integers(1, 3)), int(draw.choice([1, 100]))
            policy.offered(node)
            model[node] = None
        elif step < 0.7 and model:
            node = list(model)[int(draw.integers(len(model)))]
            policy.used(node)
            node.ticket = 0
            del model[node]
            leased.append(node)
        elif step < 0.9:
            victim = policy.victim()
            assert (victim in model) if model else victim is None, number
            if victim is not None:
                del model[victim]
                leased.append(victim)
                if draw.random() < 0.5:  # its last pages are gone
                    model[leased.pop()] = None
                    policy.offered(victim)
        found = list(policy.candidates())
        assert set(found) == model.keys(), number
        assert sum(map(len, (part for run in policy._runs.values() for part in run))) == policy._num_entries
        assert policy._num_entries < 240, "invalid entries pile up"
    assert policy._shift > 2
    while model:
        victim = policy.victim()
        assert victim is not None
        del model[victim]
    assert policy.victim() is None


@pytest.mark.parametrize("seed", range(6))
def test_each_candidate_can_be_a_victim_and_nothing_else(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check_candidates(seed, monkeypatch)


def replay(policy: EvictionPolicy, requests: Iterator[list[int]], pool: int) -> float:
    """The share of the requests' tokens that were cached, in a tree of pages of one token."""
    tree = RadixCache(1, policy, remembered=4 * pool)
    hits = total = 0
    for request in requests:
        tokens = np.array(request, dtype=np.int32)
        lease = tree.lease(tree.match(NAMESPACE, tokens))
        hits, total = hits + lease.num_pages, total + len(tokens)
        tree.evict(tree.num_pages + len(tokens) - lease.num_pages - pool)
        rest = tokens[lease.num_pages :]
        tree.insert(lease, rest, np.zeros(len(rest), dtype=np.int32))
        tree.release(lease)
        assert tree.num_pages <= pool
        assert tree.queued() == {node for node in tree.nodes() if not node.children}
    return hits / total


def loop() -> Iterator[list[int]]:
    for turn in range(1_200):
        yield list(range(turn % 20 * 10, turn % 20 * 10 + 10))


def scan() -> Iterator[list[int]]:
    """Ten hot prompts, each with a question of its own, and long documents that are read once."""
    for turn in range(1_500):
        if turn % 3:
            yield [*range(turn % 10 * 20, turn % 10 * 20 + 20), 1_000 + turn]
        else:
            yield list(range(10_000 + turn * 50, 10_000 + turn * 50 + 40))


def test_part_of_a_loop_longer_than_the_pool_stays() -> None:
    assert replay(eviction_policy("lru"), loop(), 100) == 0
    assert replay(HitDensity(), loop(), 100) > 0.35  # half of the loop fits


def test_a_scan_does_not_flush_what_is_hit() -> None:
    assert replay(HitDensity(), scan(), 260) > replay(eviction_policy("lru"), scan(), 260) + 0.1


def test_the_same_requests_get_the_same_victims() -> None:
    assert replay(HitDensity(), scan(), 260) == replay(HitDensity(), scan(), 260)


def test_an_evicted_edge_that_returns_counts_as_a_hit_and_only_once() -> None:
    policy, root = HitDensity(), Node(NAMESPACE, None, b"", b"", 0, 0)
    leaf, again = (Node(NAMESPACE, root, bytes(4), bytes(4), 0, 0) for _ in range(2))
    leaf.turn = again.turn = 1
    policy.offered(leaf)
    assert policy.victim() is leaf
    policy.stored(again, 1, [(leaf, 0)])
    policy.stored(again, 1, [(leaf, 0)])
    assert policy._table._reused.sum() == pytest.approx(1)


def test_runs_stay_few_whatever_the_number_of_leaves() -> None:
    policy, root = HitDensity(), Node(NAMESPACE, None, b"", b"", 0, 0)
    for number in range(64_000):
        leaf = Node(NAMESPACE, root, bytes(4), bytes(4), 0, number)
        leaf.turn, leaf.answer = 1 + number % 4, number % 300
        policy.offered(leaf)
        assert len(policy._runs) <= RUNS
    victims = {policy.victim() for _ in range(2_000)}
    assert len(victims) == 2_000 and None not in victims
