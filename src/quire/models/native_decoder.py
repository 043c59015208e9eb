"""NativeDecoder: all fused layers of a step of few rows in one call of the library.

Built at the first step, and again once weights or pools are others. Steps that it does not compute go layer by layer:
many rows, other kernels, encoded pages, pages in host memory, plain weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol
from weakref import ReferenceType, ref

from torch import Tensor

from quire.kernels.backend import AttentionBackend
from quire.kernels.batch import PagedBatch
from quire.kernels.native.decoder import MOST_ROWS, LayerParts, NativeLayers
from quire.kernels.native.library import native
from quire.memory.pool import Pool
from quire.models.forward import Forward, RunningForward


class NativeLayer(Protocol):
    """A layer that may be computed by the library."""

    def parts(self) -> LayerParts | None: ...
    def has(self, parts: LayerParts) -> bool: ...


class NativeDecoder:
    """The layers of one model. `is_on` is False where their results differ."""

    def __init__(self, layers: Sequence[NativeLayer]) -> None:
        self.is_on = True
        self.num_steps = 0
        self._layers = list(layers)
        self._parts: list[LayerParts] = []
        self._built: NativeLayers | None = None
        self._where: tuple[list[ReferenceType[Pool]], int] = [], 0

    def run(self, forward: Forward, hidden: Tensor, cos: Tensor, sin: Tensor) -> bool:
        """Compute all layers in place of `hidden` `[T, width]`, with angles `[T, dim]`, and write their pages. Returns
        False, and changes nothing, if the library cannot compute the step."""
        if not self.is_on or len(hidden) > MOST_ROWS or not isinstance(forward, RunningForward):
            return False
        batches = [batch for batch in forward.batches if isinstance(batch, PagedBatch)]
        if len(batches) < len(forward.batches) or any(batch.num_rows != len(hidden) for batch in batches):
            return False
        if not self._is_current(forward) and not self._build(forward, batches[0].backend):
            return False
        if self._built is None or batches[0].backend.native(len(self._layers)) is None:
            return False
        self._built.compute(hidden, cos, sin, batches)
        forward.ordinal += len(self._layers)
        self.num_steps += 1
        return True

    def _is_current(self, forward: RunningForward) -> bool:
        """Whether what was built last is of these pools and of the weights of now."""
        pools, first = self._where
        return (
            first == forward.ordinal
            and len(pools) == len(forward.pools)
            and all(known() is pool for known, pool in zip(pools, forward.pools, strict=True))
            and len(self._parts) == len(self._layers)
            and all(layer.has(parts) for layer, parts in zip(self._layers, self._parts, strict=True))
        )

    def _build(self, forward: RunningForward, backend: AttentionBackend) -> bool:
        """Prepare for these pools and weights; whether the library can compute them."""
        self._built, self._parts = None, []
        found = [parts for layer in self._layers if (parts := layer.parts()) is not None]
        library, attention = native().library, backend.native(0)
        if len(found) < len(self._layers) or library is None or attention is None:
            return False
        fields = [forward.fields(forward.ordinal + at) for at in range(len(found))]
        self._parts, self._where = found, ([ref(pool) for pool in forward.pools], forward.ordinal)
        if NativeLayers.can_run(found, fields):
            self._built = NativeLayers(library, attention, found, fields)
        return self._built is not None
