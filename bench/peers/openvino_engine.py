"""OpenVINO GenAI's pipeline with continuous batching and paged attention, behind the calls of `engines.py`."""

from __future__ import annotations

from pathlib import Path

from bench.peers.engine import Engine, token_bytes

_BLOCK = 32
"""Tokens of a block on a CPU."""


class OpenVino(Engine):
    """The model is written as OpenVINO's, in float32; the plugin computes in the type that is asked for.

    Keys and values have that type too: the default, 8 bits, is other work. Prefix caching is on, as in all engines.
    It counts no tokens that it found in its cache.
    """

    package = "openvino_genai"

    def start(
        self, *, folder: str, dtype: str, threads: int, kv_bytes: int, max_model_len: int, max_requests: int
    ) -> None:
        """Write the model beside `folder`, once for all types, and load it."""
        import openvino_genai
        from bench.peers.openvino_model import write

        written = Path(folder).with_name("openvino")
        if not written.exists():
            write(Path(folder), written)
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.num_kv_blocks = kv_bytes // (token_bytes(Path(folder), dtype) * _BLOCK)
        scheduler.enable_prefix_caching = True
        scheduler.max_num_seqs = max_requests
        kind = {"float32": "f32", "bfloat16": "bf16"}[dtype]
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            str(written),
            scheduler,
            "CPU",
            {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": kind, "KV_CACHE_PRECISION": kind},
        )

    def run(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        """One `generate` call."""
        import numpy as np
        import openvino
        import openvino_genai

        config = openvino_genai.GenerationConfig(max_new_tokens=new, ignore_eos=True, do_sample=False)
        ids = [openvino.Tensor(np.array([prompt], np.int64)) for prompt in prompts]
        return [list(found.m_generation_ids[0]) for found in self._pipeline.generate(ids, [config] * len(ids))]
