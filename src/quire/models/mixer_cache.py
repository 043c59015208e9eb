"""The caches that transformers' recurrent layers get: states read from a pool, or the shapes of a dry run.

Both have the methods of a `Cache` that the layers use, for one call of one layer; the layer's number is ignored. A
convolution of kernel k is stored as its last k - 1 inputs, the k-th being the new one.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from quire.errors import UnsupportedModel
from quire.spec.layers import StateCall
from quire.spec.layout import DType


class MixerStates:
    """The states of the pieces of one call: `conv` `[pieces, channels, kernel - 1]`, `ssm` `[pieces, heads, *matrix]`.

    Either is None if the layer has none. The layer may change them in place; afterwards they are the new states.
    """

    def __init__(self, conv: Tensor | None = None, ssm: Tensor | None = None) -> None:
        self.conv = conv
        self.ssm = ssm

    @property
    def layers(self) -> defaultdict[int, SimpleNamespace]:
        """One layer under every number; transformers up to 5.17 reads states there."""
        layer = SimpleNamespace(conv_states=(self.conv,), recurrent_states=(self.ssm,), record_past=False)
        return defaultdict(lambda: layer)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The last inputs of the convolution."""
        return self.conv

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The state of the recurrence."""
        return self.ssm

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Always True: at the start of a sequence the states are zeros, which is correct."""
        return True

    def is_recording_past(self, layer_idx: int) -> bool:
        """Always False: a state is stored for the end of a piece only."""
        return False

    def recurrence(self, rows: Tensor, *shape: int) -> Tensor:
        """The state of a recurrence of `shape`, float32 `[pieces, *shape]`, before `rows` `[pieces, S, hidden]`."""
        assert self.ssm is not None
        return self.ssm

    def update_conv_state(self, conv_states: Tensor, layer_idx: int = 0, state_idx: int = 0, **_: Any) -> Tensor:
        """Append inputs `[pieces, channels, S]`; returns them after the stored ones."""
        if self.conv is None:  # a kernel of 1 reads no earlier input
            return conv_states
        kept = self.conv.shape[-1]
        inputs = torch.cat((self.conv, conv_states), dim=-1)
        self.conv = inputs[..., -kept:]
        return inputs

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int = 0, state_idx: int = 0, **_: Any
    ) -> Tensor:
        """Replace the state of the recurrence."""
        self.ssm = recurrent_states
        return recurrent_states


class RecordedStates(MixerStates):
    """The cache of a dry run: no tokens came before, and stored values are only inspected."""

    def __init__(self) -> None:
        super().__init__()
        self._found: dict[str, Any] = {}

    def call(self, state_dtype: DType) -> StateCall:
        """The stored sizes of the layer, its recurrence as `state_dtype`."""
        return StateCall(**self._found, state_dtype=state_dtype)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return False

    def recurrence(self, rows: Tensor, *shape: int) -> Tensor:
        return torch.zeros(len(rows), *shape, device=rows.device)

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int = 0, state_idx: int = 0, *, conv_kernel_size: int = 1, **_: Any
    ) -> Tensor:
        """Record the channels and the kernel; returns the inputs after zeros."""
        self._refuse_several(state_idx)
        self._found |= {"channels": conv_states.shape[1], "kernel": conv_kernel_size}
        return torch.nn.functional.pad(conv_states, (conv_kernel_size - 1, 0))

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int = 0, state_idx: int = 0, **_: Any
    ) -> Tensor:
        """Record the heads and the shape of each one's state."""
        self._refuse_several(state_idx)
        self._found |= {"heads": recurrent_states.shape[1], "matrix": tuple(recurrent_states.shape[2:])}
        return recurrent_states

    def _refuse_several(self, state_idx: int) -> None:
        if state_idx:
            raise UnsupportedModel(
                f"a recurrent layer keeps {state_idx + 1} or more states side by side; one is held here.",
                fix="use a model type listed as verified.",
            )
