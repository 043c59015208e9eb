"""HostTieringSpec: vLLM's tiering where the "device" is host memory, so that all but the device's copies is vLLM's own.

vLLM gives workers of its offloading to devices alone. This one copies pages with numpy, in the call that orders it.
Runs in vLLM's process.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class HostTieringSpec(TieringOffloadingSpec):
    """`spec_name` "HostTieringSpec", `spec_module_path` this module."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            self._worker = _HostWorker(kv_caches, self)
        return self._worker


class _HostWorker(OffloadingWorker):
    def __init__(self, caches: CanonicalKVCaches, spec: HostTieringSpec) -> None:
        self._blocks_per_chunk = spec.blocks_per_chunk
        facts = vars(spec)
        self._region = SharedOffloadRegion(
            spec.config.engine_id,
            facts.get("num_chunks") or facts["num_blocks"],  # the name in 0.29
            spec.config.parallel.rank,
            spec.kv_bytes_per_chunk,
            spec.cpu_page_size_per_worker,
        )
        self._device = [each.tensor.numpy() for each in caches.tensors]
        self._host = [
            self._region.create_next_worker_view(each.page_size_bytes * self._blocks_per_chunk).numpy()
            for each in caches.tensors
        ]
        self._groups = [[(ref.tensor_idx, ref.page_size_bytes) for ref in refs] for refs in caches.group_data_refs]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: Any) -> bool:
        for device, host in self._pages(src_spec, dst_spec.block_ids):
            host[:] = device
        self._finished.append(TransferResult(job_id, success=True))
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: GPULoadStoreSpec) -> bool:
        for device, host in self._pages(dst_spec, src_spec.block_ids):
            device[:] = host
        self._finished.append(TransferResult(job_id, success=True))
        return True

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Copies are complete when they are submitted."""

    def shutdown(self) -> None:
        self._host.clear()
        self._region.cleanup()

    def _pages(self, spec: GPULoadStoreSpec, chunks: Any) -> Iterator[tuple[Any, Any]]:
        """Each page on the device with its place in the chunks; a request's first chunk may begin within."""
        blocks, chunk_at, block_at, each = spec.block_ids, 0, 0, self._blocks_per_chunk
        for refs, size, first in zip(self._groups, spec.group_sizes, spec.block_indices, strict=True):
            for number in range(size):
                chunk, within = divmod(first % each + number, each)
                for tensor, page_bytes in refs:
                    start = within * self._device[tensor].shape[1]
                    host = self._host[tensor][chunks[chunk_at + chunk]]
                    yield self._device[tensor][blocks[block_at + number], :page_bytes], host[start : start + page_bytes]
            block_at += size
            chunk_at += -(-(first % each + size) // each)
        assert chunk_at == len(chunks) and block_at == len(blocks), "chunks and blocks of another request"
