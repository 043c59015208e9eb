"""The pools of a replay: those of a model for a number of tokens, and sizes as users write them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction

from quire.errors import InvalidInput
from quire.plan.budget import MemoryPlan
from quire.plan.mix import mix_of
from quire.plan.planner import make_plan
from quire.plan.settings import PlanSettings
from quire.settings.setting import parse_tokens
from quire.sim.hisparse import in_bytes_of
from quire.spec.group import GroupSpec
from quire.spec.hisparse import HiSparseConfig
from quire.spec.layout import DType, Field, PageLayout
from quire.spec.model import ModelSpec
from quire.spec.speculation import SpeculativeConfig

_NO_LIMIT = 2**62  # bytes: the pools are sized by tokens
_PLAIN_FIELD = Field(name="kv", shape=(1,), dtype=DType.UINT8, layers=(0,))

PLAIN = "plain"
"""The model of one full group, in which a token uses one unit."""


def plain_pools(
    pool_tokens: int, page_size: int, *, context: int, max_running: int, speculation: SpeculativeConfig | None = None
) -> MemoryPlan:
    """Pools of one full group and at least a page, for requests of at most `context` tokens, prompt and output."""
    return MemoryPlan(
        page_size=page_size,
        groups=(GroupSpec(name="full", layout=PageLayout(page_size, (_PLAIN_FIELD,))),),
        num_pages=pool_tokens // page_size,
        context=context,
        max_requests=max_running,
        speculation=speculation,
    )


def model_pools(
    spec: ModelSpec,
    pool_tokens: int,
    page_size: int,
    *,
    lengths: Sequence[int],
    max_running: int,
    chunk: int,
    speculation: SpeculativeConfig | None = None,
    hisparse: HiSparseConfig | None = None,
    arena: bool = False,
) -> MemoryPlan:
    """Pools of a model for that many tokens, split between its groups as `quire plan` does for requests of these
    lengths, or in an arena. Requests beyond the model's context are refused when they arrive. With `hisparse`, the
    bytes on the device are those of that many tokens without it. Raises the planner's errors, and InvalidInput if these
    bytes have no room for a hot buffer."""
    settings = PlanSettings(
        kv_memory=_NO_LIMIT,
        page_size=page_size,
        max_model_len=min(spec.context_length, max(lengths)),
        max_num_batched_tokens=chunk,
        mix=mix_of(lengths, "the trace"),
        max_running_requests=max_running,
        max_total_tokens=pool_tokens,
        speculative_config=speculation,
        arena=arena,
    )
    plan = make_plan(spec, settings).memory
    plan = in_bytes_of(plan, spec, settings, hisparse)
    return replace(plan, max_requests=min(plan.max_requests, max_running))


def read_pool_sizes(text: str) -> tuple[int | Fraction, ...]:
    """Pool sizes such as `64k,1000000,1/8`: tokens, or parts of the trace's working set. Raises InvalidInput."""
    return tuple(dict.fromkeys(_pool_size(part.strip()) for part in text.split(",")))


def _pool_size(text: str) -> int | Fraction:
    if "/" not in text:
        if re.fullmatch(r"0?\.\d+", text) and (part := Fraction(text).limit_denominator(1024)):
            raise InvalidInput(
                f"'{text}' is no whole number of tokens.", fix=f"for a part of the working set write {part}."
            )
        with suppress(InvalidInput):
            return parse_tokens(text)
    else:
        with suppress(ValueError, ZeroDivisionError):
            if (found := Fraction(text)) > 0:
                return found
    raise InvalidInput(f"'{text}' is not a pool size.", fix="write tokens (64k) or a part of the working set (1/8).")
