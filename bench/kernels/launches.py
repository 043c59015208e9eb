"""What the host does to launch attention: microseconds of Python for one layer, by kind of step.

    python -m bench.kernels.launches                    on a CPU: everything but the launch itself, which is left out
    python bench/gpu_first.py --stages launches  on a GPU: with the launch

A layer finds its fields, writes new keys and values, and computes attention. Without a GPU, kernels are compiled for
one (`--capability 90`), and what would launch them does nothing; allocations are of memory on the CPU.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

KINDS = {"1 decode of 40": ([1], [40]), "64 decodes of 3,000": ([1] * 64, [3000] * 64)}
KINDS["256 decodes of 500"] = ([1] * 256, [500] * 256)
KINDS["32 decodes, prompt of 512"] = ([1] * 32 + [512], [2000] * 33)
LAYERS = 8


class SilentKernel:
    """In place of a kernel: what would launch it does nothing. Triton's own part is left out too."""

    def __init__(self, kernel: Any) -> None:
        self.arg_names = kernel.arg_names

    def __getitem__(self, grid: object) -> Any:
        return lambda *arguments, **options: self


@contextmanager
def silent_kernels() -> Iterator[None]:
    """Attention launches nothing inside the block."""
    from quire.kernels.triton import attention, write

    places = [(attention, "attend_tasks"), (attention, "merge_parts"), (write, "write_tiles")]
    real = [getattr(module, name) for module, name in places]
    try:
        for (module, name), kernel in zip(places, real, strict=True):
            setattr(module, name, SilentKernel(kernel))
        yield
    finally:
        for (module, name), kernel in zip(places, real, strict=True):
            setattr(module, name, kernel)


class _Utils:
    """As much of a driver's functions as loading a kernel needs."""

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232_448}

    def load_binary(self, *_: Any) -> tuple[int, int, int, int, int]:
        return 1, 1, 32, 0, 1024

    def unload_module(self, module: int) -> None:
        pass


class SilentDriver:
    """Triton's driver of a GPU that is not there: kernels are compiled and looked up as ever, and launch nothing.
    `launched` counts what they would have launched."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self.utils = _Utils()
        self.launched = 0
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        def launch(*_: Any) -> None:
            self.launched += 1

        return launch


def layer_of(device: Any, dtype: Any, news: list[int], contexts: list[int], heads: tuple[int, int, int]) -> Any:
    """A function that computes one step of `LAYERS` layers of `heads`: of queries, of keys, numbers of each."""
    import numpy as np
    import torch

    from quire.kernels.attention import paged_attention
    from quire.kernels.backend import AttentionBackend
    from quire.kernels.batch import PagedBatch
    from quire.kernels.fields import KVFields
    from quire.kernels.terms import AttentionTerms
    from quire.kernels.triton.attention import TritonAttention
    from quire.kernels.triton.write import write_rows
    from quire.memory.pool import Pool
    from quire.models.forward import RunningForward
    from quire.spec.layout import DType, Field, PageLayout

    queries, keys, dim = heads
    backend = AttentionBackend("triton", device)
    if device.type == "cpu":  # a GPU's backend, and no interpreter
        backend.__dict__ |= {"_kernel": TritonAttention(device, programs=264), "writer": write_rows}
    name = {torch.float32: DType.FLOAT32, torch.bfloat16: DType.BFLOAT16}[dtype]
    layout = PageLayout(
        16, tuple(Field(name=n, shape=(keys, dim), dtype=name, layers=tuple(range(LAYERS))) for n in "kv")
    )
    width = -(-max(contexts) // 16)
    pool = Pool(layout, 64, device=device)
    frames = 1 + np.arange(len(contexts) * width, dtype=np.int32).reshape(-1, width) % 64
    stops = np.array(contexts, dtype=np.int64)
    batch = PagedBatch.of(frames, stops - np.array(news), stops, 16)
    batch.backend = backend
    rows = torch.zeros(sum(news), queries + 2 * keys, dim, dtype=dtype, device=device)
    query, key, value = rows.split((queries, keys, keys), dim=1)

    def step() -> None:
        forward = RunningForward([pool], [batch])
        for _ in range(LAYERS):
            ordinal = forward.next_ordinal()
            fields = KVFields(forward.rows("k", ordinal)[0], forward.rows("v", ordinal)[0])
            fields.write(batch.slots_on(device), key, value)
            paged_attention(query, fields, batch, AttentionTerms(scale=dim**-0.5))

    return step


def measure(
    device: Any,
    dtype: Any,
    heads: tuple[int, int, int] = (32, 8, 128),
    most_s: float = 1.0,
    wait: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Microseconds of a layer by kind of step, the best of many steps; the plan of a step is made before. `wait` waits
    for the device between steps, which is not counted."""
    found: dict[str, float] = {}
    for kind, (news, contexts) in KINDS.items():
        step = layer_of(device, dtype, news, contexts, heads)
        step()
        best, until = float("inf"), time.perf_counter() + most_s
        while time.perf_counter() < until:
            wait()
            began = time.perf_counter()
            step()
            best = min(best, time.perf_counter() - began)
        found[kind] = round(best / LAYERS * 1e6, 1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Host time of launches of attention.")
    parser.add_argument("--capability", type=int, default=90, help="of the GPU that kernels are compiled for")
    parsed = parser.parse_args()
    import torch
    import triton

    driver = SilentDriver(parsed.capability)
    triton.runtime.driver.set_active(driver)
    torch.set_num_threads(1)
    with torch.inference_mode():
        found = measure(torch.device("cpu"), torch.bfloat16)
    print(json.dumps({"triton": triton.__version__, "us_per_layer": found, "launched": driver.launched}))


if __name__ == "__main__":
    main()
