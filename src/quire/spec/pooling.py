"""Pooling: what a model that was made for embeddings or scores gives for a text, and how they are computed from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import numpy as np
import numpy.typing as npt

from quire.errors import InvalidInput

Vectors = npt.NDArray[np.float32]
Pair = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooling:
    """What a model `gives`. Embeddings have `size` numbers and, if it `normalises` them, the length 1; they may be cut
    to a size in `dimensions`, or to any if that is None. Scores are logits, from 0 to 1 where it `has_sigmoid`."""

    gives: Literal["embeddings", "scores"]
    size: int
    normalises: bool = False
    dimensions: Sequence[int] | None = ()
    has_sigmoid: bool = False

    def embeddings(self, pooled: Vectors, dimensions: int | None = None) -> Vectors:
        """Embeddings float32 `[n, dimensions]` of hidden states `[n, size]`. Raises InvalidInput, naming the field, for
        dimensions that the model was not trained for."""
        self.check_dimensions(dimensions)
        found = pooled[:, :dimensions]
        return _unit(found) if self.normalises else found

    def check_dimensions(self, dimensions: int | None) -> None:
        """Raise InvalidInput for dimensions that the model was not trained for."""
        if dimensions is None or dimensions == self.size:
            return
        if self.dimensions is not None and dimensions not in self.dimensions:
            sizes = ", ".join(map(str, self.dimensions)) or "no others"
            raise InvalidInput(
                f"dimensions is {dimensions}; embeddings of this model have {self.size}, and may have {sizes}.",
                fix="leave dimensions out.",
            )
        if not 0 < dimensions < self.size:
            raise InvalidInput(f"dimensions must be from 1 to {self.size}, got {dimensions}.")

    def prompts(self, pairs: Sequence[Pair]) -> list[str]:
        """The prompts whose results `scores` takes: each pair as one text, or for embeddings each text once."""
        if self.gives == "scores":
            return [first + second for first, second in pairs]
        return list(dict.fromkeys(chain.from_iterable(pairs)))

    def scores(self, pairs: Sequence[Pair], pooled: Vectors, *, activation: bool = True) -> Vectors:
        """Scores float32 `[len(pairs)]` from what the model gave for `prompts(pairs)`: of embeddings the cosine."""
        if self.gives == "embeddings":
            row = {text: at for at, text in enumerate(self.prompts(pairs))}
            first, second = (_unit(pooled[[row[pair[side]] for pair in pairs]]) for side in (0, 1))
            cosines: Vectors = (first * second).sum(axis=1)
            return cosines
        logits = pooled[:, 0]
        if not (self.has_sigmoid and activation):
            return logits
        found: Vectors = np.float32(0.5) + np.float32(0.5) * np.tanh(logits / np.float32(2))
        return found


def _unit(vectors: Vectors) -> Vectors:
    """Vectors of length 1, but for zeros."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    found: Vectors = vectors / np.maximum(lengths, np.float32(1e-12))
    return found
