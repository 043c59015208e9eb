"""NativeDecoder: all fused layers of a step in one call of the library.

Built at the first step, and again once weights or pools are others. Steps that it does not compute go layer by layer:
many rows where oneDNN multiplies tiles, other kernels, encoded pages, pages in host memory, plain weights.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol
from weakref import ReferenceType, WeakKeyDictionary, ref

from torch import Tensor

from quire.kernels.backend import AttentionBackend
from quire.kernels.batch import PagedBatch
from quire.kernels.native.decoder import LayerParts, NativeLayers
from quire.kernels.native.library import native
from quire.memory.pool import Pool
from quire.models.forward import LAST_HIDDEN, Forward, RunningForward, keep_hidden

Layers = Collection[int]
"""Layers whose outputs are kept, for a draft head; `LAST_HIDDEN` among them is left to the caller."""


class NativeLayer(Protocol):
    """A layer that may be computed by the library."""

    def parts(self) -> LayerParts | None: ...
    def has(self, parts: LayerParts) -> bool: ...


@dataclass(frozen=True, slots=True)
class _Built:
    """What was prepared for some pools, the layers from `first` on, and weights. `layers` is None where the library
    cannot compute them."""

    pools: list[ReferenceType[Pool]]
    first: int
    parts: list[LayerParts]
    layers: NativeLayers | None


class NativeDecoder:
    """The layers of one model. `is_on` is False where their results differ. Engines of several threads may share it,
    each with pools of its own: what was prepared belongs to pools, and is found by the first of them."""

    def __init__(self, layers: Sequence[NativeLayer]) -> None:
        self.is_on = True
        self.num_steps = 0
        self._layers = list(layers)
        self._built = WeakKeyDictionary[Pool, _Built]()

    def run(
        self,
        forward: Forward,
        hidden: Tensor,
        angles: tuple[Tensor, Tensor],
        read: Tensor | None = None,
        keeps: Layers = (),
    ) -> bool:
        """Compute all layers in place of `hidden` `[T, width]`, with `angles`, two of `[T, dim]`, and write their
        pages. What layers of `keeps` return is kept by `forward`. `read`: see `NativeLayers.compute`. Returns False,
        and changes nothing, if the library cannot compute the step."""
        count = hidden.shape[0]
        if not self.is_on or type(forward) is not RunningForward:
            return False  # a subclass may look at each layer
        batches = [batch for batch in forward.batches if isinstance(batch, PagedBatch)]
        if len(batches) < len(forward.batches) or any(batch.num_rows != count for batch in batches):
            return False
        built = self._built.get(forward.pools[0])
        if built is None or not self._is_current(built, forward):
            built = self._built[forward.pools[0]] = self._build(forward, batches[0].backend)
        if built.layers is None or count > built.layers.most_rows:
            return False
        if batches[0].backend.native(len(self._layers)) is None:
            return False
        kept = {layer: hidden.new_empty(hidden.shape) for layer in keeps if layer != LAST_HIDDEN}
        built.layers.compute(hidden, angles[0], angles[1], batches, read, kept)
        for layer, states in kept.items():
            keep_hidden(forward, layer, states)
        forward.ordinal += len(self._layers)
        self.num_steps += 1
        return True

    def _is_current(self, built: _Built, forward: RunningForward) -> bool:
        """Whether it is of these pools and of the weights of now."""
        return (
            built.first == forward.ordinal
            and len(built.pools) == len(forward.pools)
            and all(known() is pool for known, pool in zip(built.pools, forward.pools, strict=True))
            and len(built.parts) == len(self._layers)
            and all(layer.has(parts) for layer, parts in zip(self._layers, built.parts, strict=True))
        )

    def _build(self, forward: RunningForward, backend: AttentionBackend) -> _Built:
        """Prepare for these pools and weights."""
        pools, first = [ref(pool) for pool in forward.pools], forward.ordinal
        found = [parts for layer in self._layers if (parts := layer.parts()) is not None]
        library, attention = native().library, backend.native(0)
        if len(found) < len(self._layers) or library is None or attention is None:
            return _Built(pools, first, [], None)
        fields = [forward.fields(first + at) for at in range(len(found))]
        can_run = NativeLayers.can_run(found, fields)
        return _Built(pools, first, found, NativeLayers(library, attention, found, fields) if can_run else None)
