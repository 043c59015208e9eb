"""ModelSpec: the cache layout of a model, as data, read from its configuration without torch or weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.errors import InvalidInput
from quire.spec.config_reader import HIDDEN_SIZE, MODEL_DTYPE, NUM_HEADS, ConfigReader, understood
from quire.spec.families import Layer, read_drafts, read_layers
from quire.spec.group import GroupSpec, ReachSpec
from quire.spec.kv_format import KVFormat, plain_format
from quire.spec.layers import (
    FULL_GROUP,
    INDEXER_GROUP,
    STATE_GROUP,
    WINDOW_GROUP,
    AttentionCall,
    Call,
    CompressedCall,
    LayerField,
    StateCall,
)
from quire.spec.layout import DType, Field, PageLayout

_CONTEXT_NAMES = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_sequence_length",
    "model_max_length",
    "seq_length",
)
_UNBOUNDED = 2**20  # tokens: the context of a model whose layers have no limit of their own, states and windows


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The layers in the order of the forward pass, and the limits a request must respect.

    The index of a call in `calls` is its ordinal: pools are keyed by it, because one module may serve several layers
    and one layer may call attention twice. `drafts` are the layers of the model's own draft (multi-token prediction),
    which store data only if speculation uses them; their ordinals follow those of `layers`.
    """

    architecture: str
    layers: tuple[Layer, ...]
    context_length: int  # tokens
    vocab_size: int
    dtype: DType
    drafts: tuple[Layer, ...] = ()
    query_heads: int = 0  # 0: not known, or no attention
    hidden_size: int = 0  # 0: not known
    index_topk: int = 0  # tokens that an indexer selects; 0: no layer has one

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelSpec:
        """The spec of a Hugging Face `config.json`, or of the language model's part if it wraps several models.

        Raises UnsupportedModel, naming the field, if the configuration lacks a size or has an unknown value; no size is
        guessed.
        """
        with understood(config):
            reader = ConfigReader(config)
            context = reader.size(*_CONTEXT_NAMES, default=0)
            layers = read_layers(reader, context or _UNBOUNDED)
            if not context and any(_reads_everything(call) for layer in layers for call in layer):
                raise reader.missing(*_CONTEXT_NAMES)
            return cls(
                architecture=reader.architecture,
                layers=layers,
                context_length=context or _UNBOUNDED,
                vocab_size=reader.size("vocab_size", "padded_vocab_size"),
                dtype=reader.dtype(*MODEL_DTYPE),
                drafts=read_drafts(reader, layers),
                query_heads=reader.size(*NUM_HEADS, default=0),
                hidden_size=reader.size(*HIDDEN_SIZE, default=0),
                index_topk=reader.size("index_topk", default=0),
            )

    def with_rollback(self) -> ModelSpec:
        """This model if drafted tokens may be rejected: compressors have longer rings."""

        def longer(layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
            return tuple(
                tuple(replace(call, rollback=True) if isinstance(call, CompressedCall) else call for call in layer)
                for layer in layers
            )

        return replace(self, layers=longer(self.layers), drafts=longer(self.drafts))

    def with_page_bounds(self) -> ModelSpec:
        """This model if attention to all tokens reads selected pages: bounds of their keys are stored too.

        Raises InvalidInput, naming the reason, for a model with anything but plain attention and windows.
        """
        plain = [call for call in self.calls if isinstance(call, AttentionCall) and not call.chunked]
        reason = ""
        if any(getattr(call, "index_dim", 0) for call in self.calls):
            reason = "has an indexer, which selects tokens"
        elif len(plain) < len(self.calls):
            others = [call for call in self.calls if call not in plain]
            chunked = isinstance(others[0], AttentionCall)
            kind = "chunked" if chunked else type(others[0]).__name__.removesuffix("Call").lower()
            reason = f"has {kind} layers"
        elif all(call.window for call in plain):
            reason = "has no layer that reads everything"
        if reason:
            raise InvalidInput(
                f"page_bounds selects pages for plain attention, and {self.architecture} {reason}.",
                fix="leave the selection out.",
            )
        layers = tuple(
            tuple(replace(call, page_bounds=not call.window) for call in layer if isinstance(call, AttentionCall))
            for layer in self.layers
        )
        return replace(self, layers=layers)

    @property
    def calls(self) -> tuple[Call, ...]:
        """Every call that stores data, in order; its index is its ordinal."""
        return tuple(call for layer in self.layers for call in layer)

    def page_size(self, least: int) -> int:
        """The smallest multiple of `least` tokens that is a page: it holds whole entries of every field."""
        kept = plain_format(self.dtype)
        pers = {part.per for call in set(self.calls) for part in call.parts(kept, self.dtype)}
        return math.lcm(least, *(per for per in pers if per > 1))

    def groups(
        self,
        page_size: int,
        kv_format: KVFormat | None = None,
        *,
        tp: int = 1,
        stage: slice = slice(None),
        num_drafts: int = 0,
        window_pool: bool = True,
    ) -> tuple[GroupSpec, ...]:
        """The cache groups of one rank, full reach first.

        `tp` ranks share each layer and `stage` is the slice of layers of this pipeline stage, which also holds
        `num_drafts` draft layers. Without `window_pool`, windows are stored whole, in the full group. Raises
        InvalidInput if the page size, the format or the parallelism does not fit the model.
        """
        kv_format = kv_format if kv_format is not None else plain_format(self.dtype)
        collected: dict[tuple[str, ReachSpec], dict[LayerField, list[int]]] = {}
        for ordinal, call in self._stage_calls(stage, num_drafts):
            for part in call.on_rank(tp).parts(kv_format, self.dtype):
                where = (part.group, part.reach)
                if not window_pool and part.group == WINDOW_GROUP:
                    where = (FULL_GROUP, ReachSpec())
                collected.setdefault(where, {}).setdefault(part, []).append(ordinal)
        windows = [where for where in collected if where[0] == WINDOW_GROUP]
        return tuple(
            GroupSpec(
                name=name if name != WINDOW_GROUP or len(windows) == 1 else f"{reach.kind}-{reach.tokens}",
                layout=_layout(page_size, collected[name, reach], self.architecture),
                reach=reach,
            )
            for name, reach in sorted(collected, key=_order)
        )

    def _stage_calls(self, stage: slice, num_drafts: int) -> list[tuple[int, Call]]:
        """The calls of these layers and drafts, with their ordinals in the whole model."""
        found: list[tuple[int, Call]] = []
        ordinal = 0
        chosen = set(range(len(self.layers))[stage])
        for index, layer in enumerate(self.layers):
            if index in chosen:
                found += [(ordinal + i, call) for i, call in enumerate(layer)]
            ordinal += len(layer)
        for index in range(num_drafts):
            layer = self.drafts[min(index, len(self.drafts) - 1)]
            found += [(ordinal + i, call) for i, call in enumerate(layer)]
            ordinal += len(layer)
        return found


def _reads_everything(call: Call) -> bool:
    """Whether a call stores data for every token, so that positions are limited."""
    return not isinstance(call, StateCall) and not (isinstance(call, AttentionCall) and call.window)


def _order(where: tuple[str, ReachSpec]) -> tuple[int, int]:
    group, reach = where
    return ((FULL_GROUP, INDEXER_GROUP, WINDOW_GROUP, STATE_GROUP).index(group), -reach.tokens)


def _layout(page_size: int, parts: Mapping[LayerField, Sequence[int]], architecture: str) -> PageLayout:
    """One field per distinct part. A page must hold a whole number of each field's entries."""
    for part in parts:
        if part.per > 1 and page_size % part.per:
            raise InvalidInput(
                f"a page of {page_size} tokens cannot hold '{part.name}' of {architecture}, which has one entry per "
                f"{part.per} tokens.",
                fix=f"use a page size that is a multiple of {max(p.per for p in parts)}.",
            )
    fields = tuple(
        Field(
            name=part.name,
            shape=part.shape,
            dtype=part.dtype,
            layers=tuple(layers),
            per=part.per,
            kv_format=part.kv_format,
        )
        for part, layers in parts.items()
    )
    return PageLayout(page_size, fields)


def config_dtype(config: Mapping[str, Any]) -> DType:
    """The element type that a configuration names under `dtype` or `torch_dtype`; by default float32."""
    return ConfigReader(config).dtype(*MODEL_DTYPE)
