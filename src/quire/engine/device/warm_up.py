"""Warm-up: passes of every kind at start, so that the first prompts do not wait while kernels are compiled for them.

What Triton compiles follows from a model and from the kind of a step, and never from how many requests or tokens it
has: rows that are few or many for a sequence, keys that one program reads or several, drafts that branch. `warm_ups`
are steps that have all of these. Their sequences are pads: all their pages are frame 0, which is no request's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from quire.models.forward import RunningForward
from quire.spec.ids import Ids
from quire.upload import to_device

if TYPE_CHECKING:
    from quire.engine.device.runner import ModelRunner

logger = logging.getLogger(__name__)

_LOG_S = 2.0
_LONG = 8192
"""Tokens of a long context: more than models select, and than windows of compressed keys have."""
_MANY = 72
"""Rows of a prompt: more than a small tile has."""


@dataclass(frozen=True, slots=True)
class Pads:
    """A step of sequences in frame 0: `news[i]` new tokens are the last of `contexts[i]`. With `branches`, drafts of
    each follow its first new token."""

    news: Sequence[int]
    contexts: Sequence[int]
    branches: bool = False

    @property
    def parents(self) -> Ids:
        """The flat row that each row follows, int32; -1 where that is its past."""
        starts = np.cumsum([0, *self.news[:-1]])
        return np.concatenate(
            [np.where(np.arange(new), start, -1) for new, start in zip(self.news, starts.tolist(), strict=True)]
        ).astype(np.int32)


def warm_ups(longest: int, most_rows: int, *, trees: bool) -> list[Pads]:
    """Steps of all kinds that an engine can meet, of requests of up to `longest` tokens and `most_rows` in a step."""
    long, many = min(longest, _LONG), max(1, min(longest, most_rows - 1, _MANY))
    found = [Pads([1], [1]), Pads([1, 1], [long, long]), Pads([many], [many]), Pads([1, many], [long, long])]
    few = min(3, many)
    found.append(Pads([few, few], [long, few]))  # drafts, or the end of a prompt
    return [*found, Pads([few, few], [long, few], branches=True)] if trees else found


@torch.inference_mode()
def warm_up(steps: ModelRunner, found: Sequence[Pads]) -> None:
    """Compute these steps, with progress."""
    began = said = time.perf_counter()
    device = steps.model.device
    steps.tables.apply(steps.tables.sent_again())
    for number, pads in enumerate(found):
        count = sum(pads.news)
        ids = np.zeros(count, dtype=np.int64)
        positions = np.concatenate(
            [np.arange(stop - new, stop) for new, stop in zip(pads.news, pads.contexts, strict=True)]
        )
        rows = np.cumsum(pads.news) - 1
        given = (to_device(np.ascontiguousarray(array, dtype=np.int64), device) for array in (ids, positions, rows))
        steps.model.run(RunningForward(steps.pools, steps.padding(pads)), *given)
        if time.perf_counter() - said > _LOG_S:
            said = time.perf_counter()
            logger.info("warming up: %d of %d kinds of steps", number + 1, len(found))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    logger.info("warmed up %d kinds of steps in %.1f s", len(found), time.perf_counter() - began)
