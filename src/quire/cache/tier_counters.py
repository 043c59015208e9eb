"""What the tiers have done since the start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from quire.spec.ids import Tier


@dataclass(slots=True)
class TierCounters:
    """Frames and bytes that were moved, and what went wrong.

    `unsaved_frames` found no room on the host, `unstored_frames` were not taken by the store; both are only copies that
    do not exist. `defects` counts records that were not what they should be, by tier and by what was wrong.
    """

    saved_frames: int = 0
    saved_bytes: int = 0
    unsaved_frames: int = 0
    loaded_frames: int = 0
    loaded_bytes: int = 0
    archived_frames: int = 0
    archived_bytes: int = 0
    unstored_frames: int = 0
    fetched_frames: int = 0
    fetched_bytes: int = 0
    demoted_pages: int = 0
    host_evicted_pages: int = 0
    host_hit_tokens: int = 0
    storage_hit_tokens: int = 0
    declined_tokens: int = 0
    failed_moves: int = 0
    refused_moves: int = 0
    defects: Counter[tuple[str, str]] = field(default_factory=Counter)

    def corrupt(self, tier: Tier, defects: Iterable[str]) -> None:
        """Records of a tier had these defects."""
        self.defects.update((tier.name.lower(), defect) for defect in defects)
