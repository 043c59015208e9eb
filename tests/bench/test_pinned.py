"""Replays that pin what runs, against those of one request at a time; and compositions of recorded sessions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from bench.eviction.drawn_endings import ANSWER, TOOL, drawn_endings, gaps_of
from bench.eviction.oracles import ORACLES, Future, oracle
from bench.eviction.paged_trace import PagedTrace
from bench.eviction.pinned import TOKENS_PER_S, optimal_pinned, replay_pinned
from bench.eviction.recorded import PATH, Column, Composition
from bench.eviction.recorded_report import lines, means, tables
from bench.eviction.scheduled import replay_scheduled
from bench.eviction.sequential import replay_in_order

from quire.prefix.evict import eviction_policy
from quire.prefix.node import Lease
from quire.prefix.radix_cache import RadixCache
from quire.sim.replay import ReplaySettings
from quire.sim.trace import open_trace
from quire.spec.ids import Ids
from tests.changes import slow_unless_changed

SOURCES = ("chat:requests=100", "sessions:requests=150")


def pages_of(source: str, *, apart_s: float) -> PagedTrace:
    """A workload in pages of 64, whose requests arrive at equal distances."""
    pages = PagedTrace.of(open_trace(source, seed=4, limit=150), 64)
    return replace(pages, arrivals=apart_s * np.arange(len(pages)))


def pool_of(pages: PagedTrace, part: int) -> int:
    return max(pages.bounds().working_set_tokens // part, 64 * max(each.held_pages for each in pages))


@slow_unless_changed("bench/eviction/", "src/quire/prefix/", "src/quire/sim/hit_bounds.py")
@pytest.mark.parametrize("source", SOURCES)
def test_requests_that_do_not_meet_hit_the_same_as_one_at_a_time(source: str) -> None:
    pages = pages_of(source, apart_s=1e4)
    pool = pool_of(pages, 8)
    alone = replay_in_order(pages, pool, eviction_policy("lru"))
    found = replay_pinned(pages, pool, eviction_policy("lru"))
    assert found.hit_rate(pages) == pytest.approx(alone.hit_rate(pages), abs=0.01) and found.evicted_pages > 0
    best = pages.bounds().optimal_hit_tokens(pool) / pages.prompt_tokens.sum()
    assert optimal_pinned(pages, pool) / pages.prompt_tokens.sum() == pytest.approx(best, abs=0.01)


@slow_unless_changed("bench/eviction/", "src/quire/prefix/", "src/quire/sim/hit_bounds.py")
@pytest.mark.parametrize("source", SOURCES)
def test_what_runs_takes_room_and_no_policy_hits_more_than_the_optimum(source: str) -> None:
    pages = pages_of(source, apart_s=20 / TOKENS_PER_S)
    pool = pool_of(pages, 8)
    best = optimal_pinned(pages, pool)
    rates = [replay_pinned(pages, pool, eviction_policy(name)).hit_tokens.sum() for name in ("lru", "density")]
    assert min(rates) > 0 and max(rates) <= best, rates
    alone = replay_in_order(pages, pool, eviction_policy("lru"))
    assert rates[0] < alone.hit_tokens.sum(), "what runs takes no room"


@slow_unless_changed("bench/eviction/", "src/quire/prefix/", "src/quire/sim/")
@pytest.mark.parametrize("closes", [0.0, 0.5])
def test_the_scheduler_hits_what_the_tree_alone_does(closes: float) -> None:
    """Of requests that do not meet nearly to the page; of those that do about as many."""
    for apart_s, most in ((1e4, 0.001), (2.0, 0.03)):
        pages = pages_of("chat:requests=100", apart_s=apart_s)
        pool = pool_of(pages, 8)
        alone = replay_pinned(pages, pool, eviction_policy("lru"), closes=closes)
        found = replay_scheduled(pages, pool, ReplaySettings(policy="lru", check="reads"), closes=closes)
        assert found.evicted_pages > 0 and alone.hit_rate(pages) > 0.1
        assert found.hit_rate(pages) == pytest.approx(alone.hit_rate(pages), abs=most), apart_s


def test_outputs_are_as_long_through_the_scheduler_as_through_the_tree_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy that tells kinds by lengths sees the same ones."""
    pages = pages_of("sessions:requests=150", apart_s=1e4)
    pool = pool_of(pages, 8)
    found: list[int] = []
    real = RadixCache.ended

    def ended(tree: RadixCache, lease: Lease, tail: Ids, num_generated: int) -> object | None:
        found.append(num_generated)
        return real(tree, lease, tail, num_generated)

    monkeypatch.setattr(RadixCache, "ended", ended)
    replay_scheduled(pages, pool, ReplaySettings(policy="lru"))
    assert found == pages.output_tokens.tolist() and max(found) > 64
    replay_scheduled(pages, pool, ReplaySettings(policy="lru"), closes=1.0)
    assert set(found) == set(pages.output_tokens.tolist()), "turns that go on in their row"


@pytest.mark.skipif(not PATH.exists(), reason=f"{PATH} is not here")
def test_sessions_that_are_drawn_again_are_sessions_of_their_own() -> None:
    few, many = (Composition(sessions=count, spacing_s=30, seed=1).trace() for count in (40, 80))
    odd = Composition(sessions=40, spacing_s=30, seed=1, odd=True).trace()
    assert len(many) == 2 * len(few) != 2 * len(odd)
    assert 1.9 < many.bounds().working_set_tokens / few.bounds().working_set_tokens < 2, "shared prompts are shared"
    assert (np.diff(many.arrivals) >= 0).all()
    assert len(set(many.sessions.tolist())) == 2 * len(set(few.sessions.tolist())) > 40


@slow_unless_changed("bench/eviction/", "src/quire/prefix/", "src/quire/sim/hit_bounds.py")
@pytest.mark.parametrize("source", SOURCES)
def test_what_knows_more_of_the_future_hits_more(source: str) -> None:
    pages = pages_of(source, apart_s=1e4)
    pool = pool_of(pages, 8)
    best = optimal_pinned(pages, pool)
    found = {}
    for name in ORACLES:
        future = Future(pages)
        found[name] = int(replay_pinned(pages, pool, oracle(name, future), begun=future.begin).hit_tokens.sum())
    lru = replay_pinned(pages, pool, eviction_policy("lru")).hit_tokens.sum()
    assert lru < max(found.values()) == max(found["next"], found["octave"]) <= best, found
    assert found["next"] > lru + 0.8 * (best - lru)
    assert found["octave"] > found["error1"] > found["error2"]
    assert found["dead"] >= lru


def test_drawn_endings_are_those_of_known_sessions() -> None:
    """Half of the gaps are those of tools, a quarter those of answers. The other paths are never used again."""
    draw = np.random.default_rng(7)
    kinds = draw.choice([TOOL, ANSWER, 0], 4_000, p=[0.5, 0.25, 0.25])
    gaps = np.where(kinds == TOOL, draw.lognormal(np.log(17), 0.8, 4_000), draw.lognormal(np.log(244), 0.8, 4_000))
    rows = sorted(
        (at, number) for number in range(4_000) for at in ([0.0, gaps[number]] if kinds[number] else [0.0])
    )  # each path once, and again after its gap
    ids = np.array([[2 * number, 2 * number + 1] for _, number in rows], dtype=np.int32)
    length = np.full(len(rows), 3)
    trace = PagedTrace(
        1, ids.reshape(-1), 2 * np.arange(1, len(rows) + 1), length, 0 * length, np.array([at for at, _ in rows]),
        0 * length, 0 * length, *(np.zeros(len(rows), dtype="U1") for _ in range(3)),
    )  # fmt: skip
    firsts = np.array([number for at, number in rows if at == 0.0])
    found = drawn_endings(trace)[: len(firsts)]
    assert np.allclose(gaps_of(trace)[: len(firsts)][kinds[firsts] > 0], gaps[firsts][kinds[firsts] > 0])
    assert (found[kinds[firsts] == TOOL] == TOOL).mean() > 0.85
    assert (found[kinds[firsts] == ANSWER] == ANSWER).mean() > 0.85
    assert (found[kinds[firsts] == 0] == ANSWER).mean() > 0.85


def test_columns_are_compared_with_lru_in_their_own_cells() -> None:
    cells = {
        "odd/30/90/1/1/8/lru": [0.5, 0.4],
        "odd/30/90/1/1/8/optimum": [0.7],
        "odd/30/90/1/1/8/density:told": [0.6, 0.45],
        "odd/30/90/2/1/8/lru": [0.9, 0.8],
        "odd/30/90/2/1/8/optimum": [1.0],
        "odd/30/90/2/1/8/density:told": [0.89, 0.79],
        "odd/30/90/2/1/8/oracle:next": [0.95, 0.9],
    }
    found = means(cells)["odd"]["1/8"]
    told, oracle_next = found["density:told"], found["oracle:next"]
    assert (told.cells, oracle_next.cells) == (2, 1)
    assert (told.gap, told.worst) == (pytest.approx(0.3), pytest.approx(-1.0))
    assert told.saved == pytest.approx(2.0) and oracle_next.gap == pytest.approx(0.5)
    text = tables(cells)
    assert "| density:told | 30%; -1.00; +2.00 |" in text and "| oracle:next, of 1 | 50%; +5.00; +10.00 |" in text
    assert "| lru, hits | 70.00 % |" in text
    assert sum("density:told" in line for line in lines(cells)) == 1


def test_the_marks_of_a_column_are_read() -> None:
    found = Column.of("density:told:closes=0.5")
    assert found == Column(policy="density", told=True, closes=0.5)
    assert Column.of("oracle:next").policy == "oracle:next"
    with pytest.raises(SystemExit, match="wrong"):
        Column.of("density:wrong")
    pages = replace(pages_of("sessions:requests=150", apart_s=100.0), endings=np.tile([1, 2], 75))
    pool = pool_of(pages, 8)
    rates = {name: Column.of(name).replayed(pages, pool) for name in ("density", "density:told", "lru", "lru:told")}
    assert rates["density"] != rates["density:told"] and rates["lru"] == rates["lru:told"]
