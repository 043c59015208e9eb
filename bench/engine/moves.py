"""What moves of frames take of steps, in an engine whose groups share an arena.

    python -m bench.engine.moves [--json FILE] [--models window,recurrent,larger]

Requests with short prompts and long outputs are more than fit, so that frames move while others decode. A step is
*decode-only* if each of its requests computes one token. Its CPU time is compared with the median of decode-only steps
of as many requests in which nothing moved. Steps in which room was made without moves stand beside both, and all with
the CPU time of their parts: the model, room (evictions and moves), commits, and all of the scheduler, in which room is
made. The longest retreats are reported too, with what they were asked for: none
moves more than that and a frame.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from bench.harness import SEED, machine, new_parser, save

from quire.cache.room import Frames
from quire.engine.config import engine_config
from quire.engine.core import EngineCore
from quire.engine.messages import EngineRequest
from quire.loop import Launched, Loop, Part
from quire.memory.allocator import Move
from quire.scheduler.sampling_params import SamplingParams

MIB = 2**20
MODELS: dict[str, dict[str, Any]] = {
    "window": {"model": "quire-bundled-window", "kv_memory": 2 * MIB},
    "recurrent": {"model": "quire-bundled-recurrent", "kv_memory": 2 * MIB},
    "larger": {"kv_memory": 32 * MIB},
}
"""Models, and bytes in which not all requests fit. The larger one is a Gemma 3 of 50M parameters with random weights:
its steps take as long as those of a small model that people serve."""
REQUESTS, OUTPUT = 80, 256
ABOVE = 1.5
"""A step that takes so many times the median is counted."""


class MoveTimes(Part):
    """A row for each turn of the loop that settled a step: requests that decode, whether that is all, CPU seconds,
    those of moves, bytes that moved, and bytes that retreats were asked for; and in `parts` CPU seconds of parts of the
    turn. `too_far` counts retreats that moved more
    than that and a frame."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, bool, float, float, int, int]] = []
        self.parts: list[Counter[str]] = []
        self.too_far = 0
        self._reset()

    def _reset(self) -> None:
        self._requests, self._decodes = 0, True
        self._moving, self._moved, self._asked = 0.0, 0, 0
        self._parts = Counter[str]()
        self._began = time.thread_time()

    def attach(self, loop: Loop) -> None:
        (room,) = loop.cache.parts.rooms
        self.strides, self._make_way, self._move = room.strides, room.make_way, loop.cache._growth.move
        room.make_way = self.make_way  # type: ignore[method-assign]
        loop.cache._growth.move = self.move  # type: ignore[method-assign]
        self._count("model", loop.device, "launch")
        self._count("room", loop.cache._growth, "_until")
        self._count("commits", loop.cache, "commit")
        self._count("scheduler", loop.scheduler, "schedule")

    def _count(self, part: str, owner: Any, name: str) -> None:
        """Count the CPU seconds of a method."""
        real = getattr(owner, name)

        def counted(*args: Any, **named: Any) -> Any:
            began = time.thread_time()
            try:
                return real(*args, **named)
            finally:
                self._parts[part] += time.thread_time() - began  # type: ignore[assignment]

        setattr(owner, name, counted)

    def make_way(self, wanted: Frames) -> Move | None:
        """As the room's."""
        move = self._make_way(wanted)
        if move is not None:
            asked = sum(wanted[at] * stride for at, stride in enumerate(self.strides))
            self.too_far += (len(move.sources) - 1) * self.strides[move.group] >= asked
            self._asked += asked
        return move

    def move(self, move: Move) -> None:
        """As the cache's."""
        began = time.thread_time()
        self._move(move)
        self._moving += time.thread_time() - began
        self._moved += len(move.sources) * self.strides[move.group]

    def launched(self, launched: Launched) -> None:
        step = launched.step
        self._requests = len(step)
        self._decodes &= bool((step.ends - step.starts == 1).all())

    def after_step(self, *, idle: bool) -> None:
        if self._requests and not idle:
            cpu = time.thread_time() - self._began
            self.rows.append((self._requests, self._decodes, cpu, self._moving, self._moved, self._asked))
            self.parts.append(self._parts)
        self._reset()


def save_larger(folder: Path) -> None:
    """Write a random Gemma 3 to `folder`."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(SEED)
    config = Gemma3TextConfig(
        vocab_size=8192,
        hidden_size=640,
        intermediate_size=1920,
        num_hidden_layers=10,
        num_attention_heads=10,
        num_key_value_heads=2,
        head_dim=64,
        sliding_window=64,
        sliding_window_pattern=2,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    Gemma3ForCausalLM(config).save_pretrained(folder)


def measured(name: str, requests: int, output: int) -> dict[str, Any]:
    """One engine and one load."""
    common = {
        "dtype": "float32",
        "arena": True,
        "max_num_batched_tokens": 256,
        "max_model_len": 512,
        "max_running_requests": 16,
        "target_itl_ms": "off",
        "checkpoint_interval": 64,
    }
    times = MoveTimes()
    with TemporaryDirectory() as folder:
        if "model" not in MODELS[name]:
            save_larger(Path(folder))
        core = EngineCore(engine_config(**{"model": folder, **common, **MODELS[name]}), parts=[times])
    random = np.random.default_rng(SEED)
    shared = random.integers(1, 250, size=96).tolist()
    for at in range(requests):
        prompt = shared * (at % 2) + random.integers(1, 250, size=int(random.integers(8, 120))).tolist()
        params = SamplingParams(max_tokens=int(random.integers(output // 2, output)), temperature=0.0, ignore_eos=True)
        core.add(EngineRequest(request_id=f"r{at}", prompt=np.array(prompt, dtype=np.int32).tobytes(), params=params))
    while core.has_work():
        core.step()
    core.audit()
    found = summary(times)
    core.close()
    return found


def summary(times: MoveTimes) -> dict[str, Any]:
    """Decode-only steps with and without moves, and the longest retreats."""
    plain: dict[int, list[float]] = defaultdict(list)
    for requests, decodes, cpu, _, moved, *_ in times.rows:
        if decodes and not moved:
            plain[requests].append(cpu)
    medians = {requests: statistics.median(each) for requests, each in plain.items() if len(each) >= 10}
    found: dict[str, Any] = {"strides": times.strides, "steps": len(times.rows)}
    kinds: dict[str, Callable[[Any, Counter[str]], Any]] = {
        "without": lambda row, parts: not row[4],
        "with_room_made": lambda row, parts: not row[4] and parts["room"],
        "with": lambda row, parts: row[4],
    }
    for kind, has in kinds.items():
        some = [
            (row, parts)
            for row, parts in zip(times.rows, times.parts, strict=True)
            if row[1] and has(row, parts) and row[0] in medians
        ]
        rows = [row for row, _ in some]
        parts = sorted(cpu / medians[requests] for requests, _, cpu, *_ in rows)
        found[kind] = {"steps": len(rows)}
        if rows:
            found[kind] |= {
                "cpu_ms_median": round(1e3 * statistics.median(row[2] for row in rows), 3),
                "move_ms_median": round(1e3 * statistics.median(row[3] for row in rows), 3),
                "parts_ms_mean": {
                    name: round(1e3 * statistics.mean(parts[name] for _, parts in some), 3)
                    for name in ("model", "room", "commits", "scheduler")
                },
                "times_median": round(statistics.median(parts), 3),
                "times_99": round(parts[int(0.99 * (len(parts) - 1))], 2),
                "times_most": round(parts[-1], 2),
                "above_percent": round(100 * sum(each > ABOVE for each in parts) / len(parts), 2),
                "moves_alone_above_percent": round(
                    100 * sum(row[3] > (ABOVE - 1) * medians[row[0]] for row in rows) / len(rows), 2
                ),
            }
    moving = [row for row in times.rows if row[4]]
    found["retreats"] = {
        "steps": len(moving),
        "too_far": times.too_far,
        "longest": [
            {
                "mib": round(moved / MIB, 2),
                "asked_mib": round(asked / MIB, 2),
                "move_ms": round(1e3 * moving_s, 2),
                "step_ms": round(1e3 * cpu, 2),
                "decode_only": decodes,
            }
            for _, decodes, cpu, moving_s, moved, asked in sorted(moving, key=lambda row: -row[3])[:3]
        ],
    }
    return found


def main() -> None:
    parser = new_parser(__doc__ or "")
    parser.add_argument("--models", default=",".join(MODELS), help="of " + ", ".join(MODELS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = machine(models={})
    for name in options.models.split(","):
        result["models"][name] = measured(name, *((12, 80) if options.toy else (REQUESTS, OUTPUT)))
        print(name, json.dumps(result["models"][name]), flush=True)
    save(options.json, result)


if __name__ == "__main__":
    main()
