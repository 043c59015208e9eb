"""What planning attention costs on the host: a plan that is kept from step to step beside a fresh one, in one run.

    python bench/attention_plan.py                     everything, about two minutes
    python bench/attention_plan.py --only decode-256   rows whose names contain it
    python bench/attention_plan.py --toy               small sizes, in seconds; fails if a plan reads something else

CPU time on one thread, in microseconds. The first step plans all sequences; later ones, in each of which they grow, go
on with that plan. Fresh plans are made between them. Without `--toy` nothing is checked: tests do that.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quire.kernels.batch import PagedBatch
from quire.kernels.planner import AttentionPlanner
from quire.kernels.segments import StepPlan

PAGE = 16
SEED = 20
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """`sequences` of `context` tokens, the first `shared` of all of them being the same pages.

    `rows` new ones of each in a step, of which 1 to `rows` stay. `turnover` of the sequences end in each step and
    others come. `chunk` is new tokens of one more sequence, a prompt.
    """

    name: str
    sequences: int
    context: int
    scattered: bool = True
    shared: int = 0
    rows: int = 1
    turnover: int = 0
    chunk: int = 0
    window: int = 0


def cases(*, toy: bool) -> Iterator[Case]:
    """The rows of the table."""
    sizes, contexts = ((4, 8), (100, 600)) if toy else ((64, 256, 1024), (1024, 8192))
    for context in contexts:
        for sequences in sizes:
            name = f"decode-{sequences} {context}"
            yield Case(f"{name} scattered", sequences, context)
            yield Case(f"{name} contiguous", sequences, context, scattered=False)
    for sequences in sizes:
        usual = {"sequences": sequences, "context": contexts[0], "shared": contexts[0] // 4 // PAGE * PAGE}
        name = f"decode-{sequences} {contexts[0]} shared prefix"
        yield Case(name, **usual)
        yield Case(f"{name}, one ends and one comes", **usual, turnover=1)
        yield Case(f"{name}, a chunk beside", **usual, chunk=64 if toy else 512)
    for window in (64,) if toy else (128, 1024):
        for scattered in (True, False):
            name = f"decode-{sizes[1]} {contexts[1]} window {window} {'scattered' if scattered else 'contiguous'}"
            yield Case(name, sizes[1], contexts[1], scattered, window=window)
    for sequences in (8, sizes[0] if toy else 256):
        yield Case(f"verify-{sequences} {contexts[0]} five rows each", sequences, contexts[0], rows=5)


class Run:
    """The steps of a case."""

    def __init__(self, case: Case, steps: int) -> None:
        self.case = case
        self.random = np.random.default_rng(SEED)
        count = case.sequences + (case.chunk > 0)
        pages = (case.context + 64 + max(case.rows, case.chunk, 1) * (steps + 1)) // PAGE + 2
        order = np.arange(1, count * pages + 1, dtype=np.int32)
        if case.scattered:
            self.random.shuffle(order)
        self.frames = order.reshape(count, pages)
        self.frames[:, : case.shared // PAGE] = self.frames[0, : case.shared // PAGE]
        self.contexts = case.context + self.random.integers(0, 64, count).astype(np.int32)  # each where it likes
        self.ids = np.arange(count)
        self.planner = AttentionPlanner()

    def batch(self, planner: AttentionPlanner | None) -> PagedBatch:
        """The step as it is now."""
        rows = np.full(len(self.ids), self.case.rows, dtype=np.int32)
        if self.case.chunk:
            rows[-1] = self.case.chunk
        width = -(-int(self.contexts.max()) // PAGE)
        return PagedBatch(
            query_starts=np.concatenate(([0], np.cumsum(rows))).astype(np.int32),
            context_lens=self.contexts.copy(),
            frames=self.frames[:, :width].copy(),
            slots=np.zeros(int(rows.sum()), dtype=np.int32),
            page_size=PAGE,
            planner=planner or AttentionPlanner(),
            ids=self.ids,
        )

    def grow(self) -> None:
        """What happens between two steps."""
        case = self.case
        self.contexts += self.random.integers(1, case.rows + 1, len(self.ids)).astype(np.int32)
        if case.chunk:
            self.contexts[-1] += case.chunk - 1
        for _ in range(case.turnover):
            order = np.arange(len(self.ids))
            gone = int(self.random.integers(len(order)))
            order = np.append(np.delete(order, gone), gone)  # who comes is last in line, with the pages of who went
            self.frames, self.contexts, self.ids = self.frames[order], self.contexts[order], self.ids[order]
            self.contexts[-1] = case.context
            self.ids[-1] = self.ids.max() + 1


def timed(batch: PagedBatch, window: int) -> tuple[float, StepPlan]:
    """Microseconds of CPU to plan a batch, and the plan."""
    began = time.process_time_ns()
    plan = batch.plan(window, CPU)
    return (time.process_time_ns() - began) / 1e3, plan


def planned(case: Case, steps: int) -> Iterator[float]:
    """Microseconds of the first step, and of each of so many behind it that go on with its plan."""
    run = Run(case, steps)
    for _ in range(steps + 1):
        yield timed(run.batch(run.planner), case.window)[0]
        run.grow()


def measure(case: Case, steps: int, *, check: bool) -> dict[str, Any]:
    """One row of the table."""
    run, kept, fresh, problems = Run(case, steps), [], [], []
    gc.collect()
    gc.disable()
    try:
        for step in range(steps + 1):
            spent, plan = timed(run.batch(run.planner), case.window)
            kept.append(spent)
            if check or step % max(1, steps // 4) == 0:
                batch = run.batch(None)
                spent, other = timed(batch, case.window)
                fresh.append(spent)
                if check and reads(plan, batch) != reads(other, batch):
                    problems.append(f"{case.name}: step {step} reads other tokens than a fresh plan")
            run.grow()
    finally:
        gc.enable()
    first, later = kept[0], kept[1:]
    return {
        "name": case.name,
        "first_us": round(first, 1),
        "fresh_us": summary(fresh),
        "later_us": summary(later),
        "segments": len(plan.segments),
        "fresh_segments": len(other.segments),
        "problems": problems,
    }


def summary(samples: Sequence[float]) -> dict[str, float]:
    """Least, median and most."""
    found = {"min": min(samples), "median": statistics.median(samples), "max": max(samples)}
    return {name: round(value, 1) for name, value in found.items()}


def reads(plan: StepPlan, batch: PagedBatch) -> list[list[int]]:
    """The slots that each row sees, in order; a new row that is read as such counts as its negative number."""
    found: list[list[int]] = [[] for _ in range(batch.num_rows)]
    for segment in plan.segments:
        rows = torch.arange(batch.num_rows)[segment.rows].tolist()
        source = segment.source
        slots = torch.arange(source.start, source.stop) if source.index is None else source.index
        slots = -1 - slots if source.new else slots
        if not segment.batched:
            slots = slots[segment.start : segment.stop].expand(len(rows), -1)
            hidden = torch.zeros(slots.shape, dtype=torch.bool) if segment.mask is None else segment.mask < 0
            if segment.causal:
                hidden = torch.ones(slots.shape, dtype=torch.bool).triu(1)
        else:
            each = len(rows) // segment.batched
            slots = slots.view(segment.batched, -1).repeat_interleave(each, dim=0)
            hidden = (
                torch.zeros(slots.shape, dtype=torch.bool) if segment.mask is None else segment.mask.flatten(0, 1) < 0
            )
        for row, own, blind in zip(rows, slots, hidden, strict=True):
            found[row] += own[~blind].tolist()
    return [sorted(own) for own in found]


def table(result: dict[str, Any]) -> str:
    """The result as text, one line for each case."""
    lines = [
        f"{result['date']}, {result['cores']} cores, load {result['load']}; microseconds of CPU",
        f"{'':58} {'first':>8} {'fresh':>8} {'min':>7} {'median':>7} {'max':>7}  segments (fresh)",
    ]
    for row in result["rows"]:
        later = row["later_us"]
        lines.append(
            f"{row['name']:58} {row['first_us']:8.0f} {row['fresh_us']['min']:8.0f} {later['min']:7.0f} "
            f"{later['median']:7.0f} {later['max']:7.0f}  {row['segments']} ({row['fresh_segments']})"
        )
    return "\n".join([*lines, *(f"WRONG: {problem}" for problem in result["problems"])])


def main() -> int:
    """Measure, show and write; 1 if a plan was wrong."""
    parser = argparse.ArgumentParser(description="Compare kept plans of attention with fresh ones.")
    parser.add_argument("--only", default="", help="rows whose names contain this")
    parser.add_argument("--steps", type=int, help="after the first; default 70, with --toy 40")
    parser.add_argument("--toy", action="store_true", help="small sizes; exits 1 if a plan is wrong")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    steps = options.steps or (40 if options.toy else 70)
    chosen = [case for case in cases(toy=options.toy) if options.only in case.name]
    measure(next(cases(toy=True)), 3, check=False)  # imports and first calls do not count
    rows = [measure(case, steps, check=options.toy) for case in chosen]
    result = {
        "date": datetime.date.today().isoformat(),
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[1], 1),
        "steps": steps,
        "rows": rows,
        "problems": [problem for row in rows for problem in row.pop("problems")],
    }
    print(table(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
