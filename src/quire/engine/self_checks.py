"""The parts of an engine that check memory while it serves."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from quire.canary import Canary
from quire.canary.parts import CanaryPart
from quire.loop import Part

if TYPE_CHECKING:
    from quire.engine.core import EngineCore


def check_parts(engine: EngineCore) -> Iterator[Part]:
    """History and audits, and the canary unless it is off."""
    yield engine.history_part
    canaries = [*_canaries(engine)]
    engine.audits.beside = canaries
    yield engine.audits
    yield from canaries


def _canaries(engine: EngineCore) -> Iterator[CanaryPart]:
    share, cache = share_of(engine.config.canary), engine.cache
    if share:
        layers = {layer for pool in engine.pools for field in pool.layout.fields for layer in field.layers}
        drafts = [layer for layer in layers if layer >= len(engine.model.spec.calls)]
        canary = Canary(cache.parts, engine.pools, share=share, except_for=drafts, follow=engine.runner.mark)
        yield CanaryPart(canary, cache, engine.scheduler, engine.reports)


def share_of(text: str) -> float:
    """The share of time of a valid `canary` setting: 0 for off, math.inf for all."""
    return {"off": 0.0, "all": math.inf}[text] if text in ("off", "all") else float(text.removesuffix("%")) / 100
