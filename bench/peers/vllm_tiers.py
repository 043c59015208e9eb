"""Secondary tiers of vLLM beneath its own manager of tiers, without a model: bytes saved and loaded, and their cost.

    start   -> {"chunk_bytes", "chunks"}     make vLLM's primary tier, filled with noise, and one secondary tier
    save    -> {"seconds", "cpu_seconds"}    store all chunks, in jobs of a prompt's size
    load    -> the same                      load all of them into the primary tier
    lookup  -> {"first_ms", "again_ms"}      the time of the scheduler's thread for so many keys
    floor   -> {"read", "digest", "pass"}    CPU seconds for a GB of chunks: read around the page cache, digested, and
                                             read from memory once, without a digest
    stop    -> {}

Every answer is checked: a load that fails or gives another byte raises.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from bench.peers.worker import answer_requests
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec
from xxhash import xxh3_128_digest

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 1024,
    "intermediate_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 2048,
    "torch_dtype": "float16",
}
BLOCK, HEADS, HEAD_SIZE = 16, 8, 128
JOB = 64  # chunks of a prompt of 1,024 tokens
_SECONDS = 300.0


class Tiers:
    """One secondary tier at a time."""

    def __init__(self, _: str) -> None:
        self._jobs = 0

    def start(self, *, folder: str, tier: dict[str, Any], layers: int, chunks: int) -> dict[str, Any]:
        """The tier of a model with so many layers, 64 KiB of keys and values in each block of one."""
        import torch

        Path(folder, "config.json").write_text(json.dumps(_LLAMA | {"num_hidden_layers": layers}))
        names = [f"layer{i}" for i in range(layers)]
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype=torch.float16)
        extra = {"cpu_bytes_to_use": chunks * spec.page_size_bytes * layers, "secondary_tiers": [tier]}
        vllm_config = VllmConfig(  # under this name QuireTier finds it
            model_config=ModelConfig(model=folder, skip_tokenizer_init=True, dtype="float16", max_model_len=2048),
            cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
            scheduler_config=SchedulerConfig(max_model_len=2048, is_encoder_decoder=False, max_num_seqs=8),
            device_config=DeviceConfig(device="cpu"),
            kv_transfer_config=KVTransferConfig(
                kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=extra
            ),
        )
        caches = KVCacheConfig(num_blocks=chunks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(names, spec)])
        self._spec = TieringOffloadingSpec(build_offloading_config(vllm_config, caches))
        self._manager = self._spec.get_manager()
        self._tier = self._manager.secondary_tiers[0]
        self._rows = np.asarray(self._manager.primary_tier.get_kv_memoryview()).view(np.uint8)
        self._bytes = np.random.default_rng(20).integers(0, 256, self._rows.shape, dtype=np.uint8)
        self._rows[:] = self._bytes
        return {"chunk_bytes": self._rows.shape[1], "chunks": len(self._rows)}

    def save(self, turn: int) -> dict[str, Any]:
        """All chunks, under the keys of this turn."""
        self._rows[:] = self._bytes
        return self._timed(turn, is_load=False)

    def load(self, turn: int) -> dict[str, Any]:
        """All chunks of this turn, into rows of zeros."""
        self._rows[:] = 0
        found = self._timed(turn, is_load=True)
        assert np.array_equal(self._rows, self._bytes), "other bytes than were saved"
        return found

    def lookup(self, keys: int) -> dict[str, Any]:
        """The first lookup of so many keys, without the step's end, and one whose answers are there."""
        context, drawn = ReqContext(req_id=f"lookup-{self._jobs}"), random.Random(self._jobs)
        self._jobs += 1
        wanted = [make_offload_key(drawn.randbytes(32), 0) for _ in range(keys)]
        times = []
        for _ in range(2):
            began = time.perf_counter()
            answers = [self._tier.lookup(key, context) for key in wanted]
            self._tier.on_schedule_end(ScheduleEndContext((), ()))
            times.append(1e3 * (time.perf_counter() - began))
            while LookupResult.RETRY in answers:
                time.sleep(0.001)
                self._tier.on_schedule_end(ScheduleEndContext((), ()))
                answers = [self._tier.lookup(key, context) for key in wanted]
        assert set(answers) == {LookupResult.MISS}
        self._tier.on_request_finished(context)
        return {"first_ms": times[0], "again_ms": times[1]}

    def floor(self, folder: str) -> dict[str, Any]:
        """What a load cannot do without, one thread at a time."""
        chunk, words = self._rows.shape[1], self._rows.view(np.uint64)
        path = Path(folder, "floor")
        path.write_bytes(self._bytes.tobytes())
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            os.fsync(file)
            work: dict[str, Callable[[int], object]] = {
                "read": lambda at: os.preadv(file, [self._rows[at]], at * chunk),
                "digest": lambda at: xxh3_128_digest(self._rows[at]),
                "pass": lambda at: words[at].max(),
            }
            return {name: self._cpu_s_per_gb(each) for name, each in work.items()}
        finally:
            os.close(file)
            path.unlink()

    def _cpu_s_per_gb(self, each: Callable[[int], object]) -> float:
        times = []
        for _ in range(5):
            began = time.thread_time()
            for at in range(len(self._rows)):
                each(at)
            times.append(time.thread_time() - began)
        return statistics.median(times) / self._rows.nbytes * 1e9

    def stop(self) -> dict[str, Any]:
        """Close the tier and the primary one."""
        del self._rows
        self._manager.shutdown()
        return {}

    def _timed(self, turn: int, *, is_load: bool) -> dict[str, Any]:
        drawn = random.Random(turn)
        keys = [make_offload_key(drawn.randbytes(32), 0) for _ in range(len(self._rows))]
        tier, waiting = self._tier, set()
        submit = tier.submit_load if is_load else tier.submit_store
        cpu, began = time.process_time(), time.perf_counter()
        for start in range(0, len(keys), JOB):
            self._jobs += 1
            rows = np.arange(start, min(start + JOB, len(keys)), dtype=np.int32)
            job = TransferJob(self._jobs, keys[start : start + JOB], rows, is_load, ReqContext(req_id="bench"))
            waiting.add(job.job_id)
            submit(job)
        while waiting:
            assert time.perf_counter() < began + _SECONDS, "too slow"
            for result in list(tier.get_finished_jobs()):
                assert result.success, "a job failed"
                waiting.remove(result.job_id)
            time.sleep(0.001)
        return {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - cpu}


if __name__ == "__main__":
    os.environ["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"
    answer_requests(Tiers)
