"""PooledSequence: a prompt whose answer is an embedding or a score, and no tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from quire.client.output import CompletionOutput, SequenceAssembler, SequenceDelta
from quire.engine.messages import TokenOutput
from quire.errors import UnsupportedModel
from quire.scheduler.sampling_params import SamplingParams
from quire.spec.pooling import Pooling, Vectors

POOLED = SamplingParams(max_tokens=1, temperature=0.0, pooled=True)
"""The engine draws one token; it is dropped."""


class PooledSequence(SequenceAssembler):
    """What the engine reports before the token that it draws is the answer."""

    _pooled: Vectors | None = None

    def push(self, output: TokenOutput) -> SequenceDelta:
        """Add what was pooled, and drop the token."""
        if output.pooled is not None:
            self._pooled = np.frombuffer(output.pooled, dtype=np.float32)
        if output.token_ids:
            output = replace(output, token_ids=[], finish_reason="length", stop_token=None)
        return super().push(output)

    def completion(self) -> CompletionOutput:
        found = super().completion()
        found.pooled = self._pooled
        return found


def pooling_of(facts: Mapping[str, Any], name: str, *, embeds: bool = False) -> Pooling:
    """What the model `name` of an engine with these facts gives. Raises UnsupportedModel if it generates text, or if it
    gives scores and not the embeddings that are wanted."""
    gives = facts["pooling"]["gives"] if "pooling" in facts else "text"
    if gives == "text" or (embeds and gives != "embeddings"):
        wanted = "embeddings" if embeds else "embeddings or scores"
        raise UnsupportedModel(
            f"'{name}' gives {gives}, and was not trained for {wanted}.", fix="use a model that was."
        )
    return Pooling(**facts["pooling"])


def pooled_of(outputs: Sequence[CompletionOutput]) -> Vectors:
    """What was pooled of each, float32 `[n, size]`."""
    return np.array([output.pooled for output in outputs], dtype=np.float32)
