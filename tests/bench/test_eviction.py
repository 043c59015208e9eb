"""The comparison of eviction policies at toy size, and SIEVE and the timer that it brings."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.prefix.evict import POLICIES, eviction_policy
from quire.prefix.radix_cache import RadixCache
from quire.spec.events import Namespace
from tests.changes import slow_unless_changed
from tests.programs import run_program

BENCH = Path(__file__).parents[2] / "bench" / "eviction" / "compare.py"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the benchmark registers is gone afterwards."""
    monkeypatch.setattr("quire.prefix.evict.POLICIES", dict(POLICIES))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCH.parent)):
            del sys.modules[name]


@slow_unless_changed("bench/eviction/", "src/quire/prefix/")
def test_the_comparison_runs_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    written = tmp_path / "result.json"
    done = run_program(BENCH, "--toy", "--json", written, "--pages", "16", "--policies", "lru,sieve,density")
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(written.read_text())
    cells: dict[str, dict[str, Any]] = result["cells"]
    assert len(cells) == 2 * 4 * 4 + 2 * 3
    for key, row in cells.items():
        mode, trace, seed, page, pool, _ = key.split("/")
        assert 0 <= row["hit"] <= result["traces"][f"{trace}/{seed}/{page}"]["ideal"] + 1e-5
        assert row["ttft_s"] > 0 and row["recomputed"] > 0
        if mode == "one":
            best = cells["/".join(("one", trace, seed, page, pool, "optimum"))]
            assert row["hit"] <= best["hit"] and row["ttft_s"] >= best["ttft_s"]
    assert any(row.get("decision_us", 0) > 0 for row in cells.values())
    assert cells["one/chat/11/16/1:2/lru"]["recomputed"] < cells["one/chat/11/16/1:8/lru"]["recomputed"]

    gone = "one/chat/11/16/1:4/sieve"
    del cells[gone]
    cells["one/chat/11/16/1:4/lru"]["hit"] = 0.123
    written.write_text(json.dumps(result))
    again = run_program(BENCH, "--toy", "--json", written, "--pages", "16", "--policies", "lru,sieve,density")
    assert again.returncode == 0, again.stdout + again.stderr
    measured = [line.split()[0] for line in again.stdout.splitlines() if line.startswith(("one/", "load/"))]
    assert measured == [gone]
    assert json.loads(written.read_text())["cells"]["one/chat/11/16/1:4/lru"]["hit"] == 0.123
    document = tmp_path / "page.md"
    document.write_text("before\n<!-- eviction: measured -->\nold\n<!-- eviction: end -->\nafter\n")
    read = run_program(BENCH, "--read", written, "--plot", tmp_path / "rates.svg", "--document", document)
    text = document.read_text()
    assert "old" not in text and "| chat | 16 | 1/4 | 12.3 |" in text and text.endswith("end -->\nafter\n")
    assert read.returncode == 0 and "| chat | 16 | 1/4 | 12.3 |" in read.stdout
    assert (tmp_path / "rates.svg").stat().st_size > 1000


def test_the_tables_compare_policies_on_the_same_seeds(bench: None) -> None:
    from bench.eviction.report import means, tables

    def cell(seed: int, policy: str, hit: float) -> tuple[str, dict[str, Any]]:
        return f"one/chat/{seed}/16/1:4/{policy}", {"hit": hit, "recomputed": 1.0, "ttft_s": 1.0, "commit": "abc"}

    cells = [cell(seed, "lru", rate) for seed, rate in ((1, 0.9), (11, 0.2), (12, 0.4), (13, 0.8))]
    cells += [cell(seed, "density", rate) for seed, rate in ((11, 0.3), (12, 0.5))]
    cells += [cell(seed, "optimum", 0.7) for seed in (11, 12, 13)]
    result = {"cells": dict(cells), "machine": "here", "date": "today", "skipped": {"azure-code": "it is not here"}}
    rates = {policy: row["hit"] for policy, row in means(result)["one"]["chat", 16, "1/4"].items()}
    assert rates == pytest.approx({"lru": 0.3, "density": 0.4, "optimum": 0.7}), "of seeds 11 and 12"
    shown = tables(result)
    assert "| chat | 16 | 1/4 | 30.0 | **40.0** | 70.0 |" in shown and "| density | 25% | +10.00 |" in shown
    assert "`azure-code` is missing: it is not here." in shown


def test_a_trace_that_is_not_here_is_named(bench: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from bench.eviction import cells as eviction_cells

    monkeypatch.setattr(eviction_cells, "SHARED", tmp_path)
    for name in ("mooncake-synthetic", "documents", "azure-code"):
        with pytest.raises(eviction_cells.Missing, match="is not here"):
            eviction_cells.Source(name).open()


NAMESPACE = Namespace()


@pytest.mark.parametrize("seed", range(6))
def test_sieve_is_the_published_one_on_single_pages(bench: None, seed: int) -> None:
    """Against a list and a hand, as published: prompts of one page, each a leaf of its own."""
    from bench.eviction.sieve import Sieve

    draw = np.random.default_rng(seed)
    room = 6
    tree = RadixCache(1, Sieve())
    queue: list[int] = []  # the oldest first
    visited: set[int] = set()
    hand = 0
    evictions = 0
    for page in draw.zipf(1.3, 600) % 20:
        token = np.array([page], dtype=np.int32)
        match = tree.match(NAMESPACE, token)
        assert bool(match.num_pages) == (int(page) in queue)
        if match.num_pages:
            visited.add(int(page))
            tree.release(tree.lease(match))
            continue
        if len(queue) == room:
            while queue[hand] in visited:
                visited.discard(queue[hand])
                hand = (hand + 1) % room
            gone = queue.pop(hand)  # the hand stays at the next newer one, and begins again behind the newest
            hand = 0 if hand == len(queue) else hand
            assert tree.evict(1).tolist() == [gone]
            evictions += 1
            match = tree.match(NAMESPACE, token)
        lease = tree.lease(match)
        tree.insert(lease, token, token)
        tree.release(lease)
        queue.append(int(page))
    assert evictions > 100


def test_a_timed_policy_evicts_the_same(bench: None) -> None:
    from bench.eviction.paged_trace import PagedTrace
    from bench.eviction.sequential import replay_in_order
    from bench.eviction.timed_policy import TimedPolicy

    from quire.sim.trace import open_trace

    trace = PagedTrace.of(open_trace("sessions:requests=80"), 16)
    timed = TimedPolicy(eviction_policy("density"))
    plain = replay_in_order(trace, 30_000, eviction_policy("density"))
    found = replay_in_order(trace, 30_000, timed)
    assert found.hit_tokens.tolist() == plain.hit_tokens.tolist()
    assert 0 < timed.num_victims <= plain.evicted_pages and 0 < timed.seconds < found.cpu_seconds
