"""Settings of the tiers below the device, and their counters since the start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import ClassVar

from quire.counters import Histogram, counter, histogram, labelled
from quire.settings.fields import PrefetchPolicy, WritePolicy
from quire.tiers.break_even import BreakEven
from quire.tiers.mover import Mover
from quire.tiers.prefill import PrefillPeers
from quire.tiers.store import Answer
from quire.tiers.transfer import FAILED, GOOD, LANES, REFUSED, UNDAMAGED, Lane, Transfer

DEFECTS = ("magic", "group", "length", "layout", "key", "digest")
"""What may be wrong with a record (`quire.memory.record`)."""

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

    def ended(self, move: Transfer) -> None:
        """Count a transfer that has ended."""
        kind = _KINDS.get(move.lane)
        if kind is None:
            return
        results = move.answers if move.lane is Lane.LOOK and not move.error else move.defects
        found = Counter(chain.from_iterable(results))
        refused = sum(found[result] for result in _NO_ANSWER)
        self.refused[move.lane] += refused
        if found or move.error:
            failed = bool(move.error) or (refused > 0 and not any(found[result] for result in _ANSWERS))
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
    """Ended transfers of one lane, with failed ones."""

    moves: int = 0
    bytes: int = counter("Bytes that moved between tiers, by link.", name="tier_moved_bytes")
    seconds: Histogram = histogram(
        "Seconds of work for a move, without its wait in a queue.", bounds=_BOUNDS_S, name="tier_move_seconds"
    )

    def add(self, move: Transfer) -> None:
        """Count a transfer that has ended."""
        self.moves += 1
        self.bytes += move.moved_bytes
        self.seconds.observe(move.seconds)


def hits_on(tier: str) -> int:
    """A field with the hit tokens of one tier."""
    text = "Prompt tokens that came from the cache, by where they were; they add up to quire_hit_tokens."
    found: int = counter(text, name="tier_hit_tokens", tier=tier)
    return found


def _dropped(tier: str) -> int:
    text = "Frames of which no copy was made: the host had no room, or the store did not take them that time."
    found: int = counter(text, name="tier_dropped_frames", tier=tier)
    return found


@dataclass(slots=True)
class TierCounters:
    """Frames, bytes, prompt tokens and transfers, and counts of failures.

    `host_hit_tokens` were reused from host memory; `storage_hit_tokens` were reused for the first time after a fetch,
    and `peer_hit_tokens` by the request that a prefill engine computed them for. `unsaved_frames` found no room on the
    host, the store refused `unstored_frames`, and had lost `lost_frames` when they were touched. `defects` counts bad
    records by tier and kind.
    """

    PREFIX: ClassVar = "tier_"
    saved_frames: int = 0
    saved_bytes: int = 0
    unsaved_frames: int = _dropped("host")
    loaded_frames: int = 0
    loaded_bytes: int = 0
    archived_frames: int = 0
    archived_bytes: int = 0
    unstored_frames: int = _dropped("storage")
    lost_frames: int = counter("Frames that were stored, of use, and gone from the store; stored again.")
    fetched_frames: int = 0
    fetched_bytes: int = 0
    demoted_pages: int = counter("Pages that left the device and stayed on the host.")
    host_evicted_pages: int = counter("Pages of which the host gave up its copy for others.")
    host_hit_tokens: int = hits_on("host")
    storage_hit_tokens: int = hits_on("storage")
    peer_hit_tokens: int = hits_on("peer")
    declined_tokens: int = counter(
        "Prompt tokens that were cached on the host or in storage and computed again, which was faster."
    )
    failed_moves: int = counter("Moves between tiers that failed, or brought less than half.")
    refused_moves: int = counter("Moves that were not begun, because too much was on its way on that link.")
    defects: Counter[tuple[str, str]] = counter(
        "Records that were not what they should be, by where they were found and what was wrong; none was served.",
        *("tier", "defect"),
        start=Counter,
        name="tier_corrupt_records",
        known=[f"{tier}:{defect}" for tier in ("host", "storage") for defect in DEFECTS],
    )
    links: dict[str, LinkCounters] = labelled(
        "link", LinkCounters, start=lambda: {link.name: LinkCounters() for link in LANES}
    )

    @property
    def num_hits(self) -> int:
        """Hit tokens of these tiers, a peer among them."""
        return self.host_hit_tokens + self.storage_hit_tokens + self.peer_hit_tokens

    def corrupt(self, where: str, defects: Iterable[str]) -> None:
        """Count defects of records of the host, storage or a peer; a record that did not arrive has none."""
        self.defects.update((where, defect) for defect in defects if defect not in UNDAMAGED)
