"""SGLang's HiCache on the CPU: its controller, its threads, its pools, host pools and paged allocator.

Their own classes run. Ours are the parallel context, which a server publishes, and three copies between pools, which
are kernels of a package that needs a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Event
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from bench.peers import sglang_stubs  # noqa: F401
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host import mha, mla
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.runtime_context import get_parallel

torch.set_num_threads(1)


def copy_rows(
    src_layers: Sequence[Any], dst_layers: Sequence[Any], src_indices: Any, dst_indices: Any, page_size: int
) -> None:
    """Rows of one list of tensors to another's."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def copy_to_pages(
    src_ptrs: Sequence[Any], dst_ptrs: Sequence[Any], src_indices: Any, dst_indices: Any, page_size: int
) -> None:
    """Rows of every layer to pages `[page, layer, row, ...]` of K and V, or of the only one."""
    layers = len(src_ptrs) // len(dst_ptrs)
    pages, rows = dst_indices // page_size, dst_indices % page_size
    for at, source in enumerate(src_ptrs):
        dst_ptrs[at // layers][pages, at % layers, rows] = source[src_indices]


def copy_from_pages(
    src_ptrs: Sequence[Any], dst_ptrs: Sequence[Any], src_indices: Any, dst_indices: Any, layer_id: int, page_size: int
) -> None:
    """The inverse, of one layer."""
    pages, rows = src_indices // page_size, src_indices % page_size
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[dst_indices] = source[pages, layer_id, rows]


def publish(**ranks: int) -> None:
    """The parallel context of one rank, and the copies."""
    fields = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_dcp_size": 1,
        "attn_dcp_rank": 0,
        "attn_dp_size": 1,
    }
    get_parallel().override_permanently(**(fields | ranks))
    for module in (mha, mla):
        module.transfer_kv_direct = copy_rows
        module.transfer_kv_all_layer_direct_lf_pf = copy_to_pages
        module.transfer_kv_per_layer_direct_pf_lf = copy_from_pages
    if not torch.distributed.is_initialized():
        join(0, 1, torch.distributed.HashStore())


def join(rank: int, size: int, store: Any) -> None:
    """Be one of so many processes, which meet in a store of torch's."""
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)


def fill(buffer: Any, indices: Any, seed: int) -> None:
    """Random bytes in rows of a tensor."""
    rows = buffer[indices]
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (rows.numel() * rows.element_size(),), dtype=torch.uint8, generator=generator)
    buffer[indices] = raw.view(rows.dtype).view(rows.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Pools of a model: bytes depend on all but the last two."""

    layout: str = "page_first_direct"
    is_latent: bool = False
    dtype: torch.dtype = torch.bfloat16
    page: int = 16
    layers: int = 4
    heads: int = 2
    head_dim: int = 16
    device_tokens: int = 1024
    host_tokens: int = 2048


class HiCache:
    """A controller and its pools. `model` names the model as a server's path does; `extra` is the backend's JSON."""

    def __init__(
        self,
        shape: Shape,
        backend: str | None,
        extra: dict[str, Any] | None = None,
        *,
        model: str = "toy",
        **ranks: int,
    ) -> None:
        publish(**ranks)
        self.shape = shape
        self.device: Any
        self.host: Any
        if shape.is_latent:
            self.device = MLATokenToKVPool(
                shape.device_tokens,
                shape.page,
                shape.dtype,
                3 * shape.head_dim,
                shape.head_dim,
                shape.layers,
                "cpu",
                False,
            )
        else:
            self.device = MHATokenToKVPool(
                shape.device_tokens, shape.page, shape.dtype, shape.heads, shape.head_dim, shape.layers, "cpu", False
            )
        self.host = self.host_pool()
        self.allocator = PagedTokenToKVPoolAllocator(
            shape.device_tokens, shape.page, shape.dtype, "cpu", self.device, False
        )
        self.controller = HiCacheController(
            self.allocator,
            self.host,
            shape.page,
            torch.distributed.group.WORLD,
            Event(),
            write_policy="write_through",
            io_backend="direct",
            storage_backend=backend,
            prefetch_threshold=shape.page,
            model_name=model,
            storage_backend_extra_config=dict(extra or {}),
        )

    def host_pool(self) -> Any:
        """A host pool of this shape, filled with zeros."""
        shape = self.shape
        common = {
            "host_to_device_ratio": 0.0,
            "host_size": 0,
            "page_size": shape.page,
            "layout": shape.layout,
            "pin_memory": False,
            "device_capacity_tokens": shape.device_tokens,
            "start_layer": 0,
            "end_layer": shape.layers,
            "host_token_capacity": shape.host_tokens,
        }
        (info,) = self.device.get_device_pool_infos()
        if shape.is_latent:
            pool = mla.MLATokenToKVPoolHost(info.buffer_info, target_layer_num=shape.layers, **common)
        else:
            pool = mha.MHATokenToKVPoolHost(info.buffer_info, **common)
        pool.kv_buffer.zero_()
        return pool

    @property
    def backend(self) -> Any:
        return self.controller.storage_backend

    def buffers(self) -> list[Any]:
        """The tensors of the device pool, one per layer and kind."""
        return list(self.device.kv_buffer) if self.shape.is_latent else [*self.device.k_buffer, *self.device.v_buffer]

    def rows(self, indices: Any) -> bytes:
        """Bytes of these rows in every layer."""
        return b"".join(buffer[indices].contiguous().view(torch.uint8).numpy().tobytes() for buffer in self.buffers())

    def keys(self, tokens: Sequence[int]) -> list[str]:
        """SGLang's keys of a prompt's pages."""
        found: list[str] = get_storage_hash_str(list(tokens), None, page_size=self.shape.page)
        return found

    def back_up(self, tokens: Sequence[int], host: Any) -> int:
        """Write a prompt's pages from the host pool to the store; returns how many tokens of them it took."""
        self.controller.write_storage(host, list(tokens), self.keys(tokens))
        return int(self.controller.ack_backup_queue.get(timeout=60).completed_tokens)

    def fetch(self, tokens: Sequence[int]) -> Any:
        """Prefetch a prompt as its scheduler does; returns the rows in the host pool of what arrived, for `free`."""
        controller = self.controller
        operation = controller.prefetch("request", list(tokens))
        assert controller.prefetch_hit_queue.get(timeout=60) is operation
        operation.host_indices = self.host.alloc(operation.storage_hit_count)
        controller.prefetch_buffer.put(operation)
        arrived = 0
        while not (ack := controller.ack_prefetch_queue.get(timeout=60)).completed_req:
            arrived = ack.completed_tokens
        self.host.free(operation.host_indices[arrived:])
        return operation.host_indices[:arrived]

    def store(self, tokens: Sequence[int], seed: int) -> tuple[int, bytes]:
        """Random rows of a prompt go from the device to the host and the store. Returns how many of them it took, and
        all their bytes."""
        device = self.allocator.alloc(len(tokens))
        for buffer in self.buffers():
            fill(buffer, device, seed)
            seed += 1
        host = self.controller.write(device)
        taken, rows = self.back_up(tokens, host), self.rows(device)
        self.release(device, host)
        return taken, rows

    def restore(self, tokens: Sequence[int]) -> tuple[int, bytes]:
        """What a prefetch brings to the device: tokens, and the bytes of their rows."""
        host = self.fetch(tokens)
        if not len(host):
            return 0, b""
        device = self.controller.load(host)
        self.controller.start_loading()
        rows = self.rows(device)
        self.release(device, host)
        return len(host), rows

    def release(self, device: Any, host: Any) -> None:
        """Free rows, and clear all, so that nothing is found there by chance."""
        for buffer in self.buffers():
            buffer[device] = 0
        self.host.kv_buffer.zero_()
        self.allocator.free(device)
        self.host.free(host)

    def close(self) -> None:
        """Detach the backend."""
        self.controller.detach_storage_backend()
