"""Writers of a directory that are killed, and several that are at it at once."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from quire.testing.contracts.records import make_key, make_record, read, write
from quire.tiers.store import Answer
from quire.tiers.stores.directory import DirectoryStore
from tests.changes import STORES, unless_changed
from tests.forked import Ended, ForkServer
from tests.tiers.stores.directory_medium import DirectoryMedium
from tests.tiers.stores.directory_writer import CAPACITY, NUM_KEYS, size_of

pytestmark = unless_changed(__name__, *STORES)


@pytest.fixture(scope="module")
def writers() -> Iterator[list[ForkServer]]:
    started = [ForkServer("tests.tiers.stores.directory_writer") for _ in range(2)]
    yield started
    for each in started:
        each.close()


def run(
    writers: ForkServer, path: Path, seed: int, turns: int = 100_000, die_at: tuple[str, float] | None = None
) -> Ended:
    return writers.run({"path": str(path), "seed": seed, "turns": turns, "die_at": die_at})


def check_contents(path: Path) -> int:
    """Whatever is listed is there and right; returns how much that is."""
    store = DirectoryStore(path, None)
    numbers = {make_key(number): number for number in range(NUM_KEYS)}
    entries = list(store.entries())
    for entry in entries:
        number = numbers[entry.key]
        assert entry.num_bytes == size_of(number)
        assert read(store, entry.key, size_of(number)) == make_record(number, size_of(number))
    keys = [make_key(number) for number in range(NUM_KEYS)]
    assert Answer.PENDING not in store.exists(keys), "what a dead writer had prepared is still held"
    assert write(store, keys[:3], [make_record(number, size_of(number)) for number in range(3)]) == [Answer.HIT] * 3
    store.close()
    DirectoryMedium(path).check()
    return len(entries)


def deaths() -> list[tuple[str, float]]:
    rng = random.Random(0)
    at = [("statement", float(rng.randrange(1, 400))) for _ in range(12)]
    at += [("write", float(rng.randrange(1, 40))) for _ in range(6)]
    return at + [("time", rng.uniform(0.01, 0.15)) for _ in range(4)]


def test_killed_at_any_moment(writers: list[ForkServer], tmp_path: Path) -> None:
    """One directory, killed over and over again: it opens each time, with whole records only."""
    kept = []
    for seed, die_at in enumerate(deaths()):
        ended = run(writers[0], tmp_path, seed, die_at=die_at)
        assert ended.killed and not ended.hung, ended
        kept.append(check_contents(tmp_path))
    assert min(kept[3:]) > 3


def test_killed_beside_a_living_one(writers: list[ForkServer], tmp_path: Path) -> None:
    """A store that stays open takes back what a dead writer held, when it needs the room or meets the key."""
    store = DirectoryStore(tmp_path, CAPACITY, slab_bytes=96 << 10)
    for seed in range(6):
        assert run(writers[0], tmp_path, seed, die_at=("write", 3 + seed)).killed
    keys = [make_key(number) for number in range(NUM_KEYS)]
    assert Answer.PENDING not in store.exists(keys)
    write(store, keys, [make_record(number, size_of(number)) for number in range(NUM_KEYS)])
    store.close()
    check_contents(tmp_path)


def test_two_processes_at_once(writers: list[ForkServer], tmp_path: Path) -> None:
    """They write, read, evict and remove the same records, and never see a wrong byte."""
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(run, writers[each], tmp_path, each, 250) for each in range(2)]
        ended = [future.result() for future in running]
    for each in ended:
        assert each.status == 0, each
        assert each.said[-1]["stored"] > 50 and each.said[-1]["hits"] > 10
    check_contents(tmp_path)
