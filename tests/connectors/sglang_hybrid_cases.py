"""QuireHiCache inside SGLang's HiCache with the pools of hybrid models: windows, states, and pools without bytes."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
from bench.peers.hicache_sglang import HiCache, Shape, fill
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool
from sglang.srt.mem_cache.pool_host import mha
from sglang.srt.mem_cache.pool_host.group import HostPoolGroup, PoolEntry
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost

from quire.connectors.sglang import QuireHiCache
from quire.connectors.sglang.pool_pages import PoolPages
from tests.connectors.sglang_harness import (
    PAGES,
    TOKENS,
    config,
    fill_host,
    name_of,
    pages_of,
    ranked,
    store_of,
)

LAYOUTS = ["layer_first", "page_first", "page_first_direct"]


def states(layout: str = "page_first", slots: int = 32) -> Any:
    """A host pool of linear layers' states, of two element types."""
    temporal = torch.zeros((3, slots, 2, 8), dtype=torch.float32)
    info = MambaStateBufferInfo(temporal=temporal, conv=(torch.zeros((3, slots, 4, 3), dtype=torch.bfloat16),))
    pool = MambaPoolHost(info, 2.0, 0, device_capacity=slots, pin_memory=False, layout=layout)
    for buffer in pool.kv_buffer:
        buffer.zero_()
    return pool


def fill_states(pool: Any, seed: int) -> None:
    for buffer in pool.kv_buffer:
        fill(buffer.reshape(-1), slice(None), seed)


def bytes_at(pool: Any, rows: list[int]) -> list[bytes]:
    return [pool.get_data_page(row).view(torch.uint8).numpy().tobytes() for row in rows]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_pool_of_a_hybrid_model_comes_back(layout: str, extra: dict[str, Any]) -> None:
    with closing(ranked(extra, Shape(layout=layout))) as backend:
        window, state = HiCache(Shape(layout=layout, layers=2), None), states()
        backend.register_mem_host_pool_v2(window.host, PoolName.SWA)
        backend.register_mem_host_pool_v2(state, PoolName.MAMBA)
        keys = backend.cache.keys(TOKENS)
        _, kept = fill_host(window, TOKENS[:64], 3)
        fill_states(state, 4)
        window_rows = torch.arange(64)
        kept_states = bytes_at(state, [5, 9])
        both = [
            PoolTransfer(PoolName.SWA, host_indices=window_rows, keys=keys[-4:]),
            PoolTransfer(PoolName.MAMBA, host_indices=torch.tensor([5, 9]), keys=[keys[9], keys[19]]),
        ]
        assert backend.batch_set_v2(both) == {PoolName.SWA: [True] * 4, PoolName.MAMBA: [True] * 2}
        window.host.kv_buffer.zero_()
        for buffer in state.kv_buffer:
            buffer.zero_()
        back = [
            PoolTransfer(PoolName.SWA, host_indices=window_rows + 64, keys=keys[-4:]),
            PoolTransfer(PoolName.MAMBA, host_indices=torch.tensor([2, 1]), keys=[keys[9], keys[19]]),
        ]
        assert backend.batch_get_v2(back) == {PoolName.SWA: [True] * 4, PoolName.MAMBA: [True] * 2}
        assert pages_of(window, window_rows + 64) == kept
        assert bytes_at(state, [2, 1]) == kept_states
        assert backend.batch_exists(keys) == 0  # a pool's pages are not another's
        short = PoolTransfer(PoolName.SWA, host_indices=window_rows[:7], keys=keys[-4:])
        unknown = PoolTransfer(PoolName.INDEXER, host_indices=window_rows, keys=keys[-4:])
        assert backend.batch_get_v2([short, unknown]) == {PoolName.SWA: [False] * 4, PoolName.INDEXER: [False] * 4}


def test_states_with_more_state_beside_them_are_copied(extra: dict[str, Any]) -> None:
    """SGLang names no pieces of such a pool."""
    with closing(ranked(extra, Shape())) as backend:
        pool = states()
        pool.slot_state_device_tensors = [torch.zeros(32, 5)]
        pool.slot_state_buffers = [torch.zeros(pool.size, 5)]
        pool.size_per_token = (
            pool.get_size_per_token() + 20 if pool.get_size_per_token() % 20 else pool.get_size_per_token()
        )
        pool.kv_buffer.append(pool.slot_state_buffers[0])
        fill_states(pool, 4)
        page = bytes_at(pool, [5])
        pool.size_per_token = len(page[0])
        backend.register_mem_host_pool_v2(pool, PoolName.MAMBA)
        key = backend.cache.keys(TOKENS)[:1]
        assert backend.batch_set_v2([PoolTransfer(PoolName.MAMBA, host_indices=torch.tensor([5]), keys=key)])[
            "mamba"
        ] == [True]
        fill_states(pool, 5)
        assert backend.batch_get_v2([PoolTransfer(PoolName.MAMBA, host_indices=torch.tensor([7]), keys=key)])[
            "mamba"
        ] == [True]
        assert bytes_at(pool, [7]) == page


def test_states_are_of_their_rank_where_keys_and_values_are_shared(extra: dict[str, Any]) -> None:
    latent = Shape(is_latent=True)
    found = {}
    for rank in (0, 1):
        with closing(ranked(extra, latent, tp_rank=rank, tp_size=2)) as backend:
            backend.register_mem_host_pool_v2(states(), PoolName.MAMBA)
            found[rank] = {name: pool.records.scope for name, pool in backend._pools.items()}
    assert found[0]["kv"] == found[1]["kv"] and found[0]["mamba"] != found[1]["mamba"]


@pytest.mark.parametrize("interface", [0, 1])
def test_pages_without_bytes_say_that_they_exist(interface: int, extra: dict[str, Any]) -> None:
    with closing(QuireHiCache(config(extra_config=extra, is_mla_model=True), {})) as backend:
        pool = LogicalHostPool(1024, 16)
        backend.register_mem_pool_host(pool)
        keys, rows = HiCache(Shape(), None).keys(TOKENS), pool.alloc(len(TOKENS))
        if interface:
            assert backend.batch_set_v1(keys, rows) == [True] * PAGES == backend.batch_get_v1(keys, rows)
        else:
            assert backend.batch_set(keys, [pool.get_data_page(0) for _ in keys])
            assert None not in backend.batch_get(keys, [pool.get_dummy_flat_data_page() for _ in keys])
        assert backend.batch_exists(keys) == PAGES


def test_hits_of_pools_are_those_of_its_own_backend(
    extra: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same pages in SGLang's `file` backend, and the same questions, by random draws."""
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path / "files"))
    draw = random.Random(1)
    shape = Shape(layers=1, heads=1, head_dim=8)
    seen = set()
    with closing(ranked(extra, shape)) as ours:
        theirs = HiCacheFile(config(extra_config={}))
        pools = {PoolName.SWA: HiCache(shape, None).host, PoolName.MAMBA: states()}
        theirs.register_mem_host_pool_v2(ours.cache.host, PoolName.KV)
        for name, pool in pools.items():
            ours.register_mem_host_pool_v2(pool, name)
            theirs.register_mem_host_pool_v2(pool, name)
        for turn in range(60):
            length = draw.randint(1, 12)
            keys = ours.cache.keys([turn, *range(16 * length - 1)])
            for name, rate in ((PoolName.KV, 0.95), (PoolName.SWA, 0.8), (PoolName.MAMBA, 0.5)):
                some = [key for key in keys if draw.random() < rate]
                size = 16 if name != PoolName.MAMBA else 1
                write = [PoolTransfer(name, host_indices=torch.arange(len(some) * size) % (16 * size), keys=some)]
                assert all(ours.batch_set_v2(write)[name]) and all(theirs.batch_set_v2(write)[name])
            for _ in range(10):
                asked = [
                    PoolTransfer(name, keys=keys[: draw.randint(0, 3)], hit_policy=draw.choice(list(PoolHitPolicy)[:2]))
                    for name in draw.sample(list(pools), draw.randint(0, 2))
                ]
                one, other = ours.batch_exists_v2(keys, asked), theirs.batch_exists_v2(keys, asked)
                assert (one.kv_hit_pages, one.restorable_prefix_pages) == (
                    other.kv_hit_pages,
                    other.restorable_prefix_pages,
                )
                reported = other.extra_pool_hit_pages
                assert {name: one.extra_pool_hit_pages.get(name) for name in reported} == reported
                seen.add(
                    (
                        one.kv_hit_pages == length,
                        one.kv_hit_pages == 0,
                        tuple(one.restorable_prefix_pages) == tuple(range(1, one.kv_hit_pages + 1)),
                    )
                )
    assert len(seen) >= 4


def test_whole_groups_are_a_verdict_of_their_own(extra: dict[str, Any]) -> None:
    with closing(ranked(extra, Shape())) as backend:
        backend.register_mem_host_pool_v2(HiCache(Shape(), None).host, PoolName.SWA)
        keys = backend.cache.keys(TOKENS)
        rows = torch.arange(len(TOKENS))
        assert all(backend.batch_set_v1(keys, rows))
        groups = keys[:10]  # five groups of two keys, each for four pages
        asked = PoolTransfer(
            PoolName.SWA, keys=groups, hit_policy=PoolHitPolicy.BLOCK_GROUPS, block_pages=4, group_pages=2
        )
        for there, pages in ((0, 0), (1, 0), (2, 4), (5, 8), (10, 20)):
            some = PoolTransfer(PoolName.SWA, keys=groups[:there], host_indices=rows[: 16 * there])
            assert all(backend.batch_set_v2([some])[PoolName.SWA])
            found = backend.batch_exists_v2(keys, [asked])
            assert found.kv_hit_pages == PAGES and found.extra_pool_hit_pages.get(PoolName.SWA, 0) == pages


def hybrid(extra: dict[str, Any], layout: str) -> Any:
    """Its controller of hybrid models, with a pool of keys and values, one of a window and one of states."""
    cache, window, state = HiCache(Shape(layout=layout), None), HiCache(Shape(layout=layout, layers=2), None), states()
    entries = [
        PoolEntry(PoolName.KV, cache.host, cache.device, lambda layer: layer, is_primary_index_anchor=True),
        PoolEntry(PoolName.SWA, window.host, window.device, lambda layer: layer),
        PoolEntry(PoolName.MAMBA, state, None, lambda layer: layer),
    ]
    cache.controller = HybridCacheController(
        cache.allocator,
        HostPoolGroup(entries),
        16,
        torch.distributed.group.WORLD,
        Event(),
        write_policy="write_through",
        io_backend="direct",
        storage_backend="dynamic",
        prefetch_threshold=16,
        model_name="toy",
        storage_backend_extra_config=dict(extra),
    )
    return cache, window, state


@pytest.mark.parametrize("layout", LAYOUTS)
def test_its_controller_of_hybrid_models(layout: str, extra: dict[str, Any]) -> None:
    """A prompt of 20 pages, whose window is the last 4, with a state at pages 10 and 20."""
    cache, window, state = hybrid(extra, layout)
    with closing(cache):
        rows, kept = fill_host(cache, TOKENS, 1)
        window_rows, kept_window = fill_host(window, TOKENS[:64], 2)
        fill_states(state, 3)
        keys = cache.keys(TOKENS)
        kept_states = bytes_at(state, [0, 1])
        trailing = PoolHitPolicy.TRAILING_PAGES
        for stop, slot in ((10, 0), (20, 1)):
            some = [
                PoolTransfer(PoolName.SWA, host_indices=window_rows, keys=keys[stop - 4 : stop], hit_policy=trailing),
                PoolTransfer(
                    PoolName.MAMBA, host_indices=torch.tensor([slot]), keys=[keys[stop - 1]], hit_policy=trailing
                ),
            ]
            cache.controller.write_storage(rows[: 16 * stop], TOKENS[: 16 * stop], keys[:stop], extra_pools=some)
            assert cache.controller.ack_backup_queue.get(timeout=60).completed_tokens == 16 * stop
        for pool in (cache.host, window.host):
            pool.kv_buffer.zero_()
        for stop, slot in ((20, 1), (10, 0)):  # the second time, the state at page 20 is lost
            target = cache.host.alloc(len(TOKENS))
            asked = [
                PoolTransfer(PoolName.SWA, host_indices=torch.arange(64) + 128, keys=keys[16:], hit_policy=trailing),
                PoolTransfer(PoolName.MAMBA, host_indices=torch.tensor([9]), keys=keys[19:], hit_policy=trailing),
            ]
            operation = cache.controller.prefetch(CacheRequestHandle("request", 0), TOKENS, extra_pools=asked)
            assert cache.controller.prefetch_hit_queue.get(timeout=60) is operation
            assert operation.storage_hit_count == 16 * stop
            operation.host_indices = target[: 16 * stop]
            cache.controller.prefetch_buffer.put(operation)
            hits: dict[str, int] = {}
            while not (ack := cache.controller.ack_prefetch_queue.get(timeout=60)).completed_req:
                hits = ack.pool_hits or hits
                arrived = ack.completed_tokens or 16 * stop
            assert arrived == 16 * stop and (hits["swa"], hits["mamba"]) == (4, 1)
            assert pages_of(cache, target[: 16 * stop]) == kept[:stop]
            assert pages_of(window, torch.arange(64) + 128) == kept_window
            assert bytes_at(state, [9]) == kept_states[slot : slot + 1]
            assert store_of(cache.backend).remove([name_of(cache.backend, keys[stop - 1], "mamba")]) == 1
            cache.host.kv_buffer.zero_()
            cache.host.free(target)


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
def test_keys_and_values_of_other_widths(layout: str, extra: dict[str, Any]) -> None:
    """Its pool of them has two tensors, and no flat pages."""
    device = MHATokenToKVPool(256, 16, torch.bfloat16, 2, 16, 3, "cpu", False, v_head_dim=8)
    (info,) = device.get_device_pool_infos()
    kind = mha.get_mha_host_pool_cls(info.buffer_info)
    pool = kind(
        *(info.buffer_info, 0.0, 0, 16, layout),
        pin_memory=False,
        device_capacity_tokens=256,
        start_layer=0,
        end_layer=3,
        host_token_capacity=512,
    )
    assert isinstance(pool.kv_buffer, tuple)
    with closing(QuireHiCache(config(extra_config=extra), {})) as backend:
        backend.register_mem_pool_host(pool)
        for at, buffer in enumerate(pool.kv_buffer):
            fill(buffer.reshape(-1), slice(None), at)
        kept = [buffer.view(torch.uint8).clone() for buffer in pool.kv_buffer]
        keys, rows = HiCache(Shape(), None).keys(TOKENS), torch.arange(320)
        assert backend.batch_set_v1(keys, rows) == [True] * PAGES
        for buffer in pool.kv_buffer:
            buffer[: 320 if layout == "page_first" else PAGES] = 0
        assert backend.batch_get_v1(keys, rows) == [True] * PAGES
        assert all(map(torch.equal, kept, [buffer.view(torch.uint8) for buffer in pool.kv_buffer]))


def test_pieces_of_several_tensors_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an index beside latents: addresses differ from process to process, and the order in a record must not."""
    pool = HiCache(Shape(layout="page_first", is_latent=True), None).host
    others = sorted((torch.zeros(pool.size, 8) for _ in range(3)), key=torch.Tensor.data_ptr)
    own = pool.get_page_buffer_meta

    def pieces(indices: Any) -> tuple[list[int], list[int]]:
        addresses, sizes = own(indices)
        more = [other[int(indices[0])].data_ptr() for other in reversed(others)]
        return [more[0], *addresses, *more[1:]], [512, *sizes, 512, 512]

    monkeypatch.setattr(pool, "get_page_buffer_meta", pieces)
    for at, other in enumerate(reversed(others)):
        other.fill_(at + 1)
    found = PoolPages(pool, "kv").outgoing(16)
    assert [len(piece) for piece in found] == [512, pool.get_data_page(0).nbytes, 512, 512]
    assert [np.frombuffer(found[at], np.float32)[0] for at in (0, 2, 3)] == [1, 2, 3]
