"""The stored data of one layer: heads, latents, states. Each call lists its parts.

Sizes, pools and fingerprints all come from parts; nothing else in Quire multiplies heads by dimensions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Self

from quire.errors import InvalidInput
from quire.spec.group import ReachSpec
from quire.spec.kv_format import KVFormat
from quire.spec.layout import PER_PAGE, DType, scales_of

FULL_GROUP = "full"
WINDOW_GROUP = "window"
INDEXER_GROUP = "indexer"
STATE_GROUP = "state"

INDEX_KEYS = "index_k"
KEY_BOUNDS = ("key_min", "key_max")
"""Fields of the group of indexers: the keys of an indexer, or the bounds of the keys of a page."""

_FULL = ReachSpec()
_STATE = ReachSpec("state")
_LATENT_BLOCK = 128  # numbers of a latent, or of an indexer's key, that share one float32 scale
_COMPRESSED_BLOCK = 64  # numbers of a compressed latent that share one scale byte
_SCALE_BYTES = 8  # row sizes are rounded up to this


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerField:
    """One array of one layer, and its group: `shape` per entry, one entry per `per` tokens. The rest as in `Field`."""

    group: str
    reach: ReachSpec = _FULL
    name: str
    shape: tuple[int, ...]
    dtype: DType
    per: int = 1
    kv_format: KVFormat | None = None


class Call(ABC):
    """One attention, latent or recurrent call of a forward pass, and its stored data."""

    __slots__ = ()

    @abstractmethod
    def parts(self, kv_format: KVFormat, model_dtype: DType) -> tuple[LayerField, ...]:
        """The arrays of the layer on this rank. Raises InvalidInput if the format does not fit its widths."""

    def on_rank(self, tp: int) -> Self:
        """The share of one of `tp` tensor-parallel ranks; latents, which all heads read, are not divided.

        Raises InvalidInput if it cannot be split.
        """
        return self


def split_heads(heads: int, tp: int, what: str) -> int:
    """Heads on one rank: an equal share, or one, on several ranks, if there are fewer heads than ranks.

    Raises InvalidInput if neither divides the other.
    """
    if heads % tp == 0:
        return heads // tp
    if tp % heads == 0:
        return 1
    raise InvalidInput(
        f"{heads} {what} cannot be split over {tp} ranks.",
        fix=f"use a tensor parallelism that divides {heads} or is a multiple of it.",
    )


def formatted(
    name: str, shape: tuple[int, ...], kv_format: KVFormat, *, group: str, reach: ReachSpec = _FULL, per: int = 1
) -> tuple[LayerField, ...]:
    """The parts of vectors `shape` stored as `kv_format`: the numbers, and their scales if it has them."""
    *outer, width = shape
    stored = (*outer, kv_format.stored_width(width))
    encoding = kv_format if kv_format.encodes else None
    numbers = LayerField(
        group=group, reach=reach, name=name, shape=stored, dtype=kv_format.element, per=per, kv_format=encoding
    )
    if kv_format.scale is None:
        return (numbers,)
    return numbers, _scales(numbers, (*outer, kv_format.scale_width(width)), kv_format.scale)


def _scales(numbers: LayerField, shape: tuple[int, ...], dtype: DType) -> LayerField:
    return replace(numbers, name=scales_of(numbers.name), shape=shape, dtype=dtype, kv_format=None)


def fp8_row(width: int, most: int, scale: DType) -> KVFormat:
    """A row of `width` E4M3 numbers, in as few equal blocks of at most `most` numbers as possible.

    The rows of sparse and compressed latents and the keys of indexers have this form, whatever the format of the rest.
    """
    block = -(-width // -(-width // most))
    return KVFormat(name=f"fp8_e4m3 by {block}", element=DType.FLOAT8_E4M3, bits=8, block=block, scale=scale)


def _scaled_row(
    name: str, width: int, most: int, scale: DType, *, group: str, reach: ReachSpec = _FULL, per: int = 1
) -> tuple[LayerField, ...]:
    """A row of `fp8_row` and its scales, one for `most` numbers; scale bytes are rounded up to 8."""
    row, scales = fp8_row(width, most, scale), -(-width // most)
    if scale is DType.UINT8:
        scales = -(-scales // _SCALE_BYTES) * _SCALE_BYTES
    numbers = LayerField(group=group, reach=reach, name=name, shape=(width,), dtype=row.element, per=per, kv_format=row)
    return numbers, _scales(numbers, (scales,), scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall(Call):
    """Attention over keys and values per head.

    `window` w > 0: a query at position p reads keys `p - w < k <= p`; `chunked`: it reads those of its own chunk of w
    tokens instead. `index_dim` > 0: an indexer selects blocks by one key of that width per token. `page_bounds`: the
    elementwise minimum and maximum of each page's keys are stored too, by which rows select pages.
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    window: int = 0
    chunked: bool = False
    index_dim: int = 0
    page_bounds: bool = False

    @property
    def reach(self) -> ReachSpec:
        """The earlier tokens that a resuming request still reads."""
        return ReachSpec("chunk" if self.chunked else "window", self.window) if self.window else _FULL

    def parts(self, kv_format: KVFormat, model_dtype: DType) -> tuple[LayerField, ...]:
        """Fields "k" and "v", with scales if the format has them. In the model's dtype "index_k" of an indexer, and
        "key_min" and "key_max" of pages."""
        group = WINDOW_GROUP if self.window else FULL_GROUP
        keys = formatted("k", (self.kv_heads, self.key_dim), kv_format, group=group, reach=self.reach)
        values = formatted("v", (self.kv_heads, self.value_dim), kv_format, group=group, reach=self.reach)
        found = [*keys, *values]
        if self.index_dim:
            found.append(LayerField(group=INDEXER_GROUP, name=INDEX_KEYS, shape=(self.index_dim,), dtype=model_dtype))
        if self.page_bounds:
            shape = (self.kv_heads, self.key_dim)
            found += [
                LayerField(group=INDEXER_GROUP, name=name, shape=shape, dtype=model_dtype, per=PER_PAGE)
                for name in KEY_BOUNDS
            ]
        return tuple(found)

    def on_rank(self, tp: int) -> AttentionCall:
        """KV heads are split; every rank has the indexer's one key."""
        return replace(self, kv_heads=split_heads(self.kv_heads, tp, "KV heads"))


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentCall(Call):
    """Multi-head latent attention (MLA): one latent of `rank` numbers and one rotary key per token, for all heads.

    `sparse`: attention reads the tokens that an indexer selects (DSA, NSA). `index_dim` > 0: this layer owns an
    indexer; a sparse layer without one uses another layer's selection.
    """

    rank: int
    rope_dim: int
    sparse: bool = False
    index_dim: int = 0

    def parts(self, kv_format: KVFormat, model_dtype: DType) -> tuple[LayerField, ...]:
        """Fields "latent" and "rope", and "index_k" of the indexer.

        FP8 of sparse attention stores the rotary key in bfloat16 and one float32 scale per 128 numbers of the latent:
        656 bytes for 512 + 64, as published sparse kernels read it.
        """
        rope: tuple[LayerField, ...]
        if self.sparse and _is_fp8_row(kv_format):
            latent = _scaled_row("latent", self.rank, _LATENT_BLOCK, DType.FLOAT32, group=FULL_GROUP)
            rope = (LayerField(group=FULL_GROUP, name="rope", shape=(self.rope_dim,), dtype=DType.BFLOAT16),)
        else:
            latent = formatted("latent", (self.rank,), kv_format, group=FULL_GROUP)
            rope = formatted("rope", (self.rope_dim,), kv_format, group=FULL_GROUP)
        return (*latent, *rope, *_index_keys(self.index_dim, kv_format, model_dtype))


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCall(Call):
    """A recurrent layer (Mamba, gated delta net, short convolution): a state of fixed size, whatever the length.

    The convolution stores the last `kernel - 1` inputs of `channels` channels, which are split over ranks, and of
    `groups` further bundles of `group_channels`, which are split by bundle. The recurrence stores `heads` arrays of
    shape `matrix`, split by head.
    """

    kernel: int = 0
    channels: int = 0
    groups: int = 0
    group_channels: int = 0
    heads: int = 0
    matrix: tuple[int, ...] = ()
    state_dtype: DType = DType.FLOAT32

    def parts(self, kv_format: KVFormat, model_dtype: DType) -> tuple[LayerField, ...]:
        """Fields "conv" in the model's dtype and "ssm" in `state_dtype`, one entry per page; never quantised."""
        channels = self.channels + self.groups * self.group_channels
        arrays = (
            ("conv", (channels, self.kernel - 1), model_dtype, self.kernel > 1),
            ("ssm", (self.heads, *self.matrix), self.state_dtype, self.heads > 0),
        )
        return tuple(
            LayerField(group=STATE_GROUP, reach=_STATE, name=name, shape=shape, dtype=dtype, per=PER_PAGE)
            for name, shape, dtype, is_kept in arrays
            if is_kept
        )

    def on_rank(self, tp: int) -> StateCall:
        """Channels, bundles and heads are split."""
        for number, what in ((self.channels, "convolution channels"), (self.heads, "state heads")):
            if number % tp:
                raise InvalidInput(
                    f"{number} {what} cannot be split over {tp} ranks.",
                    fix=f"use a tensor parallelism that divides {number}.",
                )
        return replace(
            self,
            channels=self.channels // tp,
            groups=split_heads(self.groups, tp, "convolution groups") if self.groups else 0,
            heads=self.heads // tp,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedCall(Call):
    """Compressed attention (DeepSeek-V4): raw latents of a window, and one compressed latent per `ratio` tokens.

    `ratio` 0: the window only. The compressor stores a ring of the inputs that it has not folded yet, once per page of
    the window so that a request can resume there. With overlapping blocks (`overlap`) the ring has twice as many, of
    twice the width; and twice as many again if drafted tokens may be rejected (`rollback`). `index_dim` > 0: an indexer
    selects among the compressed entries.
    """

    nope_dim: int
    rope_dim: int
    window: int
    ratio: int = 0
    overlap: bool = False
    rollback: bool = False
    index_dim: int = 0

    def parts(self, kv_format: KVFormat, model_dtype: DType) -> tuple[LayerField, ...]:
        """Window fields "latent", "rope" and the compressor's float32 rings; full fields with one entry per `ratio`."""
        reach = ReachSpec("window", self.window)
        found = list(self._row("", kv_format, WINDOW_GROUP, reach, 1))
        if self.ratio:
            found += self._row("compressed_", kv_format, FULL_GROUP, _FULL, self.ratio)
            found.append(self._ring("compressor", self.nope_dim + self.rope_dim, reach))
        if self.index_dim:
            found += _index_keys(self.index_dim, kv_format, model_dtype, self.ratio)
            found.append(self._ring("index_compressor", self.index_dim, reach))
        return tuple(found)

    def _row(self, prefix: str, kv_format: KVFormat, group: str, reach: ReachSpec, per: int) -> tuple[LayerField, ...]:
        """One latent row. FP8: 448 + 8 scale bytes (one per 64, rounded up to 8) + a bfloat16 rotary key = 584."""
        latent, rope = f"{prefix}latent", f"{prefix}rope"
        if not _is_fp8_row(kv_format):
            return (
                *formatted(latent, (self.nope_dim,), kv_format, group=group, reach=reach, per=per),
                *formatted(rope, (self.rope_dim,), kv_format, group=group, reach=reach, per=per),
            )
        return (
            *_scaled_row(latent, self.nope_dim, _COMPRESSED_BLOCK, DType.UINT8, group=group, reach=reach, per=per),
            LayerField(group=group, reach=reach, name=rope, shape=(self.rope_dim,), dtype=DType.BFLOAT16, per=per),
        )

    def _ring(self, name: str, width: int, reach: ReachSpec) -> LayerField:
        """A value and a score per input that is not folded yet, at the end of the page."""
        blocks = 2 if self.overlap else 1
        shape = (blocks * self.ratio * (2 if self.rollback else 1), 2 * blocks * width)
        return LayerField(group=WINDOW_GROUP, reach=reach, name=name, shape=shape, dtype=DType.FLOAT32, per=PER_PAGE)


def _is_fp8_row(kv_format: KVFormat) -> bool:
    """Whether a sparse or compressed latent is stored as an FP8 row. Raises InvalidInput for other 8-bit formats."""
    if kv_format.bits == 8 and kv_format.name != "fp8_e4m3":
        raise InvalidInput(
            f"sparse and compressed latents have no rows of {kv_format.name}.",
            fix="use fp8_e4m3, or the model's dtype.",
        )
    return kv_format.bits == 8


def _index_keys(width: int, kv_format: KVFormat, model_dtype: DType, per: int = 1) -> tuple[LayerField, ...]:
    """The keys of an indexer. In half precision they are stored as FP8; float32 stays exact."""
    if not width:
        return ()
    if kv_format.element is model_dtype is DType.FLOAT32:
        return (LayerField(group=INDEXER_GROUP, name=INDEX_KEYS, shape=(width,), dtype=model_dtype, per=per),)
    return _scaled_row(INDEX_KEYS, width, _LATENT_BLOCK, DType.FLOAT32, group=INDEXER_GROUP, per=per)
