"""The row of a whole `LLM` in its process: CPU time of a decode step, of all threads."""

from __future__ import annotations

import time
from pathlib import Path

from bench.bookkeeping.workloads import Sizes, tokens
from bench.engine.compare import Shape, save_model
from bench.peers.engine import Engine
from bench.peers.metadata_worker import Operation

CONTEXT = 512
MODEL = Shape(hidden=128, layers=2, heads=4, kv_heads=2, intermediate=128, vocab=512, shared=CONTEXT // 2)


def llm_steps(engine: Engine, sizes: Sizes, folder: str) -> Operation:
    """`running` requests with one token out, then other ones with `llm_steps` more: a step is a part of the difference,
    so prompts and what a call costs by itself are not in it. The model is in `folder`, or is written there."""
    if not Path(folder).exists():
        save_model(MODEL, Path(folder))
    engine.start(
        folder=folder, dtype="float32", threads=1, kv_bytes=2**28, max_model_len=CONTEXT, max_requests=sizes.running
    )
    turn = 0
    yield {}
    while True:
        spent = []
        for new in (1, 1 + sizes.llm_steps):
            turn += 1
            prompts = [(tokens(sizes.llm_prompt, "llm", turn, i) % MODEL.vocab).tolist() for i in range(sizes.running)]
            cpu, wall = time.process_time(), time.perf_counter()
            found = engine.run(prompts, new)
            spent.append((time.process_time() - cpu, time.perf_counter() - wall))
        taken = [(after - before) * 1e6 / sizes.llm_steps for before, after in zip(*spent, strict=True)]
        yield {"cpu": taken[0], "wall": taken[1], "tokens": sum(map(len, found))}
