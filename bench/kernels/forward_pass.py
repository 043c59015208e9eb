"""Times forward passes of the bundled model with plain weights, packed ones, and fused layers: decision 044.

    python -m bench.kernels.forward_pass --threads 1
    python -m bench.kernels.forward_pass --toy            few repeats; fails if the logits differ

Ways take turns in short bursts, and the shortest burst of each counts. With one thread it is CPU time, so that other
programs disturb less. `plain` is transformers' code on plain weights, `packed` the same code on packed ones, `layers`
fused layers with transformers' code around them, `decoder` those without it, and `one call` what a model runs by
default.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.kernels.batch import PagedBatch
from quire.memory.pool import Pool
from quire.models.decoder_layer import FusedLayer
from quire.models.forward import RunningForward
from quire.models.hf import LoadedModel, load_model
from quire.spec.bundled import DEFAULT_MODEL

PAGE, CONTEXT = 16, 256
STEPS = ((1, 1), (16, 1), (64, 1), (1, 100), (16, 16), (1, 256))
"""Sequences, and the last tokens of each that a step computes."""
WAYS = ("plain", "packed", "layers", "decoder", "one call")
BURSTS, REPEATS = 25, 4


@dataclass(frozen=True, slots=True)
class Step:
    """Inputs of `LoadedModel.run`."""

    tokens: Tensor
    positions: Tensor
    batch: PagedBatch
    pool: Pool
    rows: Tensor

    @classmethod
    def of(cls, model: LoadedModel, sequences: int, count: int) -> Step:
        """The last `count` tokens of `sequences` of `CONTEXT` tokens, on pages in a random order."""
        pages = sequences * CONTEXT // PAGE
        frames = np.random.default_rng(0).permutation(pages).astype(np.int32).reshape(sequences, -1) + 1
        stops = np.full(sequences, CONTEXT)
        (group,) = model.spec.groups(PAGE)
        pool = Pool(group.layout, pages)
        for _, tensor in pool.tensors:
            tensor.normal_()
        draw = torch.Generator().manual_seed(0)
        return cls(
            tokens=torch.randint(0, model.spec.vocab_size, (sequences * count,), generator=draw),
            positions=torch.arange(CONTEXT - count, CONTEXT).repeat(sequences),
            batch=PagedBatch.of(frames, stops - count, stops, PAGE),
            pool=pool,
            rows=torch.arange(1, sequences + 1) * count - 1,
        )

    def run(self, model: LoadedModel) -> Tensor:
        """The logits of the last row of each sequence."""
        return model.run(RunningForward([self.pool], [self.batch]), self.tokens, self.positions, self.rows)


def loaded(way: str, dtype: str) -> LoadedModel:
    """The bundled model, which computes in one of the ways."""
    model = load_model(DEFAULT_MODEL, dtype=dtype, pack=way != "plain")
    if way == "decoder" and model._decoder is not None:
        model._decoder.native.is_on = False
    elif way != "one call":
        model._decoder = None
    for layer in model.module.modules():
        fused: Any = layer.__dict__.get("forward")
        if way == "packed" and isinstance(fused, FusedLayer):
            layer.__dict__["forward"] = fused.own
    return model


def microseconds(
    runs: dict[str, Callable[[], Tensor]], bursts: int, repeats: int, clock: Callable[[], float]
) -> dict[str, float]:
    """Of one pass, at best."""
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(bursts + 1):
        for way, run in runs.items():
            began = clock()
            for _ in range(repeats):
                run()
            best[way] = min(best[way], (clock() - began) / repeats * 1e6)
    return best


def main() -> None:
    """Measure and print a table in Markdown, in microseconds."""
    parser = argparse.ArgumentParser(description="Time forward passes of the bundled model.")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--toy", action="store_true", help="few repeats, float32 only")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    bursts, repeats = (1, 1) if options.toy else (BURSTS, REPEATS)
    print(f"| dtype | sequences | tokens of each | {' | '.join(WAYS)} |\n|{'---|' * (3 + len(WAYS))}")
    for dtype in ("float32",) if options.toy else ("float32", "bfloat16"):
        models = {way: loaded(way, dtype) for way in WAYS}
        for sequences, count in STEPS:
            step = Step.of(models["plain"], sequences, count)
            logits = {way: step.run(model) for way, model in models.items()}
            most = max(float((found - logits["plain"]).abs().max()) for found in logits.values())
            if most > {"float32": 1e-3, "bfloat16": 1.0}[dtype]:
                raise SystemExit(f"logits differ by {most:.2g}")
            found = microseconds(
                {way: partial(step.run, model) for way, model in models.items()}, bursts, repeats, clock
            )
            cells = " | ".join(f"{found[way]:,.0f}" for way in WAYS)
            print(f"| {dtype} | {sequences} | {count} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
