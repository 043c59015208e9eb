"""Times alternatives for a linear layer on the CPU, by rows: docs/decisions/044-weights-are-packed-once.md.

    python -m bench.kernels.linear_layers --threads 1
    python -m bench.kernels.linear_layers --threads 2 --rows 1 16 64
    python -m bench.kernels.linear_layers --streamed          layers in turn, whose weights no cache holds
    python -m bench.kernels.linear_layers --toy               one burst of few rows; fails if the alternatives differ

Alternatives take turns in short bursts, and the shortest burst of each counts. With one thread it is CPU time, so that
other programs disturb less. `linear` is torch's plain product, `transposed` one with a weight stored `[in, out]`, `mkl`
MKL's packed weight, `packed` oneDNN's for that number of rows, `packed 64` oneDNN's for 64 rows, and `native` the
library's product with those weights. A column is empty where the CPU or the library has no such product.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear

from quire.kernels.native.products import native_products
from quire.models.linear import CLOSE, native_on_cpu

BUNDLED = {"q, k, v": (256, 512), "gate, up": (256, 1408), "down": (704, 256), "output": (256, 2048)}
LARGER = {"q, k, v": (512, 1024), "gate, up": (512, 2560), "down": (1280, 512), "output": (512, 32000)}
ROWS = (1, 4, 16, 64, 256, 2048)
BURSTS, BURST_S, MOST_PRODUCTS = 25, 0.0015, 1 << 33


def alternatives(rows: Tensor, weight: Tensor) -> dict[str, Callable[[], Tensor]]:
    """The same product in several ways."""
    transposed = weight.t().contiguous()
    found: dict[str, Callable[[], Tensor]] = {
        "linear": lambda: linear(rows, weight),
        "transposed": lambda: torch.mm(rows, transposed),
    }
    if native_on_cpu(weight.dtype):
        packed, packed64 = (torch.ops.mkldnn._reorder_linear_weight(weight, count) for count in (len(rows), 64))
        found["packed"] = lambda: torch.ops.mkldnn._linear_pointwise.default(rows, packed, None, "none", [], "")
        found["packed 64"] = lambda: torch.ops.mkldnn._linear_pointwise.default(rows, packed64, None, "none", [], "")
        wanted = linear(rows, weight)
        for product in native_products(packed64, None, weight.shape[1], len(weight)):
            if _is_close(product.compute(rows), wanted):
                found["native"] = lambda product=product, kept=packed64: product.compute(rows)
    if weight.dtype is torch.float32:
        mkl = torch.ops.mkl._mkl_reorder_linear_weight(weight, len(rows))
        found["mkl"] = lambda: torch.ops.mkl._mkl_linear.default(rows, mkl, weight, None, len(rows))
    return found


def microseconds(
    ways: dict[str, Callable[[], Tensor]], estimate_s: float, bursts: int, clock: Callable[[], float]
) -> dict[str, float]:
    """Of one call, at best."""
    repeats = max(1, min(50, int(BURST_S / estimate_s)))
    best = dict.fromkeys(ways, float("inf"))
    wanted = ways["linear"]().float()
    for name, way in ways.items():
        if not _is_close(way(), wanted):
            raise SystemExit(f"{name} differs")
    for _ in range(bursts):
        for name, way in ways.items():
            began = clock()
            for _ in range(repeats):
                way()
            best[name] = min(best[name], (clock() - began) / repeats * 1e6)
    return best


def _is_close(found: Tensor, wanted: Tensor) -> bool:
    return bool((found.float() - wanted.float()).norm() <= CLOSE[found.dtype] * wanted.float().norm())


def stream(dtype: torch.dtype, every: tuple[int, ...], layers: int) -> None:
    """Print milliseconds for the products of all layers in turn, by rows, and for reading as many bytes."""
    sizes = [size for name, size in LARGER.items() if name != "output"] * layers
    weights = [(torch.randn(out, width) / width**0.5).to(dtype) for width, out in sizes]
    packed = [torch.ops.mkldnn._reorder_linear_weight(weight, 64) for weight in weights]
    rows = torch.randn(4, max(width for width, _ in sizes)).to(dtype)
    native = []
    for weight, kept in zip(weights, packed, strict=True):
        some, (out, width) = rows[:, : weight.shape[1]].contiguous(), weight.shape
        found = native_products(kept, None, width, out)
        native.append(next(each for each in found if _is_close(each.compute(some), linear(some, weight))))
    flat = torch.zeros(sum(weight.nbytes for weight in weights) // 4)

    def best(way: Callable[[], object]) -> float:
        found = float("inf")
        for _ in range(BURSTS):
            began = time.perf_counter()
            way()
            found = min(found, time.perf_counter() - began)
        return found * 1e3

    print(f"| {str(dtype)[6:]} | read {flat.nbytes >> 20} MiB | | {best(flat.sum):.2f} |", flush=True)
    multiply = torch.ops.mkldnn._linear_pointwise.default
    for count in every:
        inputs = [torch.randn(count, width).to(dtype) for width, _ in sizes]
        ours, theirs = list(zip(native, inputs, strict=True)), list(zip(packed, inputs, strict=True))
        found = (
            best(lambda products=theirs: [multiply(given, each, None, "none", [], "") for each, given in products]),
            best(lambda products=ours: [each.compute(given) for each, given in products]),
        )
        print(f"| {str(dtype)[6:]} | {count} rows | {found[0]:.2f} | {found[1]:.2f} |", flush=True)


@torch.inference_mode()
def main() -> None:
    """Measure and print a table in Markdown, in microseconds."""
    parser = argparse.ArgumentParser(description="Time linear layers.")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, nargs="+")
    parser.add_argument("--toy", action="store_true", help="one burst of few rows")
    parser.add_argument("--streamed", action="store_true", help="layers in turn, whose weights no cache holds")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.streamed:
        print("| dtype | | packed 64, ms | native, ms |\n|---|---|---|---|")
        for dtype in (torch.float32, torch.bfloat16):
            stream(dtype, tuple(options.rows or (1, 4, 8, 16, 32, 64)), 1 if options.toy else 12)
        return
    bursts = 1 if options.toy else BURSTS
    every = options.rows or ((1, 5) if options.toy else ROWS)
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    print(
        "| dtype | layer | in x out | rows | linear | transposed | mkl | packed | packed 64 | native |\n|" + "---|" * 10
    )
    for dtype in (torch.float32, torch.bfloat16):
        for layers in (BUNDLED,) if options.toy else (BUNDLED, LARGER):
            for name, (width, out) in layers.items():
                weight = (torch.randn(out, width) / width**0.5).to(dtype)
                for count in every:
                    if count * width * out > MOST_PRODUCTS:
                        continue
                    ways = alternatives(torch.randn(count, width).to(dtype), weight)
                    found = microseconds(ways, count * width * out / 25e9, bursts, clock)
                    columns = ("linear", "transposed", "mkl", "packed", "packed 64", "native")
                    cells = " | ".join(f"{found[way]:.0f}" if way in found else "" for way in columns)
                    print(f"| {str(dtype)[6:]} | {name} | {width} x {out} | {count} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
