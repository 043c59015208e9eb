"""KVError: what it costs a model to keep its cache in a KV format, measured on a prompt: call by call, and at the end.

A plain pass over the prompt stores every key, value and latent plainly, and beside that in each format, and computes
each call on both from the same inputs: the error of a call is its own, not one that earlier layers handed on. A second
pass computes on what the format kept alone, as a server would: its logits have the errors of all layers, and those of
tokens that a layer no longer selects.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.errors import InvalidInput
from quire.kernels.batch import PagedBatch
from quire.kernels.codec import largest_of
from quire.kernels.state import StateBatch
from quire.memory.pool import Pool, torch_dtype
from quire.models.forward import ComparingForward, RunningForward, stored_rows
from quire.models.hf import LoadedModel
from quire.spec.group import GroupSpec
from quire.spec.ids import Ids
from quire.spec.kv_format import KVFormat, plain_format
from quire.spec.layout import Field
from quire.spec.pages import pages_for

_PAGE_SIZE = 16  # or more, where a page must hold a block of tokens that share an entry
_CHUNK = 256  # tokens of one step, whose logits are held twice


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldError:
    """What one field of one call lost: `relative` is the norm of all differences over the norm of the numbers.

    `largest` is the largest difference of one number, `magnitude` the largest number. `saturated` numbers were beyond
    what the format holds, `zeroed` ones became zero, `nan` ones NaN, of `count`.
    """

    name: str
    relative: float
    largest: float
    magnitude: float
    saturated: int
    zeroed: int
    nan: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CallError:
    """One call, `ordinal` of the forward pass, in `layer`: its fields, and its output relative to that from plain ones.

    The output tells what the fields cannot: keys with a few large channels lose little of their norm and much of what
    tells one from another.
    """

    ordinal: int
    layer: int
    fields: tuple[FieldError, ...]
    output: float

    @property
    def worst(self) -> float:
        """The largest relative error, of a field or of the output; NaN where any is."""
        return float(np.max([self.output, *(field.relative for field in self.fields)]))


@dataclass(frozen=True, slots=True, kw_only=True)
class KVError:
    """One format. `logits` is the relative error of all logits, `kept_share` the share of positions whose most likely
    token stays the same, `same_next_token` whether the one after the prompt does. Bytes are those of one token.
    """

    kv_format: KVFormat
    num_tokens: int
    bytes_per_token: float
    plain_bytes_per_token: float
    calls: tuple[CallError, ...]
    logits: float
    kept_share: float
    same_next_token: bool

    def above(self, most: float) -> tuple[CallError, ...]:
        """The calls with an error above `most`, or NaN."""
        return tuple(call for call in self.calls if not call.worst <= most)


@torch.inference_mode()
def measure_kv_errors(
    model: LoadedModel,
    formats: Sequence[KVFormat],
    token_ids: Ids,
    *,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[KVError, ...]:
    """One error per format, from `token_ids` int32 `[n]`. `on_progress(steps done, steps in all)` is called as it goes.

    Holds the prompt's pools once plainly and twice in every format. Raises InvalidInput where the prompt has no token
    or more than the context, or a format does not fit the model's widths; then nothing was computed.
    """
    if not 0 < len(token_ids) <= model.spec.context_length:
        raise InvalidInput(
            f"the prompt has {len(token_ids):,} tokens; errors are measured on 1 to {model.spec.context_length:,}, the "
            "model's context.",
            fix="give another prompt.",
        )
    if not 0 <= int(token_ids.min()) <= int(token_ids.max()) < model.spec.vocab_size:
        raise InvalidInput(
            f"the prompt has token ids outside the vocabulary of {model.spec.vocab_size:,}.", fix="check the tokenizer."
        )
    plain = _Prompt(model, plain_format(model.spec.dtype), len(token_ids))
    beside = [_Prompt(model, kv_format, len(token_ids)) for kv_format in formats]
    alone = [_Prompt(model, kv_format, len(token_ids)) for kv_format in formats]
    outputs = [_Ratios() for _ in formats]
    logits = [_Logits() for _ in formats]
    done, total = 0, -(-len(token_ids) // _CHUNK) * (1 + len(formats))

    def on_outputs(ordinal: int, out: Tensor, others: Sequence[Tensor]) -> None:
        for ratios, other in zip(outputs, others, strict=True):
            ratios.add(ordinal, other, out)

    for start in range(0, len(token_ids), _CHUNK):
        stop = min(start + _CHUNK, len(token_ids))
        tokens = torch.from_numpy(token_ids[start:stop].astype(np.int64)).to(model.device)
        positions = torch.arange(start, stop, device=model.device)
        rows = torch.arange(stop - start, device=model.device)
        others = [RunningForward(prompt.pools, prompt.batches(start, stop)) for prompt in beside]
        running = ComparingForward(plain.pools, plain.batches(start, stop), others, on_outputs)
        wanted = model.run(running, tokens, positions, rows)
        on_progress(done := done + 1, total)
        for prompt, found in zip(alone, logits, strict=True):
            found.add(model.forward(tokens, positions, prompt.batches(start, stop), prompt.pools, rows), wanted)
            on_progress(done := done + 1, total)
    return tuple(
        KVError(
            kv_format=kv_format,
            num_tokens=len(token_ids),
            bytes_per_token=prompt.bytes_per_token,
            plain_bytes_per_token=plain.bytes_per_token,
            calls=tuple(_call_errors(model, plain, prompt, ratios)),
            logits=found.ratio,
            kept_share=found.kept / len(token_ids),
            same_next_token=found.last_kept,
        )
        for kv_format, prompt, ratios, found in zip(formats, beside, outputs, logits, strict=True)
    )


class _Prompt:
    """Pools in one format, as large as a prompt, whose pages are frames 1, 2, 3 and so on."""

    def __init__(self, model: LoadedModel, kv_format: KVFormat, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.page_size = model.spec.page_size(_PAGE_SIZE)
        self.groups: tuple[GroupSpec, ...] = model.groups(self.page_size, kv_format)
        num_pages = pages_for(num_tokens, self.page_size)
        self.pools = tuple(Pool(group.layout, num_pages, device=model.device) for group in self.groups)
        grows = [group.layout for group in self.groups if not group.reach.carried]
        self.bytes_per_token = sum(layout.bytes_per_frame for layout in grows) / self.page_size

    def batches(self, start: int, stop: int) -> list[PagedBatch | StateBatch]:
        """A step that computes positions `start:stop`."""
        rows = np.array([0, stop - start], dtype=np.int32)
        paged = PagedBatch(
            query_starts=rows,
            context_lens=np.array([stop], dtype=np.int32),
            frames=np.arange(1, pages_for(stop, self.page_size) + 1, dtype=np.int32)[None],
            slots=self.page_size + np.arange(start, stop, dtype=np.int32),
            page_size=self.page_size,
        )
        one = np.ones(1, dtype=np.int32)
        states = StateBatch(rows, one if start else 0 * one, one)
        return [states if group.reach.carried else paged for group in self.groups]

    def fields_of(self, ordinal: int) -> dict[str, tuple[Pool, Field]]:
        """What a call keeps, by name."""
        return {
            field.name: (pool, field) for pool in self.pools for field in pool.layout.fields if ordinal in field.layers
        }

    def rows(self, pool: Pool, field: Field, ordinal: int, dtype: torch.dtype) -> Tensor:
        """All rows of a field of a call, `[rows, *shape]` as attention reads them in `dtype`."""
        return stored_rows(pool, field.name, ordinal).read(*self._slots(field), dtype)

    def fill(self, pool: Pool, field: Field, ordinal: int, rows: Tensor) -> None:
        """Store `rows` as all those of a field of a call."""
        slots = torch.arange(*self._slots(field), device=rows.device)
        stored_rows(pool, field.name, ordinal).write(slots, rows)

    def _slots(self, field: Field) -> tuple[int, int]:
        """The first slot of a field and the one after its last: consecutive, since the frames are."""
        entries = field.entries(self.page_size)
        return entries, entries - (-self.num_tokens * entries // self.page_size)


class _Ratios:
    """Norms of differences over norms, by ordinal."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[Tensor, Tensor]] = {}

    def add(self, ordinal: int, found: Tensor, wanted: Tensor) -> None:
        difference, norm = (found.double() - wanted.double()).square().sum(), wanted.double().square().sum()
        if ordinal in self._sums:
            before = self._sums[ordinal]
            difference, norm = difference + before[0], norm + before[1]
        self._sums[ordinal] = difference, norm

    def of(self, ordinal: int) -> float:
        """The ratio; 0 for a call that was not compared."""
        difference, norm = self._sums.get(ordinal, (torch.zeros(()), torch.ones(())))
        return _ratio(float(difference), float(norm))


class _Logits:
    """What a format's logits have in common with the plain ones."""

    def __init__(self) -> None:
        self._ratios = _Ratios()
        self.kept = 0
        self.last_kept = False

    def add(self, found: Tensor, wanted: Tensor) -> None:
        self._ratios.add(0, found, wanted)
        same = found.argmax(-1) == wanted.argmax(-1)
        self.kept += int(same.sum())
        self.last_kept = bool(same[-1])

    @property
    def ratio(self) -> float:
        return self._ratios.of(0)


def _call_errors(model: LoadedModel, plain: _Prompt, kept: _Prompt, outputs: _Ratios) -> Iterator[CallError]:
    """The calls that keep something in another way than the plain pools do."""
    dtype = torch_dtype(model.spec.dtype)
    layers = [layer for layer, calls in enumerate(model.spec.layers) for _ in calls]
    for ordinal, layer in enumerate(layers):
        wanted = plain.fields_of(ordinal)
        found = []
        for name, (pool, field) in kept.fields_of(ordinal).items():
            if name in wanted and _encoding(field) != _encoding(wanted[name][1]):
                given = plain.rows(*wanted[name], ordinal, dtype)
                kept.fill(pool, field, ordinal, given)  # not all of it passes through attention
                found.append(_field_error(field, given, kept.rows(pool, field, ordinal, dtype)))
        if found:
            yield CallError(ordinal=ordinal, layer=layer, fields=tuple(found), output=outputs.of(ordinal))


def _encoding(field: Field) -> KVFormat:
    return field.kv_format if field.kv_format is not None else plain_format(field.dtype)


def _field_error(field: Field, given: Tensor, kept: Tensor) -> FieldError:
    given, kept = given.double(), kept.double()
    difference = (kept - given).abs()
    return FieldError(
        name=field.name,
        relative=_ratio(float(difference.square().sum()), float(given.square().sum())),
        largest=float(difference.max()),
        magnitude=float(given.abs().max()),
        saturated=int((given.abs() > largest_of(_encoding(field))).sum()),
        zeroed=int(((given != 0) & (kept == 0)).sum()),
        nan=int(kept.isnan().sum()),
        count=given.numel(),
    )


def _ratio(difference: float, norm: float) -> float:
    """The root of two sums of squares' ratio; of nothing, 0 where nothing differs."""
    return math.sqrt(difference / norm) if norm else math.inf if difference else 0.0
