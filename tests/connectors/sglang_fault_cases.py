"""QuireHiCache inside SGLang's HiCache where something fails: bad records, stores that hang, other processes."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.peers.hicache_sglang import HiCache, Shape, fill, join

from quire.memory.record import HEADER_BYTES
from quire.testing.stores.dict_store import DictStore
from quire.testing.stores.wrapped_store import WrappedStore
from quire.tiers.store import Answer, Record, StoreKey
from quire.tiers.stores.directory import DirectoryStore
from quire.tiers.stores.registry import register_store
from tests.connectors.sglang_harness import (
    EXTRA,
    PAGES,
    TOKENS,
    fetch,
    fill_host,
    name_of,
    opened,
    pages_of,
    ranked,
    store,
    store_of,
)

TINY = Shape(layers=1, heads=1, head_dim=8, host_tokens=16 * 1024)
COUNT = 1000


class Troubled(WrappedStore):
    """Does not answer while `is_down`; waits in each call while `holds`."""

    def __init__(self) -> None:
        super().__init__(DictStore())
        self.records: dict[StoreKey, bytes] = self.inner.visible  # type: ignore[attr-defined]
        self.is_down = False
        self.holds = threading.Event()
        self.released = threading.Event()

    def before(self, records: Sequence[Record] = ()) -> None:
        if self.holds.is_set():
            self.released.wait(30)

    def exists(self, keys: Sequence[StoreKey]) -> list[Answer]:
        return [Answer.RETRY] * len(keys) if self.is_down else super().exists(keys)

    def prepare(self, keys: Sequence[StoreKey], sizes: Sequence[int]) -> list[Answer]:
        return [Answer.RETRY] * len(keys) if self.is_down else super().prepare(keys, sizes)

    def get(self, keys: Sequence[StoreKey], records: Sequence[Record]) -> list[Answer]:
        return [Answer.RETRY] * len(keys) if self.is_down else super().get(keys, records)

    def close(self) -> None:
        """It outlives its users."""


_TROUBLED: dict[str, Troubled] = {}


def _open_troubled(url: str, capacity: int | None = None, *, counts_use: bool = True) -> Troubled:
    return _TROUBLED.setdefault(url, Troubled())


@pytest.fixture
def troubled(extra: dict[str, Any]) -> Iterator[Troubled]:
    """The store of `extra`."""
    register_store("troubled", _open_troubled)
    extra["store"] = "troubled://here"
    yield _open_troubled(extra["store"])
    _TROUBLED.clear()


def other_scope(extra: dict[str, Any], keys: list[str], settings: dict[str, Any]) -> bytes:
    """The scope of another engine, which stored the same pages with its own bytes."""
    shape = replace(TINY, **settings.get("shape", {}))
    with closing(ranked(extra | settings.get("extra", {}), shape, **settings.get("ranks", {}))) as other:
        rows = other.cache.host.alloc(shape.page * COUNT)
        for start in range(0, COUNT, 100):
            chosen = slice(start, start + 100)
            assert all(other.batch_set_v1(keys[chosen], rows[16 * start : 16 * (start + 100)]))
        return bytes(other._pools["kv"].records.scope)


OTHERS: dict[str, dict[str, Any]] = {
    "weights": {"extra": {"weights": "two"}},
    "dtype": {"shape": {"dtype": torch.float16}},
    "layout": {"shape": {"layout": "page_first"}},
    "rank": {"ranks": {"tp_rank": 1, "tp_size": 2}},
}


@pytest.mark.parametrize("kind", ["digest", "magic", "length", "key", *OTHERS])
def test_a_thousand_bad_records(kind: str, extra: dict[str, Any], troubled: Troubled) -> None:
    """None is a hit, each is counted by its reason and is gone, and the page is stored again."""
    with closing(ranked(extra, TINY)) as backend:
        cache = backend.cache
        tokens = list(range(16 * COUNT))
        keys = cache.keys(tokens)
        rows, pages = fill_host(cache, tokens, 1)
        assert all(backend.batch_set_v1(keys, rows))
        names = [name_of(backend, key) for key in keys]
        scope = other_scope(extra, keys, OTHERS[kind]) if kind in OTHERS else b""
        for at, name in enumerate(names):
            record = bytearray(troubled.records[name])
            if kind == "digest":
                record[HEADER_BYTES + at % (len(record) - HEADER_BYTES)] ^= 1 << at % 8
            elif kind == "magic":
                record[at % 4] ^= 1 << at % 8
            elif kind == "length":
                del record[-1 - at % (len(record) - 1) :]
            elif kind == "key":
                record = bytearray(troubled.records[names[(at + 1) % COUNT]]) if at else record
            else:
                record = bytearray(troubled.records[name._replace(scope=scope)])
            troubled.records[name] = bytes(record)
        hits = [backend.batch_get_v1([key], rows[16 * at : 16 * at + 16])[0] for at, key in enumerate(keys)]
        good = 1 if kind == "key" else 0  # the first was left as it was
        assert sum(hits) == good
        assert backend._pools["kv"].records.bad[kind] == COUNT - good
        assert backend.batch_exists(keys) == good
        cache.host.free(rows)
        rows, pages = fill_host(cache, tokens, 2)
        assert all(backend.batch_set_v1(keys[good:], rows[16 * good :]))
        assert backend.batch_get_v1(keys, rows) == [True] * COUNT
        assert pages_of(cache, rows)[good:] == pages[good:]


def test_a_flipped_byte_in_its_own_backend_is_read_as_if_nothing_were(tmp_path: Path, monkeypatch: Any) -> None:
    """What the checks are for: SGLang's `file` backend, and ours beside it."""
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path / "files"))
    with closing(HiCache(Shape(), "file")) as cache:
        pages = store(cache)
        file = next(each for each in sorted((tmp_path / "files").iterdir()) if cache.keys(TOKENS)[3] in each.name)
        changed = bytearray(file.read_bytes())
        changed[100] ^= 1
        file.write_bytes(changed)
        found = fetch(cache)
        assert len(found) == PAGES and found[3] != pages[3]


def test_a_store_that_is_down_and_back(extra: dict[str, Any], troubled: Troubled) -> None:
    with opened(Shape(), extra) as cache:
        pages = store(cache)
        troubled.is_down = True
        began = time.monotonic()
        assert fetch(cache) == []
        rows, _ = fill_host(cache, [7, *TOKENS[1:]], 2)
        assert cache.back_up([7, *TOKENS[1:]], rows) == 0
        assert time.monotonic() - began < 2
        troubled.is_down = False
        assert fetched_in_time(cache) == pages


def fetched_in_time(cache: HiCache) -> list[bytes]:
    """What is found once the store is asked again."""
    until = time.monotonic() + 10
    while not (found := fetch(cache)):
        assert time.monotonic() < until
        time.sleep(0.05)
    return found


def test_a_store_that_hangs(extra: dict[str, Any], troubled: Troubled) -> None:
    """A lookup ends at its deadline, and so does a read: what comes later is written to no page."""
    with opened(Shape(), extra | {"deadline_s": 0.2}) as cache:
        pages = store(cache)
        keys, rows = cache.keys(TOKENS), cache.host.alloc(len(TOKENS))
        before = pages_of(cache, rows)
        troubled.holds.set()
        began = time.monotonic()
        assert cache.backend.batch_exists(keys) == 0
        assert cache.backend.batch_get_v1(keys, rows) == [False] * PAGES
        assert cache.backend.batch_set_v1(keys, rows) == [False] * PAGES
        assert 0.5 < time.monotonic() - began < 5
        troubled.holds.clear()
        troubled.released.set()
        kept = cache.backend._pools["kv"].records
        until = time.monotonic() + 10
        while any(threads.hang for threads in (kept._askers, kept._readers, kept._writers)):
            assert time.monotonic() < until
        assert pages_of(cache, rows) == before
        cache.host.free(rows)
        assert fetched_in_time(cache) == pages


def test_detaching_from_a_store_that_hangs(
    extra: dict[str, Any], troubled: Troubled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.connectors.checked_store.CLOSE_S", 0.2)
    monkeypatch.setattr("quire.connectors.sglang.hicache.CLOSE_S", 0.2)
    cache = HiCache(Shape(), "dynamic", extra | {"deadline_s": 0.2})
    troubled.holds.set()
    assert cache.backend.batch_exists(cache.keys(TOKENS)) == 0
    began = time.monotonic()
    cache.close()
    assert time.monotonic() - began < 5
    troubled.released.set()


def test_a_store_that_raises(extra: dict[str, Any], troubled: Troubled) -> None:
    """A store must not; then its answer is that it cannot say, and the threads live on."""
    with opened(Shape(), extra) as cache:
        pages, exists = store(cache), troubled.exists
        troubled.exists = None  # type: ignore[assignment,method-assign]
        assert [fetch(cache) for _ in range(6)] == [[]] * 6
        troubled.exists = exists  # type: ignore[method-assign]
        assert fetched_in_time(cache) == pages


def test_what_another_process_stores_now_does_not_end_a_backup(extra: dict[str, Any]) -> None:
    with opened(Shape(), extra) as cache, closing(DirectoryStore(extra["store"], None)) as other:
        keys = [name_of(cache.backend, key) for key in cache.keys(TOKENS)[3:5]]
        size = cache.backend._pools["kv"].pages.payload_bytes + HEADER_BYTES
        assert other.prepare(keys, [size] * 2) == [Answer.MISS] * 2
        pages = store(cache)
        assert fetch(cache) == pages[:3]
        other.complete(keys, [False] * 2)
        assert store(cache) == pages == fetch(cache)


def test_a_store_without_room(extra: dict[str, Any]) -> None:
    """One that holds no page is refused at start; one that is too small for all holds some."""
    with pytest.raises(Exception, match="takes none above 4,096"):
        HiCache(Shape(), "dynamic", extra | {"store_size": "4KiB"})
    with opened(Shape(), extra | {"store_size": "100KiB"}) as cache:
        store(cache, must=False)
        assert 0 < cache.backend.batch_exists(cache.keys(TOKENS)) < PAGES


def test_with_failures_injected_nothing_is_wrong_or_lost(
    extra: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's own injector, at 0.3."""
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.3")
    kept: dict[int, list[bytes]] = {}
    lengths = set()
    with opened(Shape(), extra) as cache:
        for first in range(60):
            tokens = [first, *TOKENS[1:]]
            rows, pages = fill_host(cache, tokens, first)
            if cache.back_up(tokens, rows):
                kept[first] = pages
            cache.host.kv_buffer.zero_()
            cache.host.free(rows)
            found = fetch(cache, tokens)
            lengths.add(len(found))
            assert found == pages[: len(found)]
        assert cache.host.available_size() == cache.host.size
    assert lengths == {0, PAGES} and 25 < len(kept) < 60
    monkeypatch.delenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE")
    with opened(Shape(), extra) as cache:
        for first, pages in kept.items():
            assert fetch(cache, [first, *TOKENS[1:]]) == pages


def test_threads_at_once(extra: dict[str, Any]) -> None:
    shape = Shape(host_tokens=8192)
    with closing(ranked(extra, shape)) as backend:
        cache, failed = backend.cache, []

        def work(number: int) -> None:
            tokens = [number, *TOKENS[1:]]
            keys, rows = cache.keys(tokens), cache.host.alloc(len(tokens))
            wanted = pages_of(cache, rows)
            for _ in range(10):
                backend.batch_set_v1(keys, rows)
                back = cache.host.alloc(len(tokens))
                found = backend.batch_get_v1(keys, back)
                if not all(found) or pages_of(cache, back) != wanted:
                    failed.append(number)
                cache.host.free(back)

        fill(cache.host.kv_buffer.reshape(-1), slice(None), 3)
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failed == []


def run_process(folder: str, seed: int) -> str:
    """One of several processes: it stores prompts, and compares what comes back. Returns how many pages came, and how
    many were wrong, in a store with room for all prompts, and in one for a third of them."""
    counts = []
    order = random.Random(seed)
    for room in ("64MiB", "2MiB"):
        found = wrong = 0
        with opened(Shape(), {**EXTRA, "store": f"{folder}/{room}", "store_size": room}) as cache:
            for _ in range(120):
                number = order.randrange(40)
                store(cache, [number, *TOKENS[1:]], number, must=False)
                number = order.randrange(40)
                rows, pages = fill_host(cache, [number, *TOKENS[1:]], number)
                cache.host.kv_buffer.zero_()
                cache.host.free(rows)
                back = fetch(cache, [number, *TOKENS[1:]])
                found += len(back)
                wrong += sum(one != other for one, other in zip(back, pages, strict=False))
        counts += [found, wrong]
    return " ".join(map(str, counts))


def run_rank(folder: str, rank: int) -> str:
    """One of two ranks of tensor parallelism. Returns whether its bytes were right, and how many pages both loaded: of
    20, after one has lost a page, and 30 times while calls fail at random."""
    join(rank, 2, torch.distributed.FileStore(f"{folder}/meet", 2))
    extra = {**EXTRA, "store": f"{folder}/store"}
    with opened(Shape(), extra, tp_rank=rank, tp_size=2) as cache:
        pages = store(cache, TOKENS, rank)
        torch.distributed.barrier()
        found = [fetch(cache)]
        if rank == 1:
            assert store_of(cache.backend).remove([name_of(cache.backend, cache.keys(TOKENS)[7])]) == 1
        torch.distributed.barrier()
        found.append(fetch(cache))
        torch.distributed.barrier()
        store(cache, TOKENS, rank)
        torch.distributed.barrier()
    os.environ["SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE"] = "0.3"
    os.environ["SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY"] = "0.01"
    with opened(Shape(), extra, tp_rank=rank, tp_size=2) as cache:
        found += [fetch(cache) for _ in range(30)]
        torch.distributed.barrier()
    is_right = all(each == pages[: len(each)] for each in found)
    return " ".join(map(str, [is_right, *map(len, found)]))


def test_ranks_agree_on_what_they_load(tmp_path: Path) -> None:
    said = processes("run_rank", [[str(tmp_path), rank] for rank in (0, 1)])
    assert said[0] == said[1]
    is_right, *lengths = said[0].split()
    assert is_right == "True" and lengths[:2] == ["20", "7"]
    assert set(lengths[2:]) == {"0", "20"}


def processes(function: str, arguments: Sequence[Sequence[Any]]) -> list[str]:
    """What a function of this module returns, in a process of its own for each row of arguments, all at once."""
    code = f"import json, sys; from {__name__} import {function} as run; print(run(*json.loads(sys.argv[1])))"
    command = [sys.executable, "-W", "ignore", "-c", code]
    started = [subprocess.Popen([*command, json.dumps(row)], stdout=subprocess.PIPE, text=True) for row in arguments]
    said = [process.communicate(timeout=120)[0].strip() for process in started]
    assert [process.returncode for process in started] == [0] * len(started)
    return said


def test_processes_on_one_directory(tmp_path: Path) -> None:
    """With room for all prompts, and then for a third of them."""
    for said in processes("run_process", [[str(tmp_path), seed] for seed in (1, 2)]):
        roomy, wrong, tight, wrong_too = map(int, said.split())
        assert (wrong, wrong_too) == (0, 0)
        assert roomy > tight > 100
