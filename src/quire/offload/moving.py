"""Moving: what a transfer in flight moves, and keeps where it is until it has ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quire.cache.hold import HeldFrames, Hold
from quire.spec.ids import Ids, Tier


@dataclass(slots=True)
class Part:
    """Pages of one group: `at` are their places on the path, `device` and `host` their frames there, where the move
    touches them."""

    group: int
    pages: Ids
    at: np.ndarray
    device: Ids
    host: Ids
    ranks: np.ndarray | None = None


@dataclass(slots=True, eq=False)
class Moving:
    """A transfer's pages. `hold` keeps their path and, where groups are read in part, their frames; `on_device` and
    `on_host` say in which tier these have frames that the transfer touches; `scope` is their namespace's."""

    hold: Hold
    parts: list[Part]
    scope: bytes
    on_device: bool
    on_host: bool
    abandoned: bool = False  # flushed meanwhile: what arrives counts for nothing


def frames_of(parts: Sequence[Part], *, on_device: bool, on_host: bool) -> list[HeldFrames]:
    """The frames that a transfer of these touches."""
    tiers = ((Tier.DEVICE, on_device), (Tier.HOST, on_host))
    return [HeldFrames(part.group, tier, part.pages) for part in parts for tier, touched in tiers if touched]
