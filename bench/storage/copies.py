"""What moving frames costs in memory alone: copies beside a plain one, digests beside copies, and the first touch.

    python -m bench.storage.copies                                  everything, about two minutes
    python -m bench.storage.copies --pages 64KiB,1MiB               some sizes
    python -m bench.storage.copies --toy                            small sizes, in seconds; fails if a byte is wrong

Samples of all rows of a size are taken in shuffled order, and ratios are medians over samples of the same repeat, so
that what else the machine does falls on all alike. Beside them stand ratios of the fastest samples: on a machine that
others use, whose memory is one for all, they are nearer to what the hardware does. Buffers are larger than the cache.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import torch
from bench.harness import machine, new_parser, save

from quire.kernels.native.copies import native_copy_rows
from quire.memory.frame_copies import CpuFrames, FrameCopies
from quire.memory.host_pool import HostPool
from quire.memory.pool import Pool
from quire.plan.budget import format_bytes
from quire.settings.setting import parse_bytes
from quire.spec.group import GroupSpec
from quire.spec.ids import Ids
from quire.spec.layout import DType, Field, PageLayout
from quire.spec.record_size import record_stride
from quire.tiers.executor import PIECE_BYTES

SEED = 20
PAGES = "16KiB,64KiB,256KiB,1MiB,4MiB"
CHUNK = 2**20
"""Bytes copied before they are sealed, where that is measured: they are in the cache still."""

Samples = Mapping[str, Sequence[float]]


def shuffled(work: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each, `repeats` times after one that does not count, each time in another order."""
    found: dict[str, list[float]] = {name: [] for name in work}
    for repeat in range(repeats + 1):
        order = list(work)
        random.Random(f"{SEED} {repeat}").shuffle(order)
        for name in order:
            began = time.perf_counter()
            work[name]()
            if repeat:
                found[name].append(time.perf_counter() - began)
    return found


def ratio(samples: Samples, of: str, to: str) -> float:
    """The median over repeats of the time of one row as a part of another's."""
    return statistics.median(one / other for one, other in zip(samples[of], samples[to], strict=True))


def best(samples: Samples, of: str, to: str) -> float:
    """The fastest of one row as a part of another's fastest."""
    return min(samples[of]) / min(samples[to])


def layout_of(page_bytes: int) -> PageLayout:
    """Keys and values of a layer, in a frame of `page_bytes`."""
    width = page_bytes // 32
    layout = PageLayout(16, tuple(Field(name=each, shape=(width,), dtype=DType.UINT8, layers=(0,)) for each in "kv"))
    assert layout.bytes_per_frame == page_bytes
    return layout


def measure_copies(page_bytes: int, *, total: int, repeats: int) -> dict[str, Any]:
    """Bandwidths and digest costs with pages of `page_bytes`, `total` bytes at a time; one row of the result."""
    layout = layout_of(page_bytes)
    count = max(2, total // page_bytes)
    pool = Pool(layout, count)
    rng = np.random.default_rng(SEED)
    pool.rows.numpy()[:] = rng.integers(0, 256, page_bytes, dtype=np.uint8)
    with closing(HostPool([GroupSpec(name="full", layout=layout)], [count])) as host:
        copies = FrameCopies([pool], host, partial(CpuFrames, copy=native_copy_rows()))
        frames = np.arange(1, count + 1, dtype=np.int32)
        scattered = rng.permutation(frames)
        keys = [bytes([index % 256]) * 32 for index in range(count)]
        source, target = np.ones(count * page_bytes, dtype=np.uint8), np.ones(count * page_bytes, dtype=np.uint8)
        warm, piece = (max(1, num_bytes // page_bytes) for num_bytes in (CHUNK, PIECE_BYTES))

        def sealed(source: Ids, size: int) -> None:
            for start in range(0, count, size):
                chosen = frames[start : start + size]
                copies.to_host(0, source[start : start + size], chosen)
                copies.seal(0, chosen, keys[start : start + size])

        samples = shuffled(
            {
                "plain": lambda: np.copyto(target, source),
                "to_host": lambda: copies.to_host(0, frames, frames),
                "to_device": lambda: copies.to_device(0, frames, frames),
                "to_host_scattered": lambda: copies.to_host(0, scattered, frames),
                "to_device_scattered": lambda: copies.to_device(0, scattered, frames),
                "to_host_sealed": lambda: sealed(frames, warm),
                "to_host_saved": lambda: sealed(frames, piece),
                "to_host_saved_scattered": lambda: sealed(scattered, piece),
                "seal": lambda: copies.seal(0, frames, keys),
                "defects": lambda: copies.defects(0, frames, keys),
            },
            repeats,
        )
        problems = wrong(copies, pool, host, frames, keys)
    moved = count * page_bytes
    return {
        "page_bytes": page_bytes,
        "bytes": moved,
        "gb_per_second": {name: moved / statistics.median(taken) / 1e9 for name, taken in samples.items()},
        "of_plain": {name: 1 / ratio(samples, name, "plain") for name in samples if name.startswith("to_")},
        "best_gb_per_second": {name: moved / min(taken) / 1e9 for name, taken in samples.items()},
        "best_of_plain": {name: 1 / best(samples, name, "plain") for name in samples if name.startswith("to_")},
        "digest_ns_per_byte": {name: statistics.median(samples[name]) / moved * 1e9 for name in ("seal", "defects")},
        "digest_of_copy": {
            "seal": ratio(samples, "seal", "to_host"),
            "seal_while_warm": ratio(samples, "to_host_sealed", "to_host") - 1,
            "save": ratio(samples, "to_host_saved", "to_host") - 1,
            "defects": ratio(samples, "defects", "to_device"),
        },
        "best_digest_of_copy": {
            "seal": best(samples, "seal", "to_host"),
            "seal_while_warm": best(samples, "to_host_sealed", "to_host") - 1,
            "save": best(samples, "to_host_saved", "to_host") - 1,
            "defects": best(samples, "defects", "to_device"),
        },
        "samples": {name: [round(value, 6) for value in taken] for name, taken in samples.items()},
        "problems": problems,
    }


def wrong(copies: FrameCopies, pool: Pool, host: HostPool, frames: Any, keys: Sequence[bytes]) -> list[str]:
    """What copies must not show, after one out and one back."""
    copies.to_host(0, frames, frames)
    copies.seal(0, frames, keys)
    found = [f"frame {frame}: {why}" for frame, why in zip(frames, copies.defects(0, frames, keys), strict=True) if why]
    if not np.array_equal(host.payloads(0)[1:], pool.rows.numpy()[1:]):
        found.append("bytes of frames and records differ")
    return found


def measure_touch(num_bytes: int, *, threads: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """Seconds per GiB that a host pool of that size takes until it is there, by the number of threads."""
    layout = layout_of(2**20)
    group = GroupSpec(name="full", layout=layout)
    frames = num_bytes // record_stride(layout.bytes_per_frame) - 1

    def reserve(count: int) -> None:
        HostPool([group], [frames], threads=count).close()

    samples = shuffled({str(count): lambda count=count: reserve(count) for count in threads}, repeats)
    return [
        {
            "threads": int(count),
            "bytes": num_bytes,
            "seconds_per_gib": statistics.median(taken) / num_bytes * 2**30,
            "samples": [round(value, 6) for value in taken],
        }
        for count, taken in samples.items()
    ]


def run(options: argparse.Namespace) -> dict[str, Any]:
    """All rows that were asked for."""
    pages = [parse_bytes(size) for size in options.pages.split(",")]
    rows = [measure_copies(size, total=options.total, repeats=options.repeats) for size in pages]
    return {
        **machine(),
        "threads": torch.get_num_threads(),
        "rows": rows,
        "touch": measure_touch(options.touch, threads=(1, 2), repeats=min(options.repeats, 5)),
        "problems": [problem for row in rows for problem in row.pop("problems")],
    }


def table(result: Mapping[str, Any]) -> str:
    """The result as text, one line for each size and kind."""
    names = ("to_host", "to_device", "to_host_scattered", "to_device_scattered")
    lines = [
        f"{result['date']}, {result['cores']} cores, load {result['load']}",
        "GB/s of the median; part of a plain copy, median and fastest",
        f"{'page':>10} {'plain':>6} " + " ".join(f"{name.replace('to_', ''):>18}" for name in names),
    ]
    for row in result["rows"]:
        speed, part, fastest = row["gb_per_second"], row["of_plain"], row["best_of_plain"]
        cells = " ".join(f"{speed[name]:7.2f} {part[name]:5.0%}{fastest[name]:5.0%}" for name in names)
        lines.append(f"{format_bytes(row['page_bytes']):>10} {speed['plain']:6.2f} {cells}")
    lines.append("digests: ns per byte of the median, part of the copy (fastest)")
    for row in result["rows"]:
        cost, part, fastest = row["digest_ns_per_byte"], row["digest_of_copy"], row["best_digest_of_copy"]
        cells = [f"{name} {part[name]:.0%} ({fastest[name]:.0%})" for name in part]
        times = ", ".join(f"{name} {value:.3f}" for name, value in cost.items())
        lines.append(f"{format_bytes(row['page_bytes']):>10} {times}; {', '.join(cells)}")
    lines += [f"touch with {row['threads']} threads: {row['seconds_per_gib']:.3f} s/GiB" for row in result["touch"]]
    return "\n".join([*lines, *(f"WRONG: {problem}" for problem in result["problems"])])


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Options, with sizes in bytes."""
    parser = new_parser(
        "Compare copies of frames with a plain copy of memory.", toy="small sizes; exits 1 if a byte is wrong"
    )
    parser.add_argument("--pages", default=PAGES, help="comma-separated bytes per frame (%(default)s)")
    parser.add_argument("--total", type=parse_bytes, help="bytes moved by a sample; default 256MiB")
    parser.add_argument("--touch", type=parse_bytes, help="bytes of the pool that is touched; default 2GiB")
    parser.add_argument("--repeats", type=int, help="samples of each row; default 9, with --toy 2")
    parser.add_argument("--threads", type=int, default=1, help="of torch, which copies small pieces (%(default)s)")
    options = parser.parse_args(arguments)
    options.total = options.total or (2**22 if options.toy else 2**28)
    options.touch = options.touch or (2**25 if options.toy else 2**31)
    options.repeats = options.repeats or (2 if options.toy else 9)
    return options


def main() -> int:
    """Measure, show and write; 1 if a byte was wrong."""
    options = parse()
    torch.set_num_threads(options.threads)
    result = run(options)
    print(table(result))
    save(options.json, result)
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
