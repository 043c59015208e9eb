"""The row of a whole `LLM` in its process: CPU time of a decode step, of all threads."""

from __future__ import annotations

import time

from engines import Engine
from metadata_worker import Operation
from workloads import Sizes, tokens

VOCABULARY = 512
CONTEXT = 512


def llm_steps(engine: Engine, sizes: Sizes, folder: str) -> Operation:
    """`running` requests of some tokens, with one token out, then other ones with `llm_steps` more: a step is a part of
    the difference, so prompts and what a call costs by itself are not in it."""
    engine.start(
        folder=folder, dtype="float32", threads=1, kv_bytes=2**28, max_model_len=CONTEXT, max_requests=sizes.running
    )
    turn = 0
    yield {}
    while True:
        spent = []
        for new in (1, 1 + sizes.llm_steps):
            turn += 1
            prompts = [(tokens(sizes.llm_prompt, "llm", turn, i) % VOCABULARY).tolist() for i in range(sizes.running)]
            cpu, wall = time.process_time(), time.perf_counter()
            found = engine.run(prompts, new)
            spent.append((time.process_time() - cpu, time.perf_counter() - wall))
        taken = [(after - before) * 1e6 / sizes.llm_steps for before, after in zip(*spent, strict=True)]
        yield {"cpu": taken[0], "wall": taken[1], "tokens": sum(map(len, found))}
