"""Caches whose size changes while requests run: random replays with every read checked."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from quire.cache.resizing import Resizing
from quire.errors import OutOfPages
from quire.sim.device import SimulatedDevice
from quire.spec.ids import Ids
from tests.changes import CORE, SIMULATOR, TIERS, in_turns
from tests.sim.resized import run_resized_replay

KINDS = ({}, {"tiers": True}, {"drafts": True}, {"tiers": True, "drafts": True}, {"arena": True})
KINDS += ({"arena": True, "tiers": True}, {"arena": True, "drafts": True})
TENANTS = ({}, {"tiers": True}, {"arena": True}, {"arena": True, "drafts": True}, {"arena": True, "tiers": True})
KINDS += tuple({"tenants": True, **kind} for kind in TENANTS)
NAMES = ["-".join(kind) or "plain" for kind in KINDS]
WATCHED = (*SIMULATOR, *CORE, *TIERS, "tests/sim/")


def check_replays(seeds: range, **kind: bool) -> None:
    happened: Counter[str] = Counter()
    for seed in seeds:
        happened += run_resized_replay(seed, **kind)
    assert happened["ended"] + happened["refused"] == 30 * len(seeds), "a request did not come to its end"
    rare = ("preempted", "waits", "released in use") if len(seeds) > 50 else ()
    events = ("moved", "hits", "evicted", "reached", "reached at once", *rare)
    assert min(happened[name] for name in events) > len(seeds) // 20


@pytest.mark.parametrize("kind", in_turns(KINDS, 3, *WATCHED), ids=NAMES)
def test_the_size_changes_and_every_read_is_right(kind: dict[str, bool]) -> None:
    check_replays(range(8), **kind)


@pytest.mark.parametrize("arena", [False, True])
def test_copies_that_fail_are_tried_again(arena: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    move, go_on, rng, failed, resizes = SimulatedDevice.move_frames, Resizing.go_on, random.Random(0), 0, False

    def often(device: SimulatedDevice, group: int, sources: Ids, targets: Ids) -> None:
        nonlocal failed
        if resizes and rng.random() < 1 / 3:
            failed += 1
            raise OutOfPages(group="full", wanted=len(sources), free=0, evictable=0, held_by="no memory to copy with")
        move(device, group, sources, targets)

    def resized(resizing: Resizing, *given: Any) -> bool:
        nonlocal resizes
        resizes = True
        try:
            return go_on(resizing, *given)
        finally:
            resizes = False

    monkeypatch.setattr(SimulatedDevice, "move_frames", often)
    monkeypatch.setattr(Resizing, "go_on", resized)
    for seed in range(4):
        run_resized_replay(seed, arena=arena)
    assert failed > 4


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
def test_the_size_changes_and_every_read_is_right_for_long(kind: dict[str, bool]) -> None:
    check_replays(range(100, 300), **kind)
