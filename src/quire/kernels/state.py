"""StateBatch: where the recurrent states of one step come from and where they go. Reads and writes pools by frame."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from quire.spec.ids import Ids


@dataclass(slots=True, eq=False)
class StateBatch:
    """The rows of one step in *pieces*, for one group of states. Host arrays, shared by all layers.

    A piece is a run of consecutive rows of one sequence. Rows `starts[i]:starts[i + 1]` (int32 `[pieces + 1]`) begin
    with the state in frame `sources[i]` (int32; 0: none, the state is all zeros) and leave theirs in frame
    `targets[i]`, which may be the same frame. The pieces of one sequence are neighbours, in order, and a piece may
    begin with what the piece before it left: a sequence that leaves a state on its way is cut there. No other two
    pieces of a step share a frame that one of them writes.
    """

    starts: Ids
    sources: Ids
    targets: Ids
    _on_device: dict[tuple[str, torch.device], Tensor] = field(default_factory=dict, repr=False, init=False)

    def __post_init__(self) -> None:
        assert len(self.starts) == len(self.sources) + 1 == len(self.targets) + 1
        assert (self.targets > 0).all(), "frame 0 is nobody's state"

    def on(self, name: str, device: torch.device) -> Tensor:
        """`sources` or `targets` as int64 on `device`; copied there once per step."""
        found = self._on_device.get((name, device))
        if found is None:
            array: Ids = getattr(self, name)
            found = self._on_device[name, device] = torch.from_numpy(array.astype("int64")).to(
                device, non_blocking=True
            )
        return found


def read_states(pool_layer: Tensor, sources: Tensor) -> Tensor:
    """States `[pieces, *shape]`, a copy, of `pool_layer` `[frames, 1, *shape]`; zeros where the source is frame 0."""
    states = pool_layer[sources, 0]
    absent = (sources == 0).view(-1, *(1,) * (states.dim() - 1))
    return states.masked_fill_(absent, 0)


def write_states(pool_layer: Tensor, targets: Tensor, states: Tensor) -> None:
    """Store `states` `[pieces, *shape]` in frames `targets` of `pool_layer`, converted to its element type."""
    pool_layer[targets, 0] = states.to(pool_layer.dtype)
