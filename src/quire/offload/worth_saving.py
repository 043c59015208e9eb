"""worth_saving: whether copies of cached pages are worth making. What is saved cannot be evicted until it has been."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from quire.offload.tier_settings import TierSettings
from quire.tiers.transfer import Lane

TRIAL_BYTES: Final = 16 << 20
"""Saved at most while it is not known how fast that is: one save, which others do not wait for long."""


def worth_saving(places: Sequence[np.ndarray], settings: TierSettings, page_size: int) -> list[np.ndarray]:
    """Which of these places of a path, by group, to copy to the host.

    All, where the way to the host is fast enough that to load them again, which takes as long, would be quicker than to
    compute them; none, where it is not; and the first few, to learn that. Copies for a store outlive this process and
    its device, and are always made.
    """
    wanted = list(places)
    if settings.always or settings.stores:
        return wanted
    even, most = settings.break_even, max(map(len, wanted))
    num_bytes = sum(len(at) * size for at, size in zip(wanted, settings.record_bytes, strict=True))
    if not num_bytes or not even.decide(Lane.SAVE, most * page_size, num_bytes):
        most = 0
    elif not even.knows(Lane.SAVE):
        most = 0 if settings.mover.in_flight(Lane.SAVE) else max(1, most * TRIAL_BYTES // num_bytes)
    return [at[:most] for at in wanted]
