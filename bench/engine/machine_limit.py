"""What this machine can do at most, and the least time that this leaves for a batch of `engine.py`.

    python -m bench.engine.machine_limit --threads 1 --dtype float32

The *matrix rate* is that of the fastest of several large products, and the *rate of reads* that of a sum over an array
that no cache holds. Neither counts what is around products and reads, so no engine reaches this limit.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

BURSTS = 9
ROWS, WIDE = (256, 2048), (1024, 2048)
READ_BYTES = 1 << 29


def rates(dtype: str, threads: int) -> dict[str, float]:
    """`flops` and `bytes` per second, of this many threads in a process of their own."""
    command = [sys.executable, __file__, "--dtype", dtype, "--threads", str(threads)]
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": str(threads)}, check=True, capture_output=True, text=True
    )
    return dict(json.loads(done.stdout))


def least_seconds(shape: Any, dtype: str, mode: str, machine: dict[str, float]) -> float:
    """The time of a batch at those rates, of `shape` (`engine.Shape`), cold or warm.

    Tokens of the shared prefix are computed once when cold and never when warm, and a step reads all weights and each
    cached token once, however many requests share it. A product of `n` numbers is `2 n` operations.
    """
    size = {"float32": 4, "bfloat16": 2}[dtype]
    kv_width = shape.hidden // shape.heads * shape.kv_heads
    layer = shape.hidden * (2 * shape.hidden + 2 * kv_width + 3 * shape.intermediate)
    head, layers = shape.vocab * shape.hidden, shape.layers * layer
    prefix = shape.shared if mode == "cold" else 0
    own, contexts = shape.requests * shape.own, shape.requests * shape.own * (shape.shared + shape.own / 2)
    pairs = prefix * prefix / 2 + contexts
    attention = 4 * shape.hidden * shape.layers
    prompts = (2 * (prefix + own) * layers + 2 * shape.requests * head + attention * pairs) / machine["flops"]
    total = prompts
    for step in range(1, shape.new):
        length = shape.own + step
        flops = 2 * shape.requests * (layers + head) + attention * shape.requests * (shape.shared + length)
        tokens = shape.shared + shape.requests * length
        read = size * (layers + head + 2 * kv_width * shape.layers * tokens)
        total += max(flops / machine["flops"], read / machine["bytes"])
    return float(total)


def _measured(dtype: str) -> dict[str, float]:
    import torch

    kind = getattr(torch, dtype)
    packs = dtype == "float32" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    flops = 0.0
    with torch.inference_mode():
        for count in ROWS:
            for width in WIDE:
                rows, weight = torch.randn(count, width).to(kind), torch.randn(width, width).to(kind)
                ways: list[Callable[[], object]] = [
                    lambda rows=rows, weight=weight: torch.nn.functional.linear(rows, weight)
                ]
                if packs:
                    packed = torch.ops.mkldnn._reorder_linear_weight(weight, count)
                    ways.append(
                        lambda rows=rows, packed=packed: torch.ops.mkldnn._linear_pointwise.default(
                            rows, packed, None, "none", [], ""
                        )
                    )
                flops = max(flops, *(2 * count * width * width / _best(way) for way in ways))
        array = torch.ones(READ_BYTES // 4)
        return {"flops": flops, "bytes": READ_BYTES / _best(array.sum)}


def _best(call: Callable[[], object]) -> float:
    found = float("inf")
    for _ in range(BURSTS):
        began = time.perf_counter()
        call()
        found = min(found, time.perf_counter() - began)
    return found


def main() -> None:
    """Measure, and print JSON."""
    parser = argparse.ArgumentParser(description="Measure what this machine can do at most.")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    import torch

    torch.set_num_threads(options.threads)
    print(json.dumps(_measured(options.dtype)))


if __name__ == "__main__":
    main()
