"""StateBatch: reads and writes the recurrent states of one step by frame."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from quire.kernels.moves import TORCH, Moves
from quire.kernels.slots import Slots
from quire.spec.ids import Ids
from quire.upload import to_device


@dataclass(frozen=True, slots=True, eq=False)
class StateRun:
    """Pieces of one length that are computed together: `count` pieces of `length` rows each, in the order of `rows`.

    `sources` and `targets` are int64 `[count]` on the device, the frames of their states before and after.
    """

    rows: slice | Tensor  # rows of the flat batch: consecutive ones, or int64 `[n]` on the device
    count: int
    length: int
    sources: Tensor
    targets: Tensor


@dataclass(slots=True, eq=False)
class StateBatch:
    """The rows of one step in *pieces*, for one group of states. Host arrays, shared by all layers.

    A piece is a run of consecutive rows of one sequence. Rows `starts[i]:starts[i + 1]` (int32 `[pieces + 1]`) read the
    state in frame `sources[i]` (int32; 0: none, the state is all zeros) and write theirs to frame `targets[i]`, which
    may be the same frame. The pieces of one sequence are neighbours, in order, and a piece may read the state that the
    piece before it wrote: a sequence that stores a checkpoint is cut there. No other two pieces of a step share a frame
    that one of them writes. Rows from `starts[-1]` on are padding, and so are the last `pads` pieces, which read none
    and write to frame 0. `moves` reads and writes states.
    """

    starts: Ids
    sources: Ids
    targets: Ids
    pads: int = field(default=0, kw_only=True)
    moves: Moves = field(default=TORCH, kw_only=True)
    _runs: dict[torch.device, tuple[StateRun, ...]] = field(default_factory=dict, repr=False, init=False)

    def __post_init__(self) -> None:
        assert len(self.starts) == len(self.sources) + 1 == len(self.targets) + 1
        assert not np.count_nonzero(self.starts[1:] <= self.starts[:-1]), "a piece has rows"
        assert not np.count_nonzero(self.targets[: len(self.targets) - self.pads] <= 0), "frame 0 holds no state"

    def padded(self, size: int) -> StateBatch:
        """This batch, whose pieces have one row each, and pads up to `size`: for a CUDA graph of `size` rows."""
        pads = size - len(self.sources)
        assert self.starts[-1] == len(self.sources) <= size
        more = np.zeros(pads, dtype=np.int32)
        sources, targets = (np.concatenate((frames, more)) for frames in (self.sources, self.targets))
        return StateBatch(np.arange(size + 1, dtype=np.int32), sources, targets, pads=pads, moves=self.moves)

    def runs(self, device: torch.device) -> tuple[StateRun, ...]:
        """The pieces as runs, each after those whose states it reads. Built once per step.

        Pieces of one row that depend on no piece, or on the same round of pieces, are one run. Longer pieces are runs
        of their own, so that the result of a sequence does not depend on the lengths of others.
        """
        found = self._runs.get(device)
        if found is None:
            found = self._runs[device] = tuple(self._plan(device))
        return found

    def _plan(self, device: torch.device) -> list[StateRun]:
        own_sources, own_targets = self.sources.astype(np.int64), self.targets.astype(np.int64)
        sources, targets = to_device(own_sources, device), to_device(own_targets, device)
        starts, rounds = self.starts.astype(np.int64), self._rounds()
        lengths = np.diff(starts)
        runs: list[StateRun] = []
        for number in range(int(rounds.max(initial=-1)) + 1):
            single = np.flatnonzero((rounds == number) & (lengths == 1))
            if len(single):
                rows, frames = _row_index(starts[single], device), (own_sources[single], own_targets[single])
                runs.append(StateRun(rows, len(single), 1, *(to_device(each, device) for each in frames)))
            for piece in np.flatnonzero((rounds == number) & (lengths > 1)).tolist():
                own = slice(piece, piece + 1)
                runs.append(
                    StateRun(
                        slice(*starts[piece : piece + 2].tolist()), 1, int(lengths[piece]), sources[own], targets[own]
                    )
                )
        return runs

    def _rounds(self) -> Ids:
        """Per piece, how many pieces must be computed before it because it reads their states."""
        rounds = np.zeros(len(self.sources), dtype=np.int32)
        follows = (self.sources[1:] == self.targets[:-1]) & (self.sources[1:] != 0)
        for piece in np.flatnonzero(follows).tolist():
            rounds[piece + 1] = rounds[piece] + 1
        return rounds


def _row_index(rows: Slots, device: torch.device) -> slice | Tensor:
    """Numbers int64, ascending, as an index: a slice if they are consecutive."""
    if int(rows[-1]) - int(rows[0]) == len(rows) - 1 and (np.diff(rows) == 1).all():
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return to_device(rows, device)
