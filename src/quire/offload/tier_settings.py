"""Settings of the tiers below the device, and their counters since the start."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate, chain
from typing import Any

from quire.settings.fields import PrefetchPolicy, WritePolicy
from quire.tiers.break_even import BreakEven
from quire.tiers.mover import Mover
from quire.tiers.prefill import PrefillPeers
from quire.tiers.store import Answer
from quire.tiers.transfer import FAILED, GOOD, LANES, REFUSED, UNDAMAGED, Lane, Transfer

_BOUNDS_S = (0.0001, 0.001, 0.01, 0.1, 1.0, 10.0)

_FAILURES = 3  # unanswered transfers in a row; a single one may be due to another writer or a busy index
_KINDS = {Lane.LOOK: "read", Lane.FETCH: "read", Lane.ARCHIVE: "write"}
_NO_ANSWER = (Answer.RETRY, REFUSED, FAILED)
_ANSWERS = (Answer.HIT, Answer.MISS, Answer.PENDING, GOOD)


class StoreHealth:
    """Whether a store answers; to a lookup, a store that is down looks empty. `refused` counts records by lane.
    `on_change(kind, is_lost)` is called when it stops or resumes answering; `kind` is "read" or "write"."""

    def __init__(self, on_change: Callable[[str, bool], None] | None = None) -> None:
        self.refused: Counter[Lane] = Counter(dict.fromkeys(_KINDS, 0))
        self._on_change = on_change
        self._failures = {"read": 0, "write": 0}

    @property
    def lost(self) -> tuple[str, ...]:
        """The kinds of transfers that the store does not answer now."""
        return tuple(kind for kind, count in self._failures.items() if count >= _FAILURES)

    def ended(self, transfer: Transfer) -> None:
        """Count a transfer that has ended."""
        kind = _KINDS.get(transfer.lane)
        if kind is None:
            return
        results = transfer.answers if transfer.lane is Lane.LOOK and not transfer.error else transfer.defects
        found = Counter(chain.from_iterable(results))
        refused = sum(found[result] for result in _NO_ANSWER)
        self.refused[transfer.lane] += refused
        if found or transfer.error:
            failed = bool(transfer.error) or (refused > 0 and not any(found[result] for result in _ANSWERS))
            before = kind in self.lost
            self._failures[kind] = min(self._failures[kind] + 1, _FAILURES) if failed else 0
            if (kind in self.lost) is not before and self._on_change is not None:
                self._on_change(kind, not before)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSettings:
    """`host_frames` and `record_bytes` are by group. The engine closes `mover`, which has a store if
    `stores`; `health` records its answers. `always` loads and fetches even when computing is faster. `peers` compute
    prompts for this engine."""

    host_frames: tuple[int, ...]
    record_bytes: tuple[int, ...]
    mover: Mover
    break_even: BreakEven
    write: WritePolicy = WritePolicy.THROUGH
    always: bool = False
    stores: bool = False
    prefetch: PrefetchPolicy = PrefetchPolicy.BREAK_EVEN
    prefetch_seconds: float = 2.0
    health: StoreHealth = field(default_factory=StoreHealth)
    peers: PrefillPeers | None = None

    def num_bytes(self, counts: Iterable[int]) -> int:
        """Bytes of the records of so many frames, by group."""
        return sum(count * size for count, size in zip(counts, self.record_bytes, strict=True))


@dataclass(slots=True)
class LinkCounters:
    """Ended transfers of one lane, with failed ones, the bytes that moved, and seconds of work."""

    moves: int = 0
    bytes: int = 0
    seconds: float = 0.0
    counts: list[int] = field(default_factory=lambda: [0] * (len(_BOUNDS_S) + 1))

    def add(self, move: Transfer) -> None:
        """Count a transfer that has ended."""
        self.moves += 1
        self.bytes += move.moved_bytes
        self.seconds += move.seconds
        self.counts[bisect_left(_BOUNDS_S, move.seconds)] += 1

    def to_dict(self) -> dict[str, Any]:
        """`at_most` has pairs: seconds, and how many transfers took at most that long."""
        at_most = list(zip(_BOUNDS_S, accumulate(self.counts[:-1]), strict=True))
        return {"moves": self.moves, "bytes": self.bytes, "seconds": self.seconds, "at_most": at_most}


@dataclass(slots=True)
class TierCounters:
    """Frames, bytes, prompt tokens and transfers, and counts of failures.

    `host_hit_tokens` were reused from host memory; `storage_hit_tokens` were reused for the first time after a fetch,
    and `peer_hit_tokens` by the request that a prefill engine computed them for. `unsaved_frames` found no room on the
    host, the store refused `unstored_frames`, and had lost `lost_frames` when they were touched. `defects` counts bad
    records by tier and kind.
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
    peer_hit_tokens: int = 0
    declined_tokens: int = 0
    failed_moves: int = 0
    refused_moves: int = 0
    defects: Counter[tuple[str, str]] = field(default_factory=Counter)
    links: dict[Lane, LinkCounters] = field(default_factory=lambda: {link: LinkCounters() for link in LANES})

    def corrupt(self, where: str, defects: Iterable[str]) -> None:
        """Count defects of records of the host, storage or a peer; a record that did not arrive has none."""
        self.defects.update((where, defect) for defect in defects if defect not in UNDAMAGED)

    def to_dict(self) -> dict[str, Any]:
        """As JSON: `defects` by `tier:defect`, `links` by lane."""
        return asdict(replace(self, links={})) | {
            "defects": {f"{tier}:{defect}": count for (tier, defect), count in self.defects.items()},
            "links": {link.name: counters.to_dict() for link, counters in self.links.items()},
        }
