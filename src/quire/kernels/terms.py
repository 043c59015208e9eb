"""AttentionTerms: how the rows of one call of attention read keys."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTerms:
    """A row at position p reads keys `p - window < k <= p`, or with 0 all up to p; `chunked`, those of its own chunk of
    `window` tokens. Scores are multiplied by `scale`, then bounded by `softcap`. `sinks` `[heads]` are logits of an
    extra key without value."""

    scale: float
    window: int = 0
    chunked: bool = False
    softcap: float | None = None
    sinks: Tensor | None = None
