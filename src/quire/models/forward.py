"""The current forward pass: what model code, called by transformers, reads from the pools and writes to them.

States of the context variable: unset (a call is an error), recording (calls are described and answered with zeros, no
pool exists yet), running (calls store their data in the pools and read from there). Pools are keyed by the ordinal of
the call within the forward pass: layers may share a module, and a module may be called twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from quire.errors import UnsupportedModel
from quire.kernels.batch import PagedBatch
from quire.kernels.fields import LatentFields, PagedField, Writer
from quire.kernels.moves import Pieces
from quire.kernels.native.decoder import LayerFields
from quire.kernels.page_bounds import PageBounds
from quire.kernels.state import StateBatch
from quire.memory.pool import Pool
from quire.sparse.coordinator import hot_buffers_of
from quire.spec.layers import KEY_BOUNDS, Call
from quire.spec.layout import scales_of

HIDDEN = "hidden"
"""Key of the hidden states that a pass keeps, by layer, each `[T, hidden]`, in what layers share."""

LAST_HIDDEN = -1
"""In place of a layer: the hidden states that the output layer reads."""


class RunningForward:
    """One forward pass on the pools: `pools[i]` holds the frames of group i and `batches[i]` says which to use.

    `first` is the ordinal of its first call: 0, or for the layers of a draft, the number of calls of its target. If a
    pool is in host memory, rows that decode read its hot buffers, which `hisparse` fills.
    """

    def __init__(self, pools: Sequence[Pool], batches: Sequence[PagedBatch | StateBatch], *, first: int = 0) -> None:
        self.hisparse = hot_buffers_of(pools)
        self.pools, self.batches = tuple(pools), tuple(batches)
        self._groups = tuple(zip(pools, batches, strict=True))
        self.first = self.ordinal = first
        self.shared: dict[str, Any] = {}  # what layers share with later ones of this pass, by their kind
        self.others: tuple[RunningForward, ...] = ()  # passes over the same tokens that write to other pools
        self.keeps_output = False  # whether the decoder's output is kept, for `LoadedModel.more_logits`
        self.output: Any = None

    def next_ordinal(self) -> int:
        """The ordinal of the call that begins now."""
        ordinal, self.ordinal = self.ordinal, self.ordinal + 1
        return ordinal

    def captured(self, layers: Sequence[int]) -> Tensor:
        """What `LoadedModel.capture` kept of these layers in this pass, side by side, `[T, layers * hidden]`."""
        found: list[Tensor] = [self.shared[HIDDEN][layer] for layer in layers]
        return found[0] if len(found) == 1 else torch.cat(found, dim=-1)

    def attend(self, attention: Callable[[RunningForward], Tensor]) -> Tensor:
        """The output of `attention`, one call, on these pools."""
        return attention(self)

    def rows(self, name: str, ordinal: int) -> tuple[PagedField, PagedBatch]:
        """The rows of a field with entries per token, and the batch of its group."""
        pool, batch = self._find(name, ordinal)
        return paged_field(pool, name, ordinal, batch.backend.writer), batch

    def fields(self, ordinal: int) -> LayerFields:
        """The keys and values of a call, and the number of its group."""
        (keys, batch), (values, _) = self.rows("k", ordinal), self.rows("v", ordinal)
        return LayerFields(keys, values, next(at for at, each in enumerate(self.batches) if each is batch))

    def latents(self, ordinal: int, prefix: str = "") -> tuple[LatentFields, PagedBatch]:
        """The fields of a call's latents and rotary keys, and the batch of their group."""
        latents, batch = self.rows(f"{prefix}latent", ordinal)
        return LatentFields(latents, self.rows(f"{prefix}rope", ordinal)[0]), batch

    def hot_rows(self, name: str, ordinal: int) -> PagedField:
        """The rows of a field in hot buffers."""
        assert self.hisparse is not None
        return paged_field(self.hisparse.pool, name, ordinal)

    def page_bounds(self, ordinal: int) -> tuple[PageBounds, PagedBatch] | None:
        """The bounds of the keys of a call's pages, and the batch of their group; None if the call reads all pages."""
        if self.hisparse is None or not any(pool.has(KEY_BOUNDS[0], ordinal) for pool, _ in self._groups):
            return None
        (low, batch), (high, _) = (self.per_page(name, ordinal) for name in KEY_BOUNDS)
        return PageBounds(low, high), batch

    def per_page(self, name: str, ordinal: int) -> tuple[Tensor, PagedBatch]:
        """The pool's layer of a field with one entry per page, `[frames, *shape]`, and the batch of its group."""
        pool, batch = self._find(name, ordinal)
        return pool.layer(name, ordinal).squeeze(1), batch

    def states(self, ordinal: int) -> tuple[dict[str, Tensor], StateBatch]:
        """The pool's layer of each field of states of a call, by name, and the batch of their group."""
        for pool, batch in self._groups:
            if isinstance(batch, StateBatch):
                found = {
                    field.name: pool.layer(field.name, ordinal)
                    for field in pool.layout.fields
                    if pool.has(field.name, ordinal)
                }
                if found:
                    return found, batch
        raise AssertionError(f"call {ordinal} of the forward pass keeps no states")

    def _find(self, name: str, ordinal: int) -> tuple[Pool, PagedBatch]:
        for pool, batch in self._groups:
            if isinstance(batch, PagedBatch) and pool.has(name, ordinal):
                return pool, batch
        raise AssertionError(f"call {ordinal} of the forward pass keeps no '{name}'")


def paged_field(pool: Pool, name: str, ordinal: int, writer: Writer | None = None) -> PagedField:
    """A field of a call, stored as its pool's layout says, with the field of its scales if it has any. On a device its
    rows are written by `writer`. The same each time, so that kernels prepare their calls once."""
    key = name, ordinal, writer
    known = _fields.get(pool)
    if known is None:
        known = _fields[pool] = {}
    found = known.get(key)
    if found is None:
        found = known[key] = _new_field(pool, name, ordinal, writer)
    return found


_fields: WeakKeyDictionary[Pool, dict[tuple[str, int, Writer | None], PagedField]] = WeakKeyDictionary()


def _new_field(pool: Pool, name: str, ordinal: int, writer: Writer | None) -> PagedField:
    kv_format = pool.field(name, ordinal).kv_format
    scaled = kv_format is not None and kv_format.scale is not None
    scales = pool.layer(scales_of(name), ordinal) if scaled else None
    return PagedField(pool.layer(name, ordinal), scales, kv_format, writer=writer, reader=pool.reader)


def slots_of(pool: Pool) -> Pieces:
    """What the slots of a pool have, in every field and layer. Raises UnsupportedModel if a field has no entry for each
    token."""
    for field in pool.layout.fields:
        if field.per != 1:
            raise UnsupportedModel(
                f"accepted drafts cannot be moved: an entry of field '{field.name}' is not that of one token.",
                fix="propose one draft per position (topk 1) for this model.",
            )
    place, parts = 0, []
    for _, tensor in pool.tensors:
        rows = tensor.unsqueeze(-1).flatten(3).view(torch.uint8)
        parts.append((place, rows))
        place += len(rows) * rows.shape[3]
    return Pieces.of(parts, place)


class RecordingForward:
    """A dry run that records the calls of a forward pass."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.shared: dict[str, Any] = {}

    def note(self, call: Call) -> None:
        """The description of the current call. Its output may have any values of the right shape."""
        self.calls.append(call)


class ProbingForward(RecordingForward):
    """A dry run that shows what layers do: attention mixes what it is given, and that is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.attended: list[tuple[Tensor, Tensor, Tensor, Any]] = []

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: Any) -> Tensor:
        """An output `[T, heads, value_dim]` that depends on all three, `[T, heads, dim]`."""
        self.attended.append((query.clone(), key.clone(), value.clone(), options))
        of = torch.arange(query.shape[1], device=query.device) * key.shape[1] // query.shape[1]
        near = (query * key[:, of]).mean(-1, keepdim=True)
        return (1 + torch.tanh(near)) * value[:, of]


Forward = RunningForward | RecordingForward


def keep_hidden(forward: Forward, layer: int, states: Tensor) -> None:
    """What a layer returned in this pass, `[T, hidden]`, for `RunningForward.captured`."""
    forward.shared.setdefault(HIDDEN, {})[layer] = states


_forward: ContextVar[Forward | None] = ContextVar("quire_forward", default=None)


@contextmanager
def forward_pass(forward: Forward) -> Iterator[None]:
    """Calls of model code inside the block belong to `forward`."""
    token = _forward.set(forward)
    try:
        yield
    finally:
        _forward.reset(token)


def in_forward() -> bool:
    """Whether a forward pass on the pools is running. Outside one, a model computes with its own code alone."""
    return _forward.get() is not None


def current_forward() -> Forward:
    """The forward pass that is running. Raises RuntimeError outside one."""
    forward = _forward.get()
    if forward is None:
        raise RuntimeError("a model on Quire's pools runs only inside LoadedModel.run")
    return forward
