"""Attention of steps alone: its reads per second beside what this machine reads at most, by backend.

    python -m bench.kernels.decode_attention                  all rows, on torch's default threads
    python -m bench.kernels.decode_attention --prompts        chunks of prompts in place of decodes
    python -m bench.kernels.decode_attention --threads 1
    python -m bench.kernels.decode_attention --toy            small sizes, in seconds; fails if the backends differ

Keys and values are in scattered pages of 16 tokens and larger than the CPU's caches. The rate of reads is that of a sum
over one array of the same size, on the same threads, measured between the rows. Wall-clock time, the best of several
repeats in turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from bench.harness import new_parser, save
from torch import Tensor

from quire.kernels.attention import paged_attention
from quire.kernels.backend import AttentionBackend, BackendWord
from quire.kernels.batch import PagedBatch
from quire.kernels.fields import KVFields, PagedField
from quire.kernels.terms import AttentionTerms
from quire.memory.host_pool import reserve, touch

PAGE = 16
BACKENDS: tuple[BackendWord, ...] = ("native", "torch")


@dataclass(frozen=True)
class Case:
    """The last `rows` tokens of each of `sequences` of `context` tokens."""

    sequences: int
    context: int
    heads: int
    kv_heads: int
    dim: int
    dtype: str
    rows: int = 1

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values that a step reads."""
        return 2 * self.sequences * self.context * self.kv_heads * self.dim * getattr(torch, self.dtype).itemsize


def cases(*, toy: bool, prompts: bool) -> list[Case]:
    """The rows of the table."""
    if prompts:
        chunks = ((64, 32),) if toy else ((640, 256), (2048, 2048), (4096, 512))
        return [
            Case(1, context, *head, dtype, rows)
            for context, rows in chunks
            for head in ((8, 4, 64), (32, 8, 128))
            for dtype in ("float32", "bfloat16")
        ]
    sizes = ((4, 64),) if toy else ((64, 1024), (16, 8192))
    heads = ((8, 4, 64), (32, 8, 128))
    return [Case(*size, *head, dtype) for size in sizes for head in heads for dtype in ("float32", "bfloat16")]


def memory(*shape: int, dtype: torch.dtype) -> Tensor:
    """Random numbers in huge pages, as pools are."""
    found = torch.frombuffer(reserve(int(np.prod(shape)) * dtype.itemsize), dtype=torch.uint8)
    touch(found.numpy())
    return found.view(dtype).view(shape).normal_()


class Step:
    """A decode step of a case."""

    def __init__(self, case: Case) -> None:
        pages, dtype = case.sequences * case.context // PAGE, getattr(torch, case.dtype)
        pools = [memory(pages + 1, PAGE, case.kv_heads, case.dim, dtype=dtype) for _ in "kv"]
        order = np.random.default_rng(0).permutation(pages) + 1
        self.frames = order.astype(np.int32).reshape(case.sequences, -1)
        last = np.arange(case.context - case.rows, case.context)
        self.slots = (self.frames[:, last // PAGE] * PAGE + last % PAGE).ravel()
        self.fields = KVFields(*(PagedField(pool) for pool in pools))
        self.query = torch.randn(case.sequences * case.rows, case.heads, case.dim).to(dtype)
        self.case = case

    def batch(self, word: BackendWord) -> PagedBatch:
        """Of this step, on one backend."""
        return PagedBatch(
            query_starts=np.arange(self.case.sequences + 1, dtype=np.int32) * self.case.rows,
            context_lens=np.full(self.case.sequences, self.case.context, dtype=np.int32),
            frames=self.frames,
            slots=self.slots,
            page_size=PAGE,
            backend=AttentionBackend(word),
        )

    def attend(self, batch: PagedBatch) -> Tensor:
        """The output of a layer."""
        return paged_attention(self.query, self.fields, batch, AttentionTerms(scale=self.case.dim**-0.5))


def best_of(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """The least seconds of each; they take turns."""
    found = dict.fromkeys(runs, float("inf"))
    for _ in range(repeats + 1):
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            found[name] = min(found[name], time.perf_counter() - began)
    return found


@torch.inference_mode()
def measure(case: Case, repeats: int, backends: tuple[BackendWord, ...]) -> dict[str, Any]:
    """One row of the table."""
    step, plain = Step(case), memory(case.num_bytes // 4, dtype=torch.float32)
    batches = {word: step.batch(word) for word in backends}
    outs = {word: step.attend(batch).float() for word, batch in batches.items()}
    for word, out in outs.items():
        assert (out - outs[backends[0]]).abs().max() < 0.02, f"{word} differs"
    runs: dict[str, Callable[[], object]] = {"read": plain.sum}
    runs |= {word: lambda batch=batch: step.attend(batch) for word, batch in batches.items()}
    seconds = best_of(runs, repeats)
    return {
        **asdict(case),
        "read_gb_s": case.num_bytes / seconds["read"] / 1e9,
        **{f"{word}_ms": seconds[word] * 1e3 for word in backends},
        **{f"{word}_share": seconds["read"] / seconds[word] for word in backends},
    }


def main() -> None:
    """Measure, show and write."""
    parser = new_parser("Measure attention of decode steps beside the rate of reads.", toy="small sizes")
    parser.add_argument("--prompts", action="store_true", help="measure chunks of prompts")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--backends", default=",".join(BACKENDS))
    options = parser.parse_args()
    torch.set_num_threads(options.threads or torch.get_num_threads())
    backends: Any = tuple(options.backends.split(","))
    rows = []
    for case in cases(toy=options.toy, prompts=options.prompts):
        rows.append(row := measure(case, 1 if options.toy else options.repeats, backends))
        said = ", ".join(
            f"{word} {row[f'{word}_ms']:.2f} ms ({row[f'{word}_share']:.0%} of reads)" for word in backends
        )
        about = f"{case.rows} of {case.sequences} x {case.context}, heads {case.heads}/{case.kv_heads} x {case.dim}"
        print(f"{about}, {case.dtype}: {row['read_gb_s']:.1f} GB/s; {said}", flush=True)
    save(options.json, {"threads": torch.get_num_threads(), "rows": rows})


if __name__ == "__main__":
    main()
