"""Caches whose size changes while requests run: random replays with every read checked."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.sim.resized import run_resized_replay

KINDS = ({}, {"tiers": True}, {"drafts": True}, {"tiers": True, "drafts": True}, {"arena": True})
KINDS += ({"arena": True, "tiers": True}, {"arena": True, "drafts": True})
NAMES = ["-".join(kind) or "plain" for kind in KINDS]


def check_replays(seeds: range, **kind: bool) -> None:
    happened: Counter[str] = Counter()
    for seed in seeds:
        happened += run_resized_replay(seed, **kind)
    assert happened["ended"] + happened["refused"] == 30 * len(seeds), "a request did not come to its end"
    rare = ("preempted", "waits", "released in use") if len(seeds) > 50 else ()
    events = ("moved", "hits", "evicted", "reached", "reached at once", *rare)
    assert min(happened[name] for name in events) > len(seeds) // 20


@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
def test_the_size_changes_and_every_read_is_right(kind: dict[str, bool]) -> None:
    check_replays(range(8), **kind)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
def test_the_size_changes_and_every_read_is_right_for_long(kind: dict[str, bool]) -> None:
    check_replays(range(100, 300), **kind)
