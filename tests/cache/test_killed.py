"""Caches with all their tiers and threads that are killed, or whose server is, at any moment, again and again: what is
stored afterwards is right and whole, the next one begins on it, and nothing is lost."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from quire.cache.tier_settings import PrefetchPolicy, WritePolicy
from quire.cli.store_verify import check
from quire.memory.record import HEADER_BYTES
from quire.tiers.forgotten import marked_by
from quire.tiers.moves import Link, Move
from quire.tiers.store import Answer
from quire.tiers.stores.directory import DirectoryStore
from quire.tiers.stores.registry import directory_of, open_store
from tests.cache.killed_cache import open_killed
from tests.cache.random_life import EPOCHS, RandomLife
from tests.cache.threaded_cache import (
    MODELS,
    Generations,
    ThreadedCache,
    content_of,
    known_records,
    plan_of,
    random_prompts,
)
from tests.forked import ForkServer
from tests.tiers.stores.directory_medium import DirectoryMedium
from tests.tiers.stores.servers import Server, started, valkey

LIVES = 4
"""Of caches on one store. The last one ends well."""
MANY = int(os.environ.get("QUIRE_KILLED_SEEDS", "200"))
"""Seeds of the long tests."""
FEW = len(MODELS)

Death = tuple[str, float]
ON_DIRECTORY, ON_SERVER = ("time", "open", "move", "write", "statement"), ("time", "move")


@pytest.fixture(scope="module")
def caches() -> Iterator[ForkServer]:
    started = ForkServer("tests.cache.killed_cache")
    yield started
    started.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: a socket's name has room for 100 characters."""
    path = Path(tempfile.mkdtemp(prefix="quire-"))
    yield path
    shutil.rmtree(path)


def server_in(folder: Path, *, keeps: bool) -> Server:
    """A server that remembers everything, or nothing, when it is killed. Skips the test where there is none."""
    options = ("--appendonly", "yes", "--appendfsync", "always") if keeps else ()
    return started(lambda: valkey(folder, *options))


def url_in(folder: Path) -> str:
    return f"unix://{folder}/valkey.sock?timeout=2&pending=0.5"


class Stored:
    """What a store of a seed may hold: every record is one that somebody has computed, in whole."""

    def __init__(self, url: str, seed: int) -> None:
        self._url = url
        self._plan = plan_of(MODELS[seed % len(MODELS)])
        self._known = known_records(self._plan, random_prompts(seed), EPOCHS)

    def check(self, generations: Generations) -> int:
        """Returns how many records of dead writers were dropped by opening it."""
        store = open_killed(self._url)
        try:
            entries = list(store.entries())
            verdict = check(store, entries)
            assert not verdict.corrupt and not verdict.gone and not verdict.unread
            assert verdict.records == len(entries) and verdict.num_bytes == sum(entry.num_bytes for entry in entries)
            for entry in entries:
                if marked_by(entry.key) is not None:  # of a scope that was being forgotten
                    continue
                name, tokens = self._known[entry.key]
                record = bytearray(entry.num_bytes)
                assert store.get([entry.key], [record]) == [Answer.HIT]
                wanted = [content_of(self._plan, entry.key.part, mark, tokens) for mark in generations.marks(name)]
                assert bytes(record[HEADER_BYTES:]) in wanted, f"{entry.key} is stored, and holds something else"
        finally:
            store.close()
        if not isinstance(store, DirectoryStore):
            return 0
        medium = DirectoryMedium(store.path)
        medium.check()
        assert medium.query("SELECT COUNT(*) FROM records WHERE owner IS NOT NULL") == [(0,)], "a dead writer's room"
        return store.statistics["reclaimed"]


def deaths(seed: int, kinds: tuple[str, ...]) -> list[Death]:
    """Where the lives of a seed end: while a record is written, while the index is, when a move has begun, while the
    store is opened, or at any time."""
    rng = random.Random(seed)
    when = {
        "time": lambda: rng.uniform(0.0, 0.4),
        "open": lambda: rng.uniform(0.0, 0.03),
        "move": lambda: rng.randrange(1, 250),
        "write": lambda: rng.randrange(1, 40),
        "statement": lambda: rng.randrange(1, 400),
    }
    return [(kind, when[kind]()) for kind in rng.choices(kinds, k=LIVES - 1)]


class Lives:
    """Caches one after the other on one store. `generations` is what they have said of what they flushed."""

    def __init__(self, caches: ForkServer, url: str, seed: int) -> None:
        self._caches = caches
        self._job: dict[str, Any] = {"url": url, "seed": seed}
        self._stored = Stored(url, seed)
        self.generations = Generations()
        self.storage_hits = self.reclaimed = 0
        kinds = ON_DIRECTORY if directory_of(url) else ON_SERVER
        for life, die_at in enumerate(deaths(seed, kinds)):
            self._live(life, die_at)
        self._live(LIVES, None, turns=150)

    def _live(self, life: int, die_at: Death | None, turns: int = 100_000) -> None:
        """One life, to its end, and what it has left."""
        flushed = {"newest": self.generations.newest, "oldest": self.generations.oldest}
        job = {**self._job, "life": life, "turns": turns, "die_at": die_at, "generations": flushed}
        ended = self._caches.run(job)
        assert not ended.hung, f"{job} hangs"
        assert ended.killed if die_at is not None else ended.status == 0, f"{job} ended with {ended.status}"
        for word in ended.said:
            for name, at in word.get("flushing", {}).items():
                self.generations.newest[name] = max(at, self.generations.newest.get(name, 0))
            for name, at in word.get("flushed", {}).items():
                self.generations.oldest[name] = max(at, self.generations.oldest.get(name, 0))
            self.storage_hits += word.get("storage_hits", 0)
            self.reclaimed += word.get("reclaimed", 0)
            assert not word.get("defects", 0), "nothing was damaged, only killed"
        self.reclaimed += self._stored.check(self.generations)


def test_killed_on_a_directory(caches: ForkServer, tmp_path: Path) -> None:
    """A seed of each model."""
    lived = [Lives(caches, str(tmp_path / str(seed)), seed) for seed in range(FEW)]
    assert sum(lives.storage_hits for lives in lived) > 0, "nobody ever began on what a dead one had stored"
    assert sum(lives.reclaimed for lives in lived) > 0, "nobody was ever killed while it wrote"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(FEW, FEW + MANY))
def test_killed_on_a_directory_in_many_ways(caches: ForkServer, tmp_path: Path, seed: int) -> None:
    Lives(caches, str(tmp_path / "store"), seed)


def test_killed_beside_a_living_one(caches: ForkServer, tmp_path: Path) -> None:
    """Two caches on one directory: one dies again and again, what the other one reads stays right."""
    url, seed = str(tmp_path / "store"), 1
    cache = ThreadedCache(open_killed(url), MODELS[seed])
    tiers = cache.cache.tiers
    assert tiers is not None
    life = RandomLife(cache, random_prompts(seed), random.Random(seed), lambda word: None, flushes=False)
    job = {"url": url, "seed": seed, "turns": 100_000, "generations": {}, "flushes": False}
    with ThreadPoolExecutor(1) as pool:
        for number, die_at in enumerate(deaths(seed, ON_DIRECTORY)):
            running = pool.submit(caches.run, {**job, "life": number, "die_at": die_at})
            while not running.done():
                life.step()
            assert running.result().killed and not running.result().hung
    life.end()
    life.store_all()
    assert life.read_back() > 0
    assert not tiers.counters.defects, "nothing was damaged, only killed"
    cache.close()
    Stored(url, seed).check(Generations())


def test_killed_on_a_server(caches: ForkServer, folder: Path) -> None:
    with server_in(folder, keeps=False):
        assert Lives(caches, url_in(folder), 1).storage_hits > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5, 5 + MANY // 4))
def test_killed_on_a_server_in_many_ways(caches: ForkServer, folder: Path, seed: int) -> None:
    with server_in(folder, keeps=False):
        Lives(caches, url_in(folder), seed)


def check_killed_server(folder: Path, seed: int) -> int:
    """The server dies while it is used, is away for a while, and comes back with all that it had or with nothing.
    Returns how often it was missed."""
    rng = random.Random(seed)
    server = server_in(folder, keeps=bool(seed % 2))
    store = open_store(url_in(folder))
    policy = list(PrefetchPolicy)[(seed + 2) % len(PrefetchPolicy)]
    write, threads = rng.choice(list(WritePolicy)), rng.choice((1, 2, 4))
    cache = ThreadedCache(store, MODELS[seed % len(MODELS)], write=write, prefetch=policy, threads=threads)
    life = RandomLife(cache, random_prompts(seed), rng, lambda word: None)
    with server:
        for _ in range(3):
            for _ in range(rng.randrange(60)):
                life.step()
            kill_at_a_move(cache, server, rng)
            while server.process is not None:
                life.step()
            for _ in range(rng.randrange(20, 80)):
                life.step()
            server.start()
        for _ in range(60):
            life.step()
        life.end()
        tiers = cache.cache.tiers
        assert tiers is not None
        give_up = time.monotonic() + 30
        while tiers.forgetting.scopes:
            assert time.monotonic() < give_up, "a flush never comes to its end"
            time.sleep(0.02)
            cache.cache.settle_moves()
        before = life.storage_hits
        life.store_all()
        assert life.read_back() > before or policy is not PrefetchPolicy.WAIT_COMPLETE, "it is not used any more"
        assert not tiers.counters.defects, "nothing was damaged, only killed"
        cache.close()
        Stored(url_in(folder), seed).check(cache.generations)
    return sum(store.failures.values())  # type: ignore[attr-defined]


def kill_at_a_move(cache: ThreadedCache, server: Server, rng: random.Random) -> None:
    """SIGKILL for the server a moment after one of the next moves to or from it was begun."""
    left, delay, really = rng.randrange(1, 12), rng.choice((0.0, 0.0003, 0.001)), type(cache.mover).submit

    def submit(move: Move) -> bool:
        nonlocal left
        left -= move.link not in (Link.SAVE, Link.LOAD)
        taken = really(cache.mover, move)
        if left <= 0:
            time.sleep(delay)
            server.kill()
            del cache.mover.submit
        return taken

    cache.mover.submit = submit  # type: ignore[method-assign]


@pytest.mark.parametrize("seed", [0, 1])
def test_a_server_that_is_killed_and_comes_back(folder: Path, seed: int) -> None:
    before = threading.active_count()
    assert check_killed_server(folder, seed) > 0, "nobody noticed that the server was away"
    assert threading.active_count() <= before


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 2 + MANY))
def test_a_server_that_is_killed_in_many_ways(folder: Path, seed: int) -> None:
    check_killed_server(folder, seed)
