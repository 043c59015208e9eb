"""Damage and failures below a real engine: the same tokens, no request lost, and counters that name what was wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.testing.stores import Fault, FaultyStore, SlowStore
from quire.testing.stores.wrapped_store import LIES
from quire.tiers.store import Store
from tests.changes import TIERS, slow_unless_changed
from tests.engine.running import run
from tests.engine.tiered import (
    GREEDY,
    OTHERS,
    PROMPTS,
    Case,
    at_rest,
    below_only,
    case_of,
    closed,
    flip,
    settle,
    small,
)
from tests.tiers.scripted_store import ScriptedStore
from tests.tiers.stores.directory_medium import DirectoryMedium

pytestmark = pytest.mark.usefixtures("threads_end")


@slow_unless_changed(*TIERS)
@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("llama_gqa", 0),
        pytest.param("deepseek_v32", 1, marks=pytest.mark.slow),
        ("gemma3_text", 1),
        pytest.param("gemma3_text", 0, marks=pytest.mark.slow),
        pytest.param("falcon_h1", 0, marks=pytest.mark.slow),
        pytest.param("falcon_h1", 1, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_damaged_host_record(name: str, group: int, overlap: bool) -> None:
    """All records that only the host has lose a bit. A request that waited for one computes it."""
    case = case_of(name)
    model, expected, others = case
    core = small(model, host=8.0, overlap=overlap)
    case.check(core)
    settle(core)
    damaged = below_only(core, group)
    assert damaged
    for _, frame in damaged:
        flip(core, frame, group)
    assert run(core, PROMPTS, GREEDY, "p2") == expected
    found = at_rest(core)
    assert found["defects"]["host:digest"] > 0
    assert list(found["host"].values())[group]["quarantined"] > 0
    assert run(core, OTHERS, GREEDY, "o2") == others
    assert run(core, PROMPTS, GREEDY, "p3") == expected
    assert set(closed(core)["defects"]) == {"host:digest"}


@pytest.mark.parametrize("at", [0, 5, 20, 100, *[pytest.param(at, marks=pytest.mark.slow) for at in (9, 40, 60)]])
def test_damage_anywhere_in_a_record_is_named(dense: Case, at: int) -> None:
    model, expected, others = dense
    core = small(model, host=8.0)
    assert run(core, PROMPTS[:1], GREEDY, "p") == expected[:1]
    assert run(core, OTHERS, GREEDY, "o") == others
    settle(core)
    for _, frame in below_only(core):
        flip(core, frame, at=at)
    assert run(core, PROMPTS[:1], GREEDY, "p2") == expected[:1]
    names = {0: "magic", 5: "group", 9: "length", 20: "layout", 40: "key", 60: "digest", 100: "digest"}
    assert set(closed(core)["defects"]) == {f"host:{names[at]}"}


def test_damaged_files(dense: Case, tmp_path: Path) -> None:
    """Bytes of a directory change between two engines."""
    model, expected = dense.model, dense.expected
    settings: dict[str, Any] = {"storage": str(tmp_path / "kv"), "host": 8.0}
    first = small(model, **settings)
    assert run(first, PROMPTS, GREEDY, "p") == expected
    closed(first)
    medium = DirectoryMedium(tmp_path / "kv")
    num_damaged = sum(index % 3 != 2 for index in range(len(medium.keys())))
    for index, key in enumerate(sorted(medium.keys())):
        record = bytearray(medium.read(key) or b"")
        if index % 3 == 0:
            record[len(record) // 2] ^= 16
        elif index % 3 == 1:
            record[32:48] = bytes(16)  # whose page it is
        medium.write(key, bytes(record))
    again = small(model, **settings)
    assert run(again, PROMPTS, GREEDY, "p") == expected
    found = closed(again)
    assert found["defects"].get("storage:digest", 0) + found["defects"].get("storage:key", 0) > 0
    assert set(found["defects"]) <= {"storage:digest", "storage:key"}
    third = small(model, **settings)
    dense.check(third)
    both = [sum(each["defects"].values()) for each in (found, closed(third))]
    assert sum(both) <= num_damaged  # what was found damaged has been replaced


STORES: dict[str, Callable[[], Store]] = {
    "lies": lambda: FaultyStore(ScriptedStore(), seed=1, kinds=LIES, percent=30),
    "fails": lambda: FaultyStore(ScriptedStore(), seed=2, kinds=set(Fault) - set(LIES), percent=30),
    "says retry to all": lambda: FaultyStore(ScriptedStore(), seed=3, kinds=[Fault.UNREACHABLE], percent=100),
    "is slow": lambda: SlowStore(ScriptedStore(), (0.005, 0.03)),
    "has no room": lambda: ScriptedStore(most_bytes=4000),
}


@slow_unless_changed(*TIERS)
@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("prefetch", ["wait_complete", pytest.param("break_even", marks=pytest.mark.slow)])
def test_a_store_that(kind: str, prefetch: str, dense: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines one after the other on a store that is not to be relied on."""
    store = STORES[kind]()
    monkeypatch.setattr("quire.engine.tier_storage.open_store", lambda url, capacity: store)
    defects = 0
    for engine in range(3):
        core = small(dense.model, storage="anywhere", host=1.0, prefetch=prefetch, overlap=bool(engine % 2))
        dense.check(core)
        found = closed(core)
        defects += sum(found["defects"].values())
        if kind != "lies":  # of a store that lies now and then, memory might as well be at fault
            assert not any(name.startswith("host") for name in found["defects"])
    if kind == "lies" and prefetch == "wait_complete":
        assert defects > 0
    elif kind != "lies":
        assert defects == 0


@pytest.mark.parametrize("name", ["exists", "prepare", "put", "complete", "get"])
def test_a_store_that_raises(name: str, dense: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ScriptedStore()
    monkeypatch.setattr("quire.engine.tier_storage.open_store", lambda url, capacity: store)
    model, expected = dense.model, dense.expected
    if name in ("exists", "get"):
        first = small(model, storage="anywhere")
        assert run(first, PROMPTS, GREEDY, "p") == expected
        closed(first)
    store.failing.add(name)
    core = small(model, storage="anywhere")
    dense.check(core)
    assert closed(core)["failed_moves"] > 0


@pytest.mark.parametrize("call", ["to_host", "seal"])
def test_saves_that_fail(call: str, dense: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that is not made is one that does not exist."""

    def fails(*arguments: object) -> None:
        raise OSError("no")

    monkeypatch.setattr(f"quire.memory.frame_copies.FrameCopies.{call}", fails)
    core = small(dense.model, write_policy="write_back")
    for turn in range(2):
        dense.check(core, turn)
    found = closed(core)
    assert found["failed_moves"] > 0 and found["saved_frames"] == 0


def test_loads_that_cannot_be_checked(dense: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the host fails before anything was launched: the request begins again."""
    model, expected = dense.model, dense.expected
    core = small(model, host=8.0)
    dense.check(core)
    settle(core)

    def fails(*arguments: object) -> list[str]:
        raise OSError("no")

    monkeypatch.setattr("quire.memory.frame_copies.FrameCopies.defects", fails)
    assert run(core, PROMPTS, GREEDY, "p2") == expected
    found = closed(core)
    assert found["failed_moves"] > 0
    assert found["loaded_bytes"] == 0


def test_a_load_that_fails_in_the_middle(dense: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step that reads it cannot begin: its requests fail or begin again, and none begins on torn pages."""
    model, expected = dense.model, dense.expected
    core = small(model, host=8.0)
    dense.check(core)
    settle(core)
    from quire.memory.frame_copies import FrameCopies

    to_device = FrameCopies.to_device

    def fails(self: FrameCopies, group: int, device: Any, host: Any) -> None:
        to_device(self, group, device, host)
        calls.append(len(device))
        if len(calls) == 2:
            raise OSError("no")

    calls: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(FrameCopies, "to_device", fails)
        assert core.tiers is not None
        patch.setattr(core.tiers.mover._executor, "_piece_bytes", 1)
        tokens = run(core, PROMPTS[:1], GREEDY, "p2")
    assert calls[:2] == [1, 1]
    assert tokens in ([[]], expected[:1])
    assert run(core, PROMPTS, GREEDY, "p3") == expected
    settle(core)
    core.audit()
    assert core.statistics()["tiers"]["failed_moves"] > 0
    core.close()


def test_nothing_is_left_of_an_engine_that_could_not_start(
    dense: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store and the mover's threads end with the engine that was not made."""
    model = dense[0]
    before = threading.active_count()

    def fails(*arguments: object, **settings: object) -> None:
        raise MemoryError("no")

    monkeypatch.setattr("quire.engine.core.ModelRunner", fails)
    with pytest.raises(MemoryError):
        small(model, storage=str(tmp_path / "kv"))
    assert threading.active_count() == before
