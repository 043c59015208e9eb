"""The speed of a store and its disk: bytes a second of batches, and seconds of one record alone."""

from __future__ import annotations

import mmap
import os
import secrets
import shutil
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quire.errors import StoreError
from quire.tiers.store import Answer, Store, StoreKey
from quire.tiers.stores.directory import DirectoryStore

_BLOCK = 4096
_ALONE = 30
_MEMORY = 16 << 20


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Of records of `record_bytes`: bytes a second in batches, and the median seconds of one record on its own."""

    record_bytes: int
    num_records: int
    put_bytes_per_second: float
    get_bytes_per_second: float
    put_seconds: float
    get_seconds: float


def measure_store(store: Store, record_bytes: int, total_bytes: int, batch: int) -> Bandwidth:
    """Write new records in batches, read them in another order, and remove them.

    A put is prepare, put and complete. The records lie on block boundaries of memory, as a host pool's do. Raises
    StoreError where the store does not take or return them.
    """
    count = max(batch, total_bytes // record_bytes)
    scope = secrets.token_bytes(16)
    keys = [StoreKey(scope, number.to_bytes(32, "little"), 0) for number in range(count + _ALONE)]
    order = np.random.default_rng(0).permutation(count).tolist()
    rows = _rows(batch, record_bytes)

    def put(some: Sequence[StoreKey]) -> None:
        done = store.prepare(some, [record_bytes] * len(some)) == [Answer.MISS] * len(some)
        done = done and store.put(some, rows[: len(some)]) == [Answer.HIT] * len(some)
        if not store.complete(some, [done] * len(some)) == [Answer.HIT] * len(some):
            raise StoreError(f"the store does not take {len(some)} records of {record_bytes} bytes.")

    def get(some: Sequence[StoreKey]) -> None:
        if store.get(some, rows[: len(some)]) != [Answer.HIT] * len(some):
            raise StoreError(f"the store does not return records of {record_bytes} bytes, just written.")

    try:
        put_seconds = sum(_times(put, [keys[at : at + batch] for at in range(0, count, batch)]))
        shuffled = [keys[number] for number in order]
        get_seconds = sum(_times(get, [shuffled[at : at + batch] for at in range(0, count, batch)]))
        put_alone, get_alone = (statistics.median(_times(move, [[key] for key in keys[count:]])) for move in (put, get))
    finally:
        store.remove(keys)
    moved = count * record_bytes
    return Bandwidth(record_bytes, count, moved / put_seconds, moved / get_seconds, put_alone, get_alone)


def measure_disk(folder: Path, record_bytes: int, total_bytes: int, threads: int, *, direct: bool) -> Bandwidth:
    """The same with plain reads and writes of one file, in whole blocks, by so many threads. Raises StoreError."""
    size = -(-record_bytes // _BLOCK) * _BLOCK
    count = max(threads, total_bytes // size)
    path = folder / f"quire-bench-{secrets.token_hex(4)}"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | (getattr(os, "O_DIRECT", 0) if direct else 0)
    order = np.random.default_rng(0).permutation(count).tolist()
    try:
        file = os.open(path, flags, 0o600)
        try:
            os.posix_fallocate(file, 0, count * size)
            num_rows = max(threads, _MEMORY // size)  # as much as a batch takes: few rows would stay in the CPU's cache
            rows = _rows(num_rows, size)
            with ThreadPoolExecutor(threads) as pool:

                def run(move: Callable[[int, list[memoryview], int], int], numbers: Sequence[int]) -> float:
                    def work(thread: int) -> None:
                        for at in range(thread, count, threads):
                            move(file, [rows[at % num_rows]], numbers[at] * size)

                    list(pool.map(bool, range(threads)))  # its threads are there
                    started = time.perf_counter()
                    list(pool.map(work, range(threads)))
                    return time.perf_counter() - started

                put_seconds, get_seconds = run(os.pwritev, range(count)), run(os.preadv, order)
                one, some = rows[:1], range(min(count, _ALONE))
                put_alone = statistics.median(_times(lambda n: os.pwritev(file, one, n * size), some))
                get_alone = statistics.median(_times(lambda n: os.preadv(file, one, n * size), some))
        finally:
            os.close(file)
    except OSError as error:
        raise StoreError(f"the disk under '{folder}' cannot be measured: {error}.") from error
    finally:
        path.unlink(missing_ok=True)
    moved = count * size
    return Bandwidth(size, count, moved / put_seconds, moved / get_seconds, put_alone, get_alone)


def _rows(count: int, num_bytes: int) -> list[memoryview]:
    """Rows of random bytes, each on a block boundary."""
    stride = -(-num_bytes // _BLOCK) * _BLOCK
    view = memoryview(mmap.mmap(-1, count * stride))
    some = np.random.default_rng(0).bytes(min(count * stride, 8 << 20))
    for at in range(0, count * stride, len(some)):
        view[at : at + len(some)] = some[: count * stride - at]
    return [view[row * stride : row * stride + num_bytes] for row in range(count)]


def _times(step: Callable[..., object], each: Iterable[object]) -> list[float]:
    """The seconds of each call."""
    times = []
    for item in each:
        started = time.perf_counter()
        step(item)
        times.append(time.perf_counter() - started)
    return times


def measure_directory(
    folder: Path, record_bytes: int, total_bytes: int, batch: int, threads: int, *, direct: bool
) -> Bandwidth:
    """A directory store made for this inside `folder`, and removed. Raises StoreError."""
    path = folder / f"quire-bench-{secrets.token_hex(4)}"
    capacity = 2 * total_bytes + 4 * (batch + _ALONE) * (record_bytes + _BLOCK)
    try:
        with closing(DirectoryStore(path, capacity, threads=threads, direct=direct)) as store:
            return measure_store(store, record_bytes, total_bytes, batch)
    finally:
        shutil.rmtree(path, ignore_errors=True)
