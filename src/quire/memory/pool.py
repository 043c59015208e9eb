"""Pool: the tensors that hold the frames of one (group, tier). One class for every layout; it never allocates ids."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from quire.errors import HostMemoryError, PlanError
from quire.memory.mapping import reserve, touch
from quire.spec.layout import DType, Field, PageLayout

_LARGE = 4 * 2**20
"""Bytes of a tensor from which on the system has huge pages for it."""


def torch_dtype(dtype: DType) -> torch.dtype:
    """The torch element type of a layout's element type."""
    found = getattr(torch, dtype.value)
    assert isinstance(found, torch.dtype)
    return found


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or num_bytes < _LARGE:
        return torch.zeros(shape, dtype=dtype, device=device)
    # Frames are read here and there, each from another page of the system's; in huge pages most of them are at hand.
    memory = torch.frombuffer(reserve(num_bytes), dtype=torch.uint8)
    touch(memory.numpy())
    return memory.view(dtype).view(shape)


class Arriving(Protocol):
    """Bytes on their way into frames, layer by layer."""

    def wait_layer(self, layer: int) -> None:
        """Return when the layer is there."""


class Pool:
    """Device tensors for frames `0..num_frames`, built from a layout, layer-major.

    Each field is one tensor `[len(field.layers), num_frames + 1, entries, *field.shape]`. Frame 0 is the sink that
    padded tokens write to; it is never handed out and is part of the price. Contents are zero at start.
    """

    def __init__(self, layout: PageLayout, num_frames: int, *, device: torch.device | str = "cpu") -> None:
        self.layout = layout
        self.num_frames = num_frames
        self.device = torch.device(device)
        self._fields: list[tuple[Field, Tensor]] = []
        self._layers: dict[tuple[str, int], Tensor] = {}
        self.arriving: Sequence[Arriving] = ()  # loads that the step being launched reads, layer by layer
        self._field_of: dict[tuple[str, int], Field] = {}
        try:
            for field in layout.fields:
                self._build(field)
        except (RuntimeError, MemoryError, HostMemoryError) as error:
            raise PlanError(
                f"the KV pool of {num_frames + 1} frames of {layout.bytes_per_frame} bytes could not be allocated on "
                f"{self.device}: {error}",
                fix="lower the KV memory.",
            ) from error

    def _build(self, field: Field) -> None:
        shape = (len(field.layers), self.num_frames + 1, field.entries(self.layout.page_size), *field.shape)
        tensor = _zeros(shape, torch_dtype(field.dtype), self.device)
        self._fields.append((field, tensor))
        for index, layer in enumerate(field.layers):
            self._layers[field.name, layer] = tensor[index]
            self._field_of[field.name, layer] = field

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, frame 0 included."""
        return sum(tensor.nbytes for _, tensor in self._fields)

    @property
    def tensors(self) -> tuple[tuple[Field, Tensor], ...]:
        """The fields in the order of the layout, each with its tensor `[layers, num_frames + 1, entries, *shape]`."""
        return tuple(self._fields)

    def layer(self, name: str, layer: int) -> Tensor:
        """`[num_frames + 1, entries, *shape]` of one layer: a view, for kernels to read and write in place.

        Waits until what is `arriving` of that layer is there. Raises what the load raises if it has failed.
        """
        for load in self.arriving:
            load.wait_layer(layer)
        return self._layers[name, layer]

    def field(self, name: str, layer: int) -> Field:
        """The field `name` that `layer` owns."""
        return self._field_of[name, layer]

    def has(self, name: str, layer: int) -> bool:
        """Whether `layer` owns a field `name` here."""
        return (name, layer) in self._layers
