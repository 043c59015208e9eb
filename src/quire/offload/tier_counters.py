"""What the tiers have done since the start."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from typing import Any

from quire.spec.ids import Tier
from quire.tiers.transfer import LANES, UNDAMAGED, Lane, Transfer

_BOUNDS_S = (0.0001, 0.001, 0.01, 0.1, 1.0, 10.0)


@dataclass(slots=True)
class LinkCounters:
    """Moves on one link that have ended, failed ones too; bytes that really moved, and seconds of work."""

    moves: int = 0
    bytes: int = 0
    seconds: float = 0.0
    counts: list[int] = field(default_factory=lambda: [0] * (len(_BOUNDS_S) + 1))

    def add(self, move: Transfer) -> None:
        """One more has ended."""
        self.moves += 1
        self.bytes += move.moved_bytes
        self.seconds += move.seconds
        self.counts[bisect_left(_BOUNDS_S, move.seconds)] += 1

    def to_dict(self) -> dict[str, Any]:
        """`at_most` are pairs: seconds, and how many moves took that long at most."""
        at_most = list(zip(_BOUNDS_S, accumulate(self.counts[:-1]), strict=True))
        return {"moves": self.moves, "bytes": self.bytes, "seconds": self.seconds, "at_most": at_most}


@dataclass(slots=True)
class TierCounters:
    """Frames and bytes that were moved, and what went wrong.

    `host_hit_tokens` are prompt tokens that were reused from host memory, `storage_hit_tokens` those that had been
    fetched there from storage and were reused for the first time. `unsaved_frames` found no room on the host,
    `unstored_frames` were not taken by the store; both are only copies that do not exist. `lost_frames` were stored,
    and had gone when they were told to be of use. `defects` counts records that were not what they should be, by tier
    and by what was wrong.
    """

    saved_frames: int = 0
    saved_bytes: int = 0
    unsaved_frames: int = 0
    loaded_frames: int = 0
    loaded_bytes: int = 0
    archived_frames: int = 0
    archived_bytes: int = 0
    unstored_frames: int = 0
    lost_frames: int = 0
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
    links: dict[Lane, LinkCounters] = field(default_factory=lambda: {link: LinkCounters() for link in LANES})

    def corrupt(self, tier: Tier, defects: Iterable[str]) -> None:
        """Records of a tier had these defects; those that only did not arrive have none."""
        self.defects.update((tier.name.lower(), defect) for defect in defects if defect not in UNDAMAGED)

    def ended(self, move: Transfer) -> None:
        """A move has ended, whatever came of it."""
        self.links[move.lane].add(move)

    def to_dict(self) -> dict[str, Any]:
        """For JSON: `defects` by `tier:defect`, `links` by their names."""
        return asdict(replace(self, links={})) | {
            "defects": {f"{tier}:{defect}": count for (tier, defect), count in self.defects.items()},
            "links": {link.name: counters.to_dict() for link, counters in self.links.items()},
        }
