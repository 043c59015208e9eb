"""What verifying drafts costs on the host: the few new rows of all sequences in batched segments, beside segments of
each sequence, in turns in one process.

    python bench/verify_rows.py          five rows of each of 1 and 8 sequences, about a minute
    python bench/verify_rows.py --rows   the number of rows from which segments of each sequence are faster
    python bench/verify_rows.py --toy    small sizes, in seconds

CPU time of planning and attention of a step of several layers, on one thread, in microseconds. Every step is another,
one token later, as it is where no draft is accepted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from quire.kernels import segments
from quire.kernels.attention import paged_attention
from quire.kernels.backend import AttentionBackend
from quire.kernels.batch import PagedBatch
from quire.kernels.fields import KVFields, PagedField
from quire.kernels.planner import AttentionPlanner

PAGE, KV_HEADS, HEADS, DIM, LAYERS = 16, 2, 8, 64, 4


@dataclass(frozen=True)
class Case:
    """`sequences` of about `context` tokens on scattered pages, with `rows` new ones each."""

    sequences: int
    context: int
    rows: int
    window: int = 0

    @property
    def name(self) -> str:
        window = f", window {self.window}" if self.window else ""
        return f"{self.sequences} x {self.rows} rows behind {self.context}{window}"


def cases(*, rows: bool, toy: bool) -> Iterator[Case]:
    """The rows of the table."""
    context = 200 if toy else 1024
    for sequences in (1, 8):
        for count in (2, 5, 16, 32, 48, 64, 96) if rows else (5,):
            yield Case(sequences, context, count)
            if not rows:
                yield Case(sequences, context, count, window=context // 4)
            if not toy:
                yield Case(sequences, 4 * context, count)
                yield Case(sequences, 4 * context, count, window=2 * context)


class Run:
    """The steps of a case, by a planner of its own."""

    def __init__(self, case: Case, most: int) -> None:
        """`most`: new rows of a sequence up to which they are batched."""
        self.case, self.most = case, most
        random = np.random.default_rng(1)
        torch.manual_seed(1)
        pages = (case.context + 2000) // PAGE
        self.frames = random.permutation(case.sequences * pages).reshape(case.sequences, pages).astype(np.int32)
        self.contexts = (case.context + random.integers(0, 64, case.sequences)).astype(np.int32)
        self.pool = torch.randn(2, case.sequences * pages, PAGE, KV_HEADS, DIM)
        self.planner = AttentionPlanner()
        count = case.sequences * case.rows
        self.query, self.new = torch.randn(count, HEADS, DIM), torch.randn(2, count, KV_HEADS, DIM)
        self.spent: list[float] = []

    def step(self) -> torch.Tensor:
        """One step; appends its CPU microseconds to `spent`."""
        case = self.case
        self.contexts += 1
        rows = self.contexts[:, None] - case.rows + np.arange(case.rows)
        slots = (np.take_along_axis(self.frames, rows // PAGE, axis=1) * PAGE + rows % PAGE).ravel()
        self.pool.flatten(1, 2)[:, slots] = self.new
        fields = KVFields(*(PagedField(part) for part in self.pool))
        batch = PagedBatch(
            query_starts=np.arange(case.sequences + 1, dtype=np.int32) * case.rows,
            context_lens=self.contexts.copy(),
            frames=self.frames,
            slots=slots.astype(np.int32),
            page_size=PAGE,
            planner=self.planner,
            backend=AttentionBackend("torch"),
        )
        with patch.object(segments, "MAX_BATCHED_ROWS", self.most):
            began = time.process_time_ns()
            for _ in range(LAYERS):
                found = paged_attention(self.query, *self.new, fields, batch, scale=0.125, window=case.window)
            self.spent.append((time.process_time_ns() - began) / 1e3)
        return found


def measure(case: Case, steps: int) -> dict[str, Any]:
    """One row of the table."""
    batched, apart = Run(case, case.rows), Run(case, 1)
    for _ in range(steps + 2):
        difference = float((batched.step() - apart.step()).abs().max())
        assert difference < 1e-4, f"{case.name}: {difference}"
    found = {name: run.spent[2:] for name, run in (("batched", batched), ("apart", apart))}
    return {
        "name": case.name,
        **{f"{name}_us": {"min": min(spent), "median": statistics.median(spent)} for name, spent in found.items()},
    }


def main() -> None:
    """Measure, show and write."""
    parser = argparse.ArgumentParser(description="Compare batched rows of drafts with segments of each sequence.")
    parser.add_argument("--rows", action="store_true", help="other numbers of rows too")
    parser.add_argument("--toy", action="store_true", help="small sizes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(case, 3 if options.toy else 30) for case in cases(rows=options.rows, toy=options.toy)]
    print(f"{'CPU microseconds, least and median':42} {'batched':>16} {'apart':>16}")
    for row in rows:
        both = (f"{row[name]['min']:8.0f}{row[name]['median']:8.0f}" for name in ("batched_us", "apart_us"))
        print(f"{row['name']:42} {' '.join(both)}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
