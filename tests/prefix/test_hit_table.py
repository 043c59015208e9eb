"""HitTable against hand-made records and brute force, and candidates of GuardedDensity against a model."""

from __future__ import annotations

import numpy as np
import pytest

from quire.prefix import guarded_density
from quire.prefix.guarded_density import ANSWERS, KINDS, GuardedDensity
from quire.prefix.hit_table import AGES, KEPT, HitTable, Table
from quire.prefix.node import Node
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
    """After each pass all kinds are worth what brute force finds, those apart whose record has hardly changed."""
    draw = np.random.default_rng(3)
    table = HitTable(GROUPS)
    for number in range(4 * KEPT):
        for kind in draw.integers(KINDS, size=200).tolist():
            table.begin(kind)
            if draw.random() < 0.6:
                table.end(kind, int(draw.exponential(3 + 40 * (kind % 5))))
        table.begin_pass(range(KINDS), int(AGES[-1]))
        while table.stale:
            table.refresh()
        for kind in draw.integers(KINDS, size=4).tolist():
            if table._passes[kind] == table._pass:
                found = table.of_all(np.full(len(AGES), kind), AGES)
                assert found.tolist() == pytest.approx(brute_force(table, kind), rel=1e-9), (number, kind)
        assert table._pass - min(table._passes) < KEPT, "a kind is never computed again"


def test_worth_is_the_greatest_ratio_of_hits_to_time() -> None:
    check_worth()


def check_candidates(seed: int, patch: pytest.MonkeyPatch) -> None:
    """Leaves are offered, leased and chosen: always just those of the model can be victims, the worst run first."""
    for name, value in (("RUNS", 6), ("PART", 3), ("SLACK", 8)):
        patch.setattr(guarded_density, name, value)
    draw = np.random.default_rng(seed)
    policy, root = GuardedDensity(), Node(NAMESPACE, None, b"", b"", 0, 0)
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
