"""WeightEstimate: parameters by module, and their bytes on a rank.

Counted are matrices and norms; biases, scales of activations and other vectors are not (under 1 % of a real model).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

_MIXERS = frozenset(
    {"attention", "attention_down", "indexer", "compressor", "mamba", "delta", "kda", "lightning", "conv"}
)
"""Modules that mix tokens, which attention data parallelism divides over fewer ranks than the others."""


class ModuleWeights(NamedTuple):
    """Parameters of one layer that are stored alike and divided alike.

    `ways` is the largest number of ranks that divide them: the KV heads for key and value projections, 1 for parameters
    that every rank has whole. `bits` is the size of one parameter with its share of the scales; 0: not known yet.
    """

    module: str
    num_parameters: int
    ways: int = 1
    bits: float = 0

    def bytes_on_rank(self, tp: int, attention_tp: int) -> int:
        """Bytes on one of `tp` ranks, the fullest; `attention_tp` of them share the modules that mix tokens."""
        ranks = attention_tp if self.module in _MIXERS else tp
        return math.ceil(self.num_parameters * self.bits / 8 / min(ranks, self.ways))


LayerWeights = tuple[ModuleWeights, ...]
"""The modules of one layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightEstimate:
    """Parameters by place, and the bytes they take.

    `embedding` (with learned positions) and `head` (0: shared with the embedding) are parameters of `bits` bits each,
    and so is `other`: vision towers and their projection, approximately, or 0 if the configuration does not describe
    them. Audio towers are not counted. `draft_layers` predict tokens ahead and share embedding and head with the model.
    """

    embedding: int
    head: int
    layers: tuple[LayerWeights, ...]
    draft_layers: tuple[LayerWeights, ...]
    other: int
    bits: int

    @property
    def num_parameters(self) -> int:
        """Parameters of the model, without draft layers, as in published sizes."""
        return (
            self.embedding
            + self.head
            + self.other
            + sum(each.num_parameters for layer in self.layers for each in layer)
        )

    def bytes_on_rank(
        self, tp: int = 1, layers: range | None = None, *, draft: bool = False, attention_tp: int | None = None
    ) -> int:
        """Bytes on one rank of a group of `tp` that has `layers` (None: all), a stage of a pipeline.

        With attention data parallelism `attention_tp` of the ranks share the modules that mix tokens, and all of them
        the rest. The stage of the first layer has the embedding and `other`, which tensor parallelism does not divide.
        That of the last layer has the head, a copy of the embedding if both are one, and with `draft` the draft layers.
        Raises ValueError for a stage that is not a run of the model's layers, or tp < 1.
        """
        stage = range(len(self.layers)) if layers is None else layers
        if tp < 1 or stage.step != 1 or not 0 <= stage.start < stage.stop <= len(self.layers):
            raise ValueError(f"tp is 1 or more, a stage a run of the {len(self.layers)} layers; got {tp} and {stage}")
        is_first, is_last = stage.start == 0, stage.stop == len(self.layers)
        divided, whole = (self.embedding, self.other) if is_first else (0, 0)
        held = self.layers[stage.start : stage.stop]
        if is_last:
            divided += self.head or (0 if is_first else self.embedding)
            held += self.draft_layers if draft else ()
        plain = math.ceil(divided * self.bits / 8 / tp) + math.ceil(whole * self.bits / 8)
        return plain + sum(each.bytes_on_rank(tp, attention_tp or tp) for layer in held for each in layer)
