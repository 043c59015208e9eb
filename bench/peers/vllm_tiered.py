"""A vLLM engine in a process of its own, which answers lines of JSON (`bench.peers.worker.answer_requests`).

Its engine core runs in the same process, so that tests reach its scheduler and its tiers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"  # answers have the other one

from bench.peers.worker import answer_requests
from prometheus_client import REGISTRY
from vllm import LLM, SamplingParams

from quire.testing.stores.wrapped_store import LIES, FaultyStore, SlowStore, WrappedStore
from quire.tiers.store import Record, Store
from quire.tiers.stores.registry import open_store, register_store


def _slow(url: str, capacity: int | None, *, counts_use: bool = True) -> Store:
    """slow://SECONDS/PATH: a directory whose calls wait."""
    seconds, _, path = url.removeprefix("slow://").partition("/")
    return SlowStore(open_store(f"/{path}", capacity=capacity, counts_use=counts_use), (float(seconds), float(seconds)))


def _faulty(url: str, capacity: int | None, *, counts_use: bool = True) -> Store:
    """faulty://PERCENT/PATH: a directory that takes and gives wrong bytes."""
    percent, _, path = url.removeprefix("faulty://").partition("/")
    inner = open_store(f"/{path}", capacity=capacity, counts_use=counts_use)
    return FaultyStore(inner, seed=1, kinds=LIES, percent=int(percent))


class _HangingStore(WrappedStore):
    """Reads and writes of records wait while there is a file beside the directory, `hangs`; lookups do not."""

    def __init__(self, inner: Store, hangs: Path) -> None:
        super().__init__(inner)
        self._hangs = hangs

    def before(self, records: Sequence[Record] = ()) -> None:
        while records and self._hangs.exists():
            time.sleep(0.01)


def _hanging(url: str, capacity: int | None, *, counts_use: bool = True) -> Store:
    """hanging:///PATH: a directory that hangs while PATH.hangs exists."""
    path = url.removeprefix("hanging://")
    return _HangingStore(open_store(path, capacity=capacity, counts_use=counts_use), Path(f"{path}.hangs"))


register_store("slow", _slow)
register_store("hanging", _hanging)
register_store("faulty", _faulty)


class VllmEngine:
    """One vLLM, with the secondary tiers of `start`."""

    def __init__(self, _: str) -> None:
        self._llm: Any = None

    def start(
        self,
        *,
        folder: str,
        tiers: list[dict[str, Any]],
        cpu_bytes: int = 32 << 20,
        on_device: bool = False,
        **more: Any,
    ) -> dict[str, Any]:
        """Load a model. `tiers` are vLLM's `secondary_tiers`; without any there is no offloading. With `on_device`
        vLLM copies by itself, which needs a device. `more` are settings of vLLM."""
        host = {"spec_name": "HostTieringSpec", "spec_module_path": "bench.peers.vllm_host"}
        extra: dict[str, Any] = {"spec_name": "TieringOffloadingSpec"} if on_device else host
        extra |= {"cpu_bytes_to_use": cpu_bytes, "secondary_tiers": tiers}
        transfer = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
        small = {"max_model_len": 512, "block_size": 32, "max_num_seqs": 8, "dtype": "float32", "enforce_eager": True}
        began = time.perf_counter()
        self._llm = LLM(
            folder,
            skip_tokenizer_init=True,
            enable_prefix_caching=True,
            disable_log_stats=False,
            kv_transfer_config=transfer if tiers else None,
            seed=0,
            **({} if on_device else small | {"kv_cache_memory_bytes": 64 << 20}) | more,
        )
        return {"seconds": time.perf_counter() - began}

    def run(self, prompts: list[list[int]], new: int) -> dict[str, Any]:
        """Greedy tokens, and how many tokens of each prompt were found somewhere."""
        began = time.perf_counter()
        outputs = self._llm.generate(_given(prompts), _greedy(new), use_tqdm=False)
        return {
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "ends": [output.outputs[0].finish_reason for output in outputs],
            "cached": [output.num_cached_tokens or 0 for output in outputs],
            "seconds": time.perf_counter() - began,
        }

    def abort(self, prompts: list[list[int]], steps: int) -> dict[str, Any]:
        """Begin requests and abort them after so many steps. Returns how many had no token by then."""
        engine, names = self._llm.llm_engine, [f"aborted-{i}" for i in range(len(prompts))]
        for name, prompt in zip(names, _given(prompts), strict=True):
            engine.add_request(name, prompt, _greedy(32))
        found = [output for _ in range(steps) for output in engine.step()]
        engine.abort_request(names)
        return {"without_token": len(names) - len({output.request_id for output in found})}

    def settle(self, seconds: float = 10.0) -> dict[str, Any]:
        """Step until the tiers have ended what they do. Returns whether they did in time."""
        engine, end = self._llm.llm_engine, time.monotonic() + seconds
        core = engine.engine_core.engine_core
        while core.scheduler.has_requests() and time.monotonic() < end:
            engine.step()  # which also hands the step's counters on
            time.sleep(0.001)
        return {"is_settled": not core.scheduler.has_requests()}

    def forget(self) -> dict[str, Any]:
        """Empty the device's cache and the primary tier; other tiers are as they were."""
        assert self.settle()["is_settled"]
        self._manager().primary_tier.reset_cache()
        return {"is_reset": self._llm.reset_prefix_cache()}

    def reset(self) -> dict[str, Any]:
        """Reset all caches, as vLLM does when weights change."""
        return {"is_reset": self._llm.reset_prefix_cache(reset_connector=True)}

    def metrics(self) -> dict[str, Any]:
        """vLLM's own counters of offloading, by name without their prefix, and labels."""
        found = {}
        for metric in REGISTRY.collect():
            if metric.name.startswith("vllm:kv_offload_") and metric.type == "counter":
                for sample in (sample for sample in metric.samples if sample.name.endswith("_total") and sample.value):
                    labels = [value for name, value in sample.labels.items() if name not in ("engine", "model_name")]
                    found[" ".join([metric.name.removeprefix("vllm:kv_offload_"), *labels])] = sample.value
        return found

    def preempted(self) -> dict[str, Any]:
        """How often a request was preempted."""
        return {"times": sum(each.value for each in self._llm.get_metrics() if each.name == "vllm:num_preemptions")}

    def stop(self) -> dict[str, Any]:
        """Close the engine, as a server does."""
        self._llm.llm_engine.engine_core.shutdown()
        self._llm = None
        return {}

    def _manager(self) -> Any:
        return self._llm.llm_engine.engine_core.engine_core.scheduler.connector.connector_scheduler.manager


def _given(prompts: list[list[int]]) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": prompt} for prompt in prompts]


def _greedy(new: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)


if __name__ == "__main__":
    answer_requests(VllmEngine)
