#!/usr/bin/env python
"""HiSparse: what hot buffers cost and what they bring.

    python -m bench.sparse.hisparse                            all of it, some minutes
    python -m bench.sparse.hisparse --json RESULT.json --selections bench/results/selections-dsa-0.7.npz
    python -m bench.sparse.hisparse --toy                      small sizes, in seconds; CI runs it

- `bookkeeping`: CPU microseconds of `HotSlots.swap_in` per request and index, one thread.
- `hit_rates`: of hot buffers, beside Belady's optimum, on synthetic and recorded selections (`dsa_model.py`
  trains a model for these, `bench/sparse/record_selections.py` records them).
- `capacity`: requests of a context of 8 buffers in the same bytes of device memory, planned.
- `engine`: a small random model on this machine, contexts of 8 buffers, latents on the device and in host memory.
- `offered`: the same at fixed bytes of device memory and rising numbers of offered requests, one thread: how many run
  at once, and output tokens per second. `break_even`: from how many on hot buffers are faster, measured and planned.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench.harness import new_parser, save
from bench.sparse.drawn import drifting_selections, lru_hits
from bench.sparse.dsa_model import build

from quire.cli.planned_model import planned_model
from quire.client.llm import LLM
from quire.counters import plain
from quire.plan.hisparse import HiSparseCosts, hisparse_costs, hisparse_gain
from quire.plan.plan import Plan
from quire.plan.planner import make_plan
from quire.plan.settings import PlanSettings
from quire.scheduler.sampling_params import SamplingParams
from quire.sim.selections import Selections, optimal_hits
from quire.sparse.hot_slots import HotSlots
from quire.spec.hisparse import HiSparseConfig

MODEL = "deepseek-ai/DeepSeek-V3.2"


def bookkeeping(*, toy: bool) -> Iterator[dict[str, Any]]:
    """Microseconds of a call per request and index, without the first calls, which fill the buffers."""
    top_k, context, steps = (64, 1024, 12) if toy else (2048, 32768, 40)
    for drift in (0.95, 0.99):
        for batch in (1, 4) if toy else (1, 16, 64):
            found = drifting_selections(drift, context=context, top_k=top_k, steps=steps, num_requests=batch)
            hot, times = HotSlots(1, batch, 2 * top_k), []
            for call in found.calls():
                newest = call.newest.astype(np.int64)
                began = time.thread_time_ns()
                hot.swap_in(0, call.request, call.positions, newest)
                times.append((time.thread_time_ns() - began) / 1000 / batch)
            times = times[steps // 4 :]
            yield {
                "drift": drift, "batch": batch, "top_k": top_k, "buffer": 2 * top_k, "context": context,
                "swapped_per_call": hot.swapped_tokens / batch / steps,
                "us": {"min": min(times), "median": statistics.median(times), "mean": statistics.fmean(times)},
            }  # fmt: skip


def hit_rates(recorded: Path | None, *, toy: bool) -> Iterator[dict[str, Any]]:
    """LRU beside the optimum."""
    context, top_k, steps = (512, 32, 30) if toy else (4096, 256, 120)
    sources: dict[str, Selections] = {
        f"drift {drift}": drifting_selections(drift, context=context, top_k=top_k, steps=steps)
        for drift in (0.8, 0.95, 0.99)
    }
    if recorded is not None:
        sources[f"recorded: {recorded.name}"] = Selections.load(recorded)
    for name, found in sources.items():
        for times in (1, 2, 4):
            size = times * found.positions.shape[1]
            lru, best = lru_hits(found, size), optimal_hits(found, size)
            yield {
                "selections": name, "context": int(found.newest.max()) + 1, "top_k": found.positions.shape[1],
                "buffer": size, "lru": lru.rate, "optimum": best.rate, "gap": best.rate - lru.rate,
            }  # fmt: skip


def capacity() -> Iterator[dict[str, Any]]:
    """Requests of a context of 8 buffers and more in the same bytes of device memory."""
    spec = planned_model(MODEL).spec
    for context in (32768, 131072):
        settings = PlanSettings(
            kv_memory=40 * 2**30, max_model_len=context, hisparse=HiSparseConfig(device_buffer_size=4096)
        )
        plan = make_plan(spec, settings)
        gain = hisparse_gain(plan, lambda settings: make_plan(spec, settings), hisparse_costs(plan))
        hot, before = gain.requests, gain.resident_requests
        yield {
            "model": MODEL, "context": context, "buffer": 4096, "device_bytes": plan.kv_bytes,
            "host_bytes": plan.memory.host_bytes, "resident_requests": before, "requests": hot, "times": hot / before,
        }  # fmt: skip


def engine(*, toy: bool) -> Iterator[dict[str, Any]]:
    """Decode steps of a small random model, latents on the device and in host memory."""
    buffer, top_k = (32, 16) if toy else (256, 128)
    tokens, batches = (8, (2,)) if toy else (32, (1, 4, 16))
    context = 8 * buffer + tokens
    with tempfile.TemporaryDirectory() as folder:
        build(512, 2 * context, top_k).save_pretrained(folder)
        for batch in batches:
            rng = np.random.default_rng(batch)
            prompts = [{"prompt_token_ids": rng.integers(1, 500, 8 * buffer).tolist()} for _ in range(batch)]
            for hisparse in (None, {"device_buffer_size": buffer}):
                yield _engine_row(folder, prompts, tokens, context, hisparse)


def _engine_row(
    folder: str, prompts: list[Any], tokens: int, context: int, hisparse: dict[str, int] | None
) -> dict[str, Any]:
    settings: dict[str, Any] = {"hisparse": hisparse, "max_running_requests": len(prompts), "kv_memory": "256MiB"}
    with LLM(folder, show_plan=False, skip_tokenizer_init=True, max_model_len=context, **settings) as llm:
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))  # the prompts are cached
        seconds = []
        for most in (2, tokens):
            began = time.perf_counter()
            found = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=most, ignore_eos=True))
            seconds.append(time.perf_counter() - began)
        counts = llm.engine.statistics()["hisparse"] or {}
    steps = tokens - 2
    return {
        "latents": "on the device" if hisparse is None else "in host memory", "batch": len(prompts), "context": context,
        "buffer": hisparse["device_buffer_size"] if hisparse is not None else 0,
        "steps_per_s": steps / (seconds[1] - seconds[0]),
        "swapped_bytes_per_step": counts.get("swapped_bytes", 0) / tokens,
        "hit_rate": counts["hit_tokens"] / (counts["hit_tokens"] + counts["swapped_tokens"]) if counts else None,
        "digest": hash(tuple(tuple(each.outputs[0].token_ids) for each in found)),
    }  # fmt: skip


class Clock:
    """Wall and CPU seconds inside a function, and how often it was called."""

    def __init__(self, real: Callable[..., Any]) -> None:
        self.seconds, self.calls, self._real = 0.0, 0, real

    def __call__(self, *given: Any) -> Any:
        began = time.thread_time_ns()
        found = self._real(*given)
        self.seconds += (time.thread_time_ns() - began) / 1e9
        self.calls += 1
        return found


class Load:
    """An engine that runs offered requests step by step. `decode_s` has the wall and CPU seconds of each step without
    prompts, by its number of requests."""

    def __init__(self, folder: str, tokens: int, context: int, hisparse: dict[str, int] | None, kv_memory: int) -> None:
        self.llm = LLM(
            folder, show_plan=False, skip_tokenizer_init=True, max_model_len=context, max_running_requests=64,
            kv_memory=kv_memory, hisparse=hisparse,
        )  # fmt: skip
        self.params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        self.decode_s: dict[int, list[tuple[float, float]]] = defaultdict(list)
        self.peak = 0
        scheduler = self.llm.engine.scheduler
        self._schedule, self._step = scheduler.schedule, self.llm.engine.step
        patched: Any = self.llm.engine
        patched.step, patched.scheduler.schedule = self.step, self.schedule
        if hisparse is not None:
            coordinator: Any = self.llm.engine.latents.coordinator  # type: ignore[union-attr]
            self.swaps = coordinator.swap_in = Clock(coordinator.swap_in)
            self.bookkeeping = coordinator.hot.swap_in = Clock(coordinator.hot.swap_in)

    def schedule(self) -> Any:
        self._scheduled = self._schedule()
        return self._scheduled

    def step(self) -> Any:
        began = time.perf_counter(), time.process_time()
        outputs = self._step()
        spent = time.perf_counter() - began[0], time.process_time() - began[1]
        if len(self._scheduled) and not self._scheduled.computes_prompts:
            self.decode_s[len(self._scheduled)].append(spent)
        self.peak = max(self.peak, self.llm.engine.statistics()["running_requests"])
        return outputs

    def offer(self, prompts: list[Any]) -> dict[str, Any]:
        """Run them all. Tokens per second of decoding are those with the most requests at once."""
        self.peak = 0
        self.decode_s.clear()
        preemptions = self.llm.engine.statistics()["preemptions"]
        began = time.perf_counter(), time.process_time()
        found = self.llm.generate(prompts, self.params)
        spent = time.perf_counter() - began[0], time.process_time() - began[1]
        most = max(self.decode_s)
        wall, cpu = (statistics.median(each) for each in zip(*self.decode_s[most], strict=True))
        tokens = sum(len(each.outputs[0].token_ids) for each in found)
        return {
            "offered": len(prompts), "peak_running": self.peak,
            "preemptions": self.llm.engine.statistics()["preemptions"] - preemptions,
            "tokens_per_s": tokens / spent[0], "tokens_per_cpu_s": tokens / spent[1],
            "decoding": most, "decode_step_s": wall, "decode_step_cpu_s": cpu,
            "decode_tokens_per_s": most / wall, "decode_tokens_per_cpu_s": most / cpu,
            "digest": hash(tuple(tuple(each.outputs[0].token_ids) for each in found)),
        }  # fmt: skip


def offered_requests(*, toy: bool) -> Iterator[dict[str, Any]]:
    """Offered requests in the same bytes of device memory. A latent has nine times the bytes of an index key, as those
    of DeepSeek-V3.2 have. Ends with the row of the break-even."""
    buffer, tokens, offers = (32, 8, (1, 2, 20)) if toy else (128, 64, (1, 2, 4, 5, 6, 8, 12, 16, 24))
    context, rounds, threads = 8 * buffer + tokens, 1 if toy else 3, torch.get_num_threads()
    torch.set_num_threads(1)  # so that other jobs do not hold up its loops
    rows: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        build(512, 2 * context, buffer // 2, latent=272).save_pretrained(folder)
        bytes_per_token = sum(2 * 4 * width for width in (272, 16, 32))
        room = 4 * (context + 16) * bytes_per_token + 2**16
        loads = {
            name: Load(folder, tokens, context, hisparse, room)
            for name, hisparse in (("on the device", None), ("in host memory", {"device_buffer_size": buffer}))
        }
        for at in range(rounds):
            for offered in offers:
                rng = np.random.default_rng([at, offered])
                prompts = [{"prompt_token_ids": rng.integers(1, 500, 8 * buffer).tolist()} for _ in range(offered)]
                for name, each in loads.items():
                    rows[name, offered].append(each.offer(prompts))
        found = []
        for (name, _), runs in rows.items():
            middle = {key: statistics.median(run[key] for run in runs) for key in runs[0] if key != "digest"}
            digest = tuple(run["digest"] for run in runs)
            found.append({"latents": name, "context": context, "buffer": buffer, **middle, "digest": digest})
        yield from found
        yield _break_even(loads["in host memory"], found)
        for each in loads.values():
            each.llm.close()
    torch.set_num_threads(threads)


def _break_even(hosted: Load, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """From which number of offered requests on hot buffers are faster than the median of the rows in which as many
    requests ran on the device as fit, and where the plan says so of the costs that were measured."""
    plan: Plan = hosted.llm.plan
    coordinator = hosted.llm.engine.latents.coordinator  # type: ignore[union-attr]
    before, after = ([row for row in rows if row["latents"] == name] for name in ("on the device", "in host memory"))
    request_s, step_s = np.polyfit(
        [row["decoding"] for row in before], [row["decode_step_cpu_s"] for row in before], 1
    ).tolist()
    counts = plain(coordinator.counters())
    costs = HiSparseCosts(
        hit_rate=counts["hit_tokens"] / (counts["hit_tokens"] + counts["swapped_tokens"]),
        link_rate=counts["swapped_bytes"] / (hosted.swaps.seconds - hosted.bookkeeping.seconds),
        step_s=step_s,
        bookkeeping_s=hosted.bookkeeping.seconds / (counts["backed_up_tokens"] * coordinator.hot.shape[0]),
    )
    gain = hisparse_gain(plan, partial(make_plan, plan.spec), costs)
    peaks = [max(row["peak_running"] for row in each) for each in (before, after)]
    measured = {}
    for key in ("decode_tokens_per_cpu_s", "decode_tokens_per_s", "tokens_per_cpu_s", "tokens_per_s"):
        resident = statistics.median(row[key] for row in before if row["peak_running"] == peaks[0])
        faster = [row["offered"] for row in after if row[key] > resident]
        most = max(row[key] for row in after)
        measured[key] = {"resident": resident, "hisparse": most, "break_even": min(faster, default=None)}
    return {
        "device_bytes": plan.kv_bytes, "host_bytes": plan.memory.host_bytes,
        "peak_resident": peaks[0], "peak_hisparse": peaks[1], "times": peaks[1] / peaks[0],
        "request_s": request_s, "costs": asdict(costs),
        "planned_resident": gain.resident_requests, "planned_hisparse": gain.requests,
        "swap_s": gain.swap_s, "planned_break_even": gain.break_even, "planned_loses": gain.loses, "measured": measured,
    }  # fmt: skip


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--only", help="the name of one part")
    parser.add_argument("--selections", type=Path, help="a file of recorded selections")
    given = parser.parse_args()
    result: dict[str, Any] = {"cpu": platform.processor() or platform.machine(), "load": {}}
    parts = {
        "bookkeeping": lambda: bookkeeping(toy=given.toy),
        "hit_rates": lambda: hit_rates(given.selections, toy=given.toy),
        "capacity": capacity,
        "engine": lambda: engine(toy=given.toy),
        "offered": lambda: offered_requests(toy=given.toy),
    }
    for name, part in parts.items():
        if given.only not in (None, name):
            continue
        result[name], result["load"][name] = [], os.getloadavg()
        for row in part():
            result[name].append(row)
            print(name, json.dumps(row), flush=True)
    result["break_even"] = result["offered"].pop() if "offered" in result else None
    tokens = {(row["batch"], row.pop("digest")) for row in result.get("engine", [])}
    tokens |= {(-row["offered"], row.pop("digest")) for row in result.get("offered", [])}
    save(given.json, result)
    assert len(tokens) == len({batch for batch, _ in tokens}), "tokens differ between the places of latents"


if __name__ == "__main__":
    main()
