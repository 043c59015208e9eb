"""What the cases inside SGLang share: prompts, pages with known bytes, and backends of one rank."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.peers.hicache_sglang import HiCache, Shape
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

from quire.connectors.sglang import QuireHiCache
from quire.tiers.store import Store, StoreKey

TOKENS = list(range(320))
PAGES = len(TOKENS) // 16
EXTRA = {
    "backend_name": "quire",
    "module_path": "quire.connectors.sglang",
    "class_name": "QuireHiCache",
    "interface_v1": 1,
    "store_size": "64MiB",
    "weights": "one",
    "deadline_s": 5,
}


@pytest.fixture
def extra(tmp_path: Path) -> dict[str, Any]:
    return {**EXTRA, "store": str(tmp_path / "store")}


def opened(shape: Shape, extra: dict[str, Any], **more: Any) -> Any:
    """A controller with our backend, detached at the end of the block."""
    return closing(HiCache(shape, "dynamic", extra, **more))


def fill_host(cache: HiCache, tokens: list[int], seed: int) -> tuple[Any, list[bytes]]:
    """Rows of the host pool for a prompt, with bytes that follow from the seed, and the bytes of its pages."""
    rows = cache.host.alloc(len(tokens))
    empty = cache.host.get_dummy_flat_data_page()
    pages = [random.Random(f"{seed} {at}").randbytes(empty.nbytes) for at in range(len(tokens) // cache.shape.page)]
    for row, page in zip(rows[:: cache.shape.page].tolist(), pages, strict=True):
        cache.host.set_from_flat_data_page(row, torch.frombuffer(bytearray(page), dtype=empty.dtype))
    return rows, pages


def pages_of(cache: HiCache, rows: Any) -> list[bytes]:
    starts = rows[:: cache.shape.page].tolist()
    return [cache.host.get_data_page(at).view(torch.uint8).numpy().tobytes() for at in starts]


def store(cache: HiCache, tokens: list[int] = TOKENS, seed: int = 1, *, must: bool = True) -> list[bytes]:
    """Pages of the host pool go to the store, all of them if they `must`; the pool is cleared."""
    rows, pages = fill_host(cache, tokens, seed)
    assert cache.back_up(tokens, rows) == len(tokens) or not must
    cache.host.kv_buffer.zero_()
    cache.host.free(rows)
    return pages


def fetch(cache: HiCache, tokens: list[int] = TOKENS) -> list[bytes]:
    """What comes back into the host pool."""
    rows = cache.fetch(tokens)
    pages = pages_of(cache, rows)
    cache.host.kv_buffer.zero_()
    cache.host.free(rows)
    return pages


def config(**more: Any) -> HiCacheStorageConfig:
    """What a controller hands to a backend."""
    fields: dict[str, Any] = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": False,
        "model_name": "toy",
    }
    return HiCacheStorageConfig(**(fields | more))


def ranked(extra: dict[str, Any], shape: Shape, **ranks: Any) -> QuireHiCache:
    """A backend of one rank, with a pool of its own."""
    backend = QuireHiCache(config(extra_config=extra, is_mla_model=shape.is_latent, **ranks), {})
    cache = HiCache(shape, None)
    backend.register_mem_pool_host(cache.host)
    backend.cache = cache
    return backend


def name_of(backend: Any, key: str, pool: str = "kv") -> StoreKey:
    """The key of a page's record in the store."""
    return StoreKey(backend._pools[pool].records.scope, bytes.fromhex(key), 0)


def store_of(backend: Any) -> Store:
    """The backend's own store, to change records in."""
    found: Store = backend._store
    return found
