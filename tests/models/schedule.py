"""Schedule: token sequences in mixed, chunked, batched steps on scattered frames, group by group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.kernels.batch import PagedBatch
from quire.memory.pool import Pool
from quire.models.forward import RunningForward
from quire.models.hf import LoadedModel
from quire.spec.group import GroupSpec, ReachSpec
from quire.spec.pages import pages_for
from tests.tiny_models import VOCAB_SIZE

PAGE_SIZE = 4
SHARED = 8
"""Tokens that c has in common with a; it starts after them, on a's frames."""

Step = Mapping[str, tuple[int, int]]

STEPS: Sequence[Step] = (
    {"a": (0, 20)},
    {"a": (20, 21), "b": (0, 11)},
    {"c": (8, 15), "a": (21, 26), "b": (11, 27)},
    {"c": (15, 28), "b": (27, 28), "a": (26, 31)},
    {"a": (31, 32), "b": (28, 29), "c": (28, 29)},
    {"c": (29, 30)},
)
"""Per step, the positions that each sequence computes."""


def long_steps(length: int, *, shared: int = 64) -> Sequence[Step]:
    """The same kinds of steps for sequences of about `length` tokens; the first `shared` of c are a's."""
    third = length // 3
    return (
        {"a": (0, 2 * third)},
        {"a": (2 * third, 2 * third + 1), "b": (0, third + 5)},
        {"c": (shared, third + 70), "a": (2 * third + 1, length - 2), "b": (third + 5, length - 9)},
        {"c": (third + 70, length - 3), "b": (length - 9, length - 8), "a": (length - 2, length - 1)},
        {"a": (length - 1, length), "b": (length - 8, length - 7), "c": (length - 3, length - 2)},
        {"c": (length - 2, length - 1)},
    )


@dataclass
class Frames:
    """The frames of one group: a table per sequence, and a pool in which all that was not written is NaN."""

    group: GroupSpec
    pool: Pool
    tables: dict[str, np.ndarray]

    def erase_beyond_reach(self, positions: Mapping[str, int]) -> None:
        """Forget every page that no sequence can read any more, the next row of each being at `positions`."""
        needed: set[int] = set()
        for name, position in positions.items():
            gone = first_read(self.group.reach, position) // self.group.layout.page_size
            self.tables[name][:gone] = 0
            needed.update(self.tables[name][gone:].tolist())
        lost = sorted(set(range(self.pool.num_frames + 1)) - needed)
        for field in self.group.layout.fields:
            for layer in field.layers:
                self.pool.layer(field.name, layer)[lost] = torch.nan


def first_read(reach: ReachSpec, position: int) -> int:
    """The first position that a row at `position` may read."""
    if reach.kind == "window":
        return max(0, position - reach.tokens + 1)
    return position - position % reach.tokens if reach.kind == "chunk" else 0


class Schedule:
    """Three sequences, and the run of all steps. Where c starts is a multiple of the page size."""

    def __init__(self, steps: Sequence[Step] = STEPS, *, page_size: int = PAGE_SIZE) -> None:
        self.steps = steps
        self.page_size = page_size
        self.lengths = {name: max(step[name][1] for step in steps if name in step) for name in "abc"}
        self.shared = next(step["c"][0] for step in steps if "c" in step)
        assert self.shared % page_size == 0
        generator = np.random.default_rng(7)
        self.tokens = {name: generator.integers(0, VOCAB_SIZE - 1, length) for name, length in self.lengths.items()}
        self.tokens["c"][: self.shared] = self.tokens["a"][: self.shared]

    def frames(self, model: LoadedModel) -> list[Frames]:
        """Frames for every group of `model`, each in an order of its own, so that another group's table shows."""
        return [self._frames(group, seed) for seed, group in enumerate(model.spec.groups(self.page_size))]

    def _frames(self, group: GroupSpec, seed: int) -> Frames:
        pages = {name: pages_for(length, self.page_size) for name, length in self.lengths.items()}
        total = sum(pages.values()) + 3
        order = iter(np.random.default_rng(seed).permutation(np.arange(1, total + 1)).tolist())
        tables = {name: np.array([next(order) for _ in range(count)], dtype=np.int32) for name, count in pages.items()}
        begin = self.shared // self.page_size
        tables["c"][:begin] = tables["a"][:begin]
        pool = Pool(group.layout, total)
        for _, tensor in pool.tensors:
            tensor.fill_(torch.nan)
        return Frames(group, pool, tables)

    def largest_error(self, model: LoadedModel, reference: torch.nn.Module) -> float:
        """Between all logits of all steps and those of `reference`; NaN where memory was read that was not written."""
        with torch.inference_mode():
            plain = {n: reference(torch.from_numpy(t)[None], use_cache=False).logits[0] for n, t in self.tokens.items()}
        frames = self.frames(model)
        positions = {name: self.shared if name == "c" else 0 for name in self.lengths}
        errors = []
        for step in self.steps:
            logits = self.run(model, frames, step)
            wanted = torch.cat([plain[name][start:stop] for name, (start, stop) in step.items()])
            errors.append(float((logits - wanted.float()).abs().max()))
            positions.update({name: stop for name, (_, stop) in step.items()})
            for group in frames:
                group.erase_beyond_reach(positions)
        return max(errors, key=lambda error: (np.isnan(error), error))

    def run(self, model: LoadedModel, frames: Sequence[Frames], step: Step, rows: Tensor | None = None) -> Tensor:
        """Logits of the given rows of one step, of all by default."""
        ids = np.concatenate([self.tokens[name][start:stop] for name, (start, stop) in step.items()])
        positions = np.concatenate([np.arange(start, stop) for start, stop in step.values()])
        rows = torch.arange(len(ids)) if rows is None else rows
        running = RunningForward([group.pool for group in frames], [self._batch(group, step) for group in frames])
        return model.run(running, torch.from_numpy(ids), torch.from_numpy(positions), rows)

    def _batch(self, frames: Frames, step: Step) -> PagedBatch:
        tables = [frames.tables[name] for name in step]
        widest = max(map(len, tables))
        starts, stops = np.array(list(step.values())).T
        frames_of = np.stack([np.pad(table, (0, widest - len(table))) for table in tables]).astype(np.int32)
        return PagedBatch.of(frames_of, starts, stops, self.page_size)
