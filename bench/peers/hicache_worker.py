"""Backends of SGLang's HiCache in one process: pages from its host pool to a store and back, timed.

    open    -> {}                                       a controller and its pools on a backend
    sample  -> {row: {"seconds", "cpu_s", "bytes"}}     save, load, load again, load what the page cache does not have

CPU seconds are those of all threads of this process. The caller compares backends and prints.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench.peers.hicache_sglang import HiCache, Shape, fill
from bench.peers.worker import answer_requests
from xxhash import xxh3_128

EXTRA = {"backend_name": "quire", "module_path": "quire.connectors.sglang", "class_name": "QuireHiCache"}


class HiCacheWorker:
    """Holds one cache for each name."""

    def __init__(self, _: str) -> None:
        self._caches: dict[str, tuple[HiCache, Path]] = {}

    def open(self, name: str, folder: str, extra: dict[str, Any] | None, shape: dict[str, Any]) -> dict[str, Any]:
        """Open a backend in a folder: SGLang's `file` one without `extra`."""
        os.environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = folder
        backend = "file" if extra is None else "dynamic"
        given = {} if extra is None else EXTRA | {"store": folder, "weights": "bench", "deadline_s": 60} | extra
        cache = HiCache(Shape(**shape), backend, given)
        fill(cache.host.kv_buffer.reshape(-1), slice(None), 0)
        self._caches[name] = cache, Path(folder)
        return {}

    def sample(self, name: str, turn: int, pages: int, one_by_one: bool) -> dict[str, Any]:
        """A new prompt of so many pages, saved and loaded, in calls of one page if `one_by_one`."""
        cache, folder = self._caches[name]
        tokens = [turn, *range(cache.shape.page * pages - 1)]
        keys, rows = cache.keys(tokens), cache.host.alloc(len(tokens))
        fill(cache.host.kv_buffer.reshape(-1).view(torch.int64), slice(None, 4096), turn)
        kept = _digest(cache, rows)
        found = {"save": _timed(lambda: cache.back_up(tokens, rows))}
        assert found["save"].pop("value") == len(tokens), "not all was saved"
        for row in ("load", "load again", "load from disk"):
            _clear(cache, rows)
            cache.host.free(rows)
            if row == "load from disk":
                _forget_pages(folder)
            found[row] = _timed(lambda: cache.fetch(tokens))
            rows = found[row].pop("value")
            assert len(rows) == len(tokens) and _digest(cache, rows) == kept, "other bytes came back"
        if one_by_one:
            size = cache.shape.page
            each = [(keys[at : at + 1], rows[at * size : (at + 1) * size]) for at in range(pages)]
            found["load one by one"] = _timed(lambda: [cache.backend.batch_get_v1(*one) for one in each])
            assert found["load one by one"].pop("value") == [[True]] * pages
        cache.host.free(rows)
        cache.backend.clear()
        return found

    def close(self, name: str) -> dict[str, Any]:
        """Detach a backend."""
        self._caches.pop(name)[0].close()
        return {}


def _timed(work: Callable[[], Any]) -> dict[str, Any]:
    began, cpu = time.perf_counter(), time.process_time()
    value = work()
    return {"value": value, "seconds": time.perf_counter() - began, "cpu_s": time.process_time() - cpu}


def _digest(cache: HiCache, rows: Any) -> str:
    digest = xxh3_128()
    for row in rows[:: cache.shape.page].tolist():
        digest.update(cache.host.get_data_page(row).view(torch.uint8).numpy())
    return digest.hexdigest()


def _clear(cache: HiCache, rows: Any) -> None:
    """Zeros in these pages, so that nothing is found there by chance."""
    page = cache.host.get_dummy_flat_data_page()
    for row in rows[:: cache.shape.page].tolist():
        cache.host.set_from_flat_data_page(row, page)


def _forget_pages(folder: Path) -> None:
    """Write files back, and drop them from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


if __name__ == "__main__":
    answer_requests(HiCacheWorker)
