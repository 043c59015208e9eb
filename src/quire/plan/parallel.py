"""Parallelism: the part of a model on one rank, and how many ranks share a page."""

from __future__ import annotations

from dataclasses import dataclass

from quire.errors import InvalidInput
from quire.spec.layers import AttentionCall
from quire.spec.model import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """How a server is divided over ranks. All sizes of a plan are those of one rank.

    `tp` ranks share every layer; `dp` of their groups serve requests of their own, each with `tp / dp` ranks in
    attention; `pp` stages share the layers, by `pp_layers` or as evenly as possible; `dcp` ranks of one attention group
    hold a page's tokens in turn. Raises InvalidInput if these do not divide each other.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    dcp: int = 1
    pp_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "dp", "dcp"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"{name} is {getattr(self, name)}.", fix=f"give a {name} of at least 1.")
        if self.tp % self.dp:
            raise InvalidInput(
                f"{self.tp} ranks cannot be {self.dp} attention groups of one size.",
                fix=f"use a dp that divides tp ({self.tp}).",
            )
        if self.attention_tp % self.dcp:
            raise InvalidInput(
                f"{self.attention_tp} attention ranks cannot share pages by {self.dcp}.",
                fix=f"use a dcp that divides {self.attention_tp}.",
            )
        if self.pp_layers and len(self.pp_layers) != self.pp:
            raise InvalidInput(
                f"{len(self.pp_layers)} layer counts for {self.pp} stages.", fix="give one count per stage."
            )

    @property
    def attention_tp(self) -> int:
        """Ranks that share the attention of one request."""
        return self.tp // self.dp

    def stages(self, num_layers: int) -> tuple[slice, ...]:
        """The layers of each stage, in order.

        Stages differ by one layer at most; the last and then the first, which also have output head and embedding, get
        the smaller share. Raises InvalidInput if a stage would be empty.
        """
        if self.pp > num_layers:
            raise InvalidInput(f"{num_layers} layers cannot be {self.pp:,} stages.", fix="use a smaller pp.")
        counts = list(self.pp_layers) or self._even(num_layers)
        if sum(counts) != num_layers or min(counts) < 1:
            raise InvalidInput(
                f"{num_layers} layers cannot be split as {', '.join(map(str, counts))}.",
                fix=f"give {self.pp} counts of at least 1 that add up to {num_layers}, or a smaller pp.",
            )
        ends = [sum(counts[: stage + 1]) for stage in range(self.pp)]
        return tuple(slice(end - count, end) for end, count in zip(ends, counts, strict=True))

    def _even(self, num_layers: int) -> list[int]:
        counts = [num_layers // self.pp] * self.pp
        inner_first = sorted(range(self.pp), key=lambda stage: (stage == self.pp - 1, stage == 0, -stage))
        for stage in inner_first[: num_layers % self.pp]:
            counts[stage] += 1
        return counts

    def check(self, spec: ModelSpec) -> None:
        """Raise InvalidInput if ranks that share pages would hold different KV heads of them."""
        for call in spec.calls:
            if isinstance(call, AttentionCall) and call.kv_heads * self.dcp > max(self.attention_tp, call.kv_heads):
                raise InvalidInput(
                    f"{call.kv_heads} KV heads over {self.attention_tp} ranks leave no {self.dcp} ranks with the same "
                    "heads, so they cannot share pages.",
                    fix=f"use a dcp of at most {max(1, self.attention_tp // call.kv_heads)}.",
                )
