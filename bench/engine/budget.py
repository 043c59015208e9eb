"""Where the time of a token goes for one client: CPU microseconds of each stage, beside what the machine's reads leave.

    python -m bench.engine.budget                              both dtypes, half a minute each
    python -m bench.engine.budget --dtype bfloat16 --json FILE
    python -m bench.engine.budget --toy                        few tokens; fails if nothing of the model was timed

The engine runs in this process, with one request of the bundled model and one thread. Each stage is the time of its
own calls without that of stages inside, from the thread's clock, less what reading the clock takes. The way to the
client is that of `bench.serving.output_path`. The *limit* is what reading all weights and the keys and values of the
context takes at the rate at which this thread reads an array of that size again and again, since such a model stays in
the processor's cache; and at the rate of reads of what no cache holds. Where all layers are one call, products are
those of the output layer.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from bench.engine.machine_limit import rates
from bench.harness import machine, new_parser, save

from quire.cache import KVCache
from quire.client.llm import LLM
from quire.engine.core import EngineCore
from quire.engine.device.runner import ModelRunner
from quire.engine.device.sampler import Readback, Sampler
from quire.kernels.hidden_states import NativeRows
from quire.kernels.native.attention import NativeAttention
from quire.kernels.native.decoder import NativeLayers
from quire.loop.loop import Loop
from quire.models.hf import LoadedModel
from quire.models.linear import Product
from quire.scheduler.sampling_params import SamplingParams
from quire.scheduler.scheduler import Scheduler

CONTEXT, TOKENS, REPEATS = 600, 200, 3
STAGES: dict[str, list[tuple[type, str]]] = {
    "engine and its parts": [(EngineCore, "step"), (Loop, "step")],
    "schedule": [(Scheduler, "schedule")],
    "launch": [(ModelRunner, "launch")],
    "batches of the step": [(ModelRunner, "_batches")],
    "model: embedding, angles, last norm": [(LoadedModel, "run")],
    "model: all layers in one call": [(NativeLayers, "compute")],
    "model: products": [(Product, "compute")],
    "model: functions on rows": [(NativeRows, name) for name in ("add_rms_norm", "rotate", "gated_silu")],
    "model: attention": [(NativeAttention, "pages")],
    "sample": [(Sampler, "prepare"), (Sampler, "draw"), (Readback, "wait")],
    "settle": [(Loop, "_settle"), (Scheduler, "settle"), (KVCache, "commit"), (KVCache, "close_fence")],
}


class Stages:
    """The time of the calls inside each stage, without that of stages inside them."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self._open: list[float] = []
        self._clock_s = 0.0
        self._clock_s = self._cost()

    def _cost(self) -> float:
        """What a stage adds to that around it."""
        timed = self.wrapped("clock", lambda: None)
        began = time.thread_time()
        for _ in range(2000):
            timed()
        return (time.thread_time() - began) / 2000

    def wrapped(self, stage: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, whose own time is added to the stage."""

        def timed(*args: Any, **given: Any) -> Any:
            self._open.append(0.0)
            began = time.thread_time()
            try:
                return call(*args, **given)
            finally:
                took = time.thread_time() - began
                self.spent[stage] += took - self._open.pop()
                if self._open:
                    self._open[-1] += took + self._clock_s

        return timed

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Inside the block all stages are timed."""
        real = {(kind, name): getattr(kind, name) for each in STAGES.values() for kind, name in each}
        for stage, methods in STAGES.items():
            for kind, name in methods:
                setattr(kind, name, self.wrapped(stage, real[kind, name]))
        try:
            yield
        finally:
            for (kind, name), call in real.items():
                setattr(kind, name, call)


def engine_budget(dtype: str, tokens: int, repeats: int) -> dict[str, Any]:
    """CPU microseconds of a token by stage, and of whole tokens without the clocks, medians of repeats; and what a
    token reads."""
    stages: dict[str, list[float]] = defaultdict(list)
    whole: list[float] = []
    prompt = [(7 * at) % 2000 + 8 for at in range(CONTEXT)]
    few, many = (SamplingParams(max_tokens=count, temperature=0, ignore_eos=True) for count in (1, tokens + 1))
    with LLM(dtype=dtype, threads=1, kv_memory="64MiB", show_plan=False) as llm:
        for repeat in range(repeats + 1):
            timed = Stages()
            with timed.measured():
                llm.generate([prompt], few)
                before, timed.spent = timed.spent, defaultdict(float)
                llm.generate([prompt], many)
            marks = [time.thread_time()]
            for params in (few, many):
                llm.generate([prompt], params)
                marks.append(time.thread_time())
            if repeat:  # what the first one loads does not count
                for stage in STAGES:
                    stages[stage].append((timed.spent[stage] - before[stage]) / tokens * 1e6)
                whole.append((marks[2] - 2 * marks[1] + marks[0]) / tokens * 1e6)
        found = llm.statistics()
    return {
        "stages": {stage: statistics.median(values) for stage, values in stages.items()},
        "whole": statistics.median(whole),
        "bytes": found["forward"]["packed_bytes"] + int(found["bytes_per_token"]) * (CONTEXT + tokens // 2),
    }


def cached_rate(num_bytes: int) -> float:
    """Bytes per second of one thread that reads an array of this size again and again, at best."""
    array, best = torch.ones(num_bytes // 4), float("inf")
    for _ in range(200):
        began = time.thread_time()
        array.sum()
        best = min(best, time.thread_time() - began)
    return num_bytes / best


def way_out(*, toy: bool) -> dict[str, Any]:
    """The row of one client of `bench.serving.output_path`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        options = ["--toy"] if toy else []
        command = [sys.executable, "-m", "bench.serving.output_path", "--only", "1 row", "--json", str(path), *options]
        subprocess.run(command, check=True, capture_output=True)
        row: dict[str, Any] = json.loads(path.read_text())["rows"][0]
    return row


def table(result: dict[str, Any]) -> str:
    """The result in Markdown."""
    dtypes, out = list(result["engines"]), result["way_out"]
    lines = [f"| CPU us of a token | {' | '.join(dtypes)} |", "|---|" + "---|" * len(dtypes)]

    def add(name: str, values: Sequence[float]) -> None:
        lines.append(f"| {name} | {' | '.join(f'{value:,.0f}' for value in values)} |")

    engines = [result["engines"][dtype] for dtype in dtypes]
    for stage in STAGES:
        add(stage, [each["stages"][stage] for each in engines])
    add("the engine without clocks: all of these", [each["whole"] for each in engines])
    add("engine's process: encode, send", [out["engine_us"]] * len(dtypes))
    add("server: receive, text, event, write", [out["front_us"]] * len(dtypes))
    add("all", [each["whole"] + out["total_us"] for each in engines])
    add("limit, from the cache", [each["bytes"] / each["cached_rate"] * 1e6 for each in engines])
    add("limit, from memory", [each["bytes"] / each["memory_rate"] * 1e6 for each in engines])
    add("bytes that a token reads", [each["bytes"] for each in engines])
    add("GB/s from the cache", [each["cached_rate"] / 1e9 for each in engines])
    add("GB/s from memory", [each["memory_rate"] / 1e9 for each in engines])
    return "\n".join(lines)


def main() -> int:
    """Measure, show and write; 1 if a stage has no time."""
    parser = new_parser(__doc__.splitlines()[0], toy="few tokens; exits 1 if nothing of the model was timed")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="one of the two")
    options = parser.parse_args()
    tokens, repeats = (8, 1) if options.toy else (TOKENS, REPEATS)
    torch.set_num_threads(1)
    engines: dict[str, Any] = {}
    for dtype in [options.dtype] if options.dtype else ["float32", "bfloat16"]:
        found = engines[dtype] = engine_budget(dtype, tokens, repeats)
        found["cached_rate"] = cached_rate(found["bytes"])
        found["memory_rate"] = found["cached_rate"] if options.toy else rates(dtype, 1)["bytes"]
    result = {**machine(), "context": CONTEXT, "engines": engines, "way_out": way_out(toy=options.toy)}
    print(table(result))
    save(options.json, result)
    return 0 if all(found["stages"]["model: products"] > 0 for found in engines.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
