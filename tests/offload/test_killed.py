"""Caches with all their tiers and threads that are killed, or whose server is, at any moment, again and again: what is
stored afterwards is right and whole, the next one begins on it, and nothing is lost."""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from quire.cli.store import check
from quire.memory.record import HEADER_BYTES
from quire.settings.fields import PrefetchPolicy, WritePolicy
from quire.tiers.store import Answer
from quire.tiers.stores.directory import DirectoryStore
from quire.tiers.stores.registry import directory_of, open_store
from quire.tiers.tombstones import tombstone_scope
from quire.tiers.transfer import Lane, Transfer
from tests.changes import TIERS, unless_changed
from tests.forked import ForkServer
from tests.offload.killed_cache import open_killed
from tests.offload.random_life import EPOCHS, RandomLife
from tests.offload.threaded_cache import (
    MODELS,
    Generations,
    ThreadedCache,
    content_of,
    known_records,
    plan_of,
    random_prompts,
)
from tests.tiers.stores.directory_medium import DirectoryMedium
from tests.tiers.stores.servers import Server, started, valkey

pytestmark = unless_changed(__name__, *TIERS)

LIVES = 4
"""Of caches on one store. The last one ends well."""
MANY = int(os.environ.get("QUIRE_KILLED_SEEDS", "200"))
"""Seeds of the long tests."""
FEW = len(MODELS)

Death = tuple[str, float]
ON_DIRECTORY, ON_SERVER = ("time", "open", "move", "write", "statement"), ("time", "move")


@pytest.fixture(scope="module")
def caches() -> Iterator[ForkServer]:
    started = ForkServer("tests.offload.killed_cache")
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


def url_in(folder: Path, timeout: float = 2.0) -> str:
    return f"unix://{folder}/valkey.sock?timeout={timeout}&pending=0.5"


class Stored:
    """What a store of a seed may hold: every record is one that a life has computed, in whole."""

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
                if tombstone_scope(entry.key) is not None:  # of a scope that was being forgotten
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
    assert sum(lives.storage_hits for lives in lived) > 0, "no life began on what a dead one had stored"
    assert sum(lives.reclaimed for lives in lived) > 0, "no life was killed while it wrote"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(FEW, FEW + MANY))
def test_killed_on_a_directory_in_many_ways(caches: ForkServer, tmp_path: Path, seed: int) -> None:
    Lives(caches, str(tmp_path / "store"), seed)


def test_killed_beside_a_living_one(caches: ForkServer, tmp_path: Path) -> None:
    """Two caches on one directory: one dies again and again, what the other one reads stays right."""
    url, seed = str(tmp_path / "store"), 1
    cache = ThreadedCache(open_killed(url), MODELS[seed])
    tiers = cache.tiers
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


Trouble = Callable[[RandomLife, Server, random.Random], None]


def check_troubled_server(folder: Path, seed: int, trouble: Trouble, *, timeout: float) -> int:
    """The server is away again and again while it is used; a server that dies comes back with all that it had or with
    nothing. Returns how often it was missed."""
    rng = random.Random(seed)
    server, url = server_in(folder, keeps=bool(seed % 2)), url_in(folder, timeout)
    store = open_store(url)
    policy = list(PrefetchPolicy)[(seed + 2) % len(PrefetchPolicy)]
    write, threads = rng.choice(list(WritePolicy)), rng.choice((1, 2, 4))
    cache = ThreadedCache(store, MODELS[seed % len(MODELS)], write=write, prefetch=policy, threads=threads)
    life = RandomLife(cache, random_prompts(seed), rng, lambda word: None)
    with server:
        for _ in range(3):
            life.steps(rng.randrange(60))
            trouble(life, server, rng)
        life.steps(60)
        life.end()
        tiers = cache.tiers
        assert tiers is not None
        give_up = time.monotonic() + 120
        while tiers.deletion.scopes:
            assert time.monotonic() < give_up, "a flush never comes to its end"
            time.sleep(0.02)
            cache.ahead.settle_moves()
        before = life.storage_hits
        life.store_all()
        assert life.read_back() > before or policy is not PrefetchPolicy.WAIT_COMPLETE, "it is not used any more"
        assert not tiers.counters.defects, "nothing was damaged"
        cache.close()
        Stored(url, seed).check(cache.generations)
    return sum(store.failures.values())  # type: ignore[attr-defined]


def killed(life: RandomLife, server: Server, rng: random.Random) -> None:
    """SIGKILL a moment after one of the next moves to or from the server was begun; after a while it is back."""
    left, delay, mover = rng.randrange(1, 12), rng.choice((0.0, 0.0003, 0.001)), life.cache.mover
    really = mover.submit

    def submit(move: Transfer) -> bool:
        nonlocal left
        left -= move.lane not in (Lane.SAVE, Lane.LOAD)
        taken = really(move)
        if left <= 0:
            time.sleep(delay)
            server.kill()
            del mover.submit
        return taken

    mover.submit = submit  # type: ignore[method-assign]
    while server.process is not None:
        life.steps(1)
    life.steps(rng.randrange(20, 80))
    server.start()


def hung(life: RandomLife, server: Server, rng: random.Random) -> None:
    """The server says nothing for longer than a client waits, and then does what it was told."""
    assert server.process is not None
    server.process.send_signal(signal.SIGSTOP)
    goes_on = threading.Timer(rng.uniform(0.1, 0.8), server.process.send_signal, (signal.SIGCONT,))
    goes_on.start()
    while goes_on.is_alive():
        life.steps(1)
    goes_on.join()


TROUBLES: dict[str, tuple[Trouble, float]] = {"killed": (killed, 2.0), "hung": (hung, 0.3)}
"""And how long an answer may take."""


@pytest.mark.parametrize(
    ("trouble", "seed"), [("killed", 0), pytest.param("killed", 1, marks=pytest.mark.slow), ("hung", 2)]
)
def test_a_server_that_is_away_for_a_while(trouble: str, seed: int, folder: Path) -> None:
    before = threading.active_count()
    act, timeout = TROUBLES[trouble]
    assert check_troubled_server(folder, seed, act, timeout=timeout) > 0, "no client noticed that the server was away"
    assert threading.active_count() <= before


@pytest.mark.slow
@pytest.mark.parametrize("trouble", TROUBLES)
@pytest.mark.parametrize("seed", range(3, 3 + MANY // 2))
def test_a_server_that_is_away_in_many_ways(trouble: str, seed: int, folder: Path) -> None:
    act, timeout = TROUBLES[trouble]
    check_troubled_server(folder, seed, act, timeout=timeout)
