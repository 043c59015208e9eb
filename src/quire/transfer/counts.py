"""What engines did for each other, by peer, under labels of which there are few: a restarted peer has another name."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Final, Generic, TypeVar

from quire.counters import Histogram, counter, histogram

KEEP_S: Final = 3600.0
"""Counts of a label without a connected peer are kept so long."""


@dataclass(slots=True)
class ReceivedCounts:
    """What a prefill engine did for this one. `fallbacks` are asks that did not bring the whole prompt, by cause: the
    rest was computed here. `ask_seconds` are from asks to their ends, `part_seconds` from open frames to their last
    byte."""

    PREFIX: ClassVar = "transfer_"
    asks: int = counter("Prompts that a prefill engine was asked for.")
    tokens: int = counter(
        "Prompt tokens that prefill engines computed and that arrived whole.", name="transfer_received_tokens"
    )
    bytes: int = counter("Bytes of pages that prefill engines wrote here.", name="transfer_received_bytes")
    fallbacks: Counter[str] = counter(
        "Prompts that were computed here instead, whole or in part, by cause.", "cause", start=Counter
    )
    ask_seconds: Histogram = histogram("A prompt asked for to the end of its transfers: what its request waits.")
    part_seconds: Histogram = histogram("Host frames opened to a prefill engine to their last byte.")

    def totals(self) -> dict[str, int]:
        """Those that are added up over all peers."""
        return {
            "asks": self.asks,
            "received_tokens": self.tokens,
            "received_bytes": self.bytes,
            "fallbacks": sum(self.fallbacks.values()),
        }


@dataclass(slots=True)
class SentCounts:
    """What this engine did for a decode engine. `failures` are writes that failed, of which the first of a part is
    repeated, and parts that were not written, by cause. `write_seconds` are those of writes, without the wait for
    pages."""

    PREFIX: ClassVar = "transfer_"
    asks: int = counter("Prompts that a decode engine asked for.", name="transfer_served_asks")
    tokens: int = counter("Prompt tokens whose pages were written to a decode engine.", name="transfer_sent_tokens")
    bytes: int = counter("Bytes of pages that were written to a decode engine.", name="transfer_sent_bytes")
    failures: Counter[str] = counter(
        "Writes to a decode engine that failed, and parts of prompts that were not written, by cause.",
        "cause",
        start=Counter,
    )
    write_seconds: Histogram = histogram(
        "A write of pages to a decode engine, from begin to end.", name="transfer_xfer_time_seconds"
    )

    def totals(self) -> dict[str, int]:
        """Those that are added up over all peers."""
        return {"sent_tokens": self.tokens, "sent_bytes": self.bytes}


T = TypeVar("T", ReceivedCounts, SentCounts)


class ByPeer(Generic[T]):
    """Counts by label. Several peers may have one label, at a time or one after the other."""

    def __init__(self, make: Callable[[], T], seconds: Callable[[], float] = time.monotonic) -> None:
        self._make: Callable[[], T] = make
        self._seconds = seconds
        self._labels: dict[str, str] = {}  # key: peer, as long as the counts of the label are kept
        self._connected: set[str] = set()
        self._counts: dict[str, T] = {}
        self._idle_since: dict[str, float] = {}  # labels without a connected peer
        self._dropped: Counter[str] = Counter()

    def connected(self, peer: str, label: str) -> None:
        """A peer is there, perhaps again."""
        for old in [old for old, its in self._labels.items() if its == label and old not in self._connected]:
            del self._labels[old]
        self._labels[peer] = label
        self._connected.add(peer)
        self._idle_since.pop(label, None)
        self._counts.setdefault(label, self._make())

    def lost(self, peer: str) -> bool:
        """A peer is gone; returns whether it was there."""
        if peer not in self._connected:
            return False
        self._connected.discard(peer)
        label = self.label(peer)
        if label not in map(self.label, self._connected):
            self._idle_since[label] = self._seconds()
        return True

    def label(self, peer: str) -> str:
        """What to call a peer; "" for one that has been replaced."""
        return self._labels.get(peer, "")

    def of(self, peer: str) -> T:
        """The counts of a peer; "" is none in particular."""
        return self._counts.setdefault(self.label(peer), self._make())

    def by_label(self) -> dict[str, T]:
        """The counts, which go on. Drops those whose peers are gone for long."""
        now = self._seconds()
        for label in [label for label, since in self._idle_since.items() if now - since > KEEP_S]:
            del self._idle_since[label]
            self._dropped.update(self._counts.pop(label).totals())
            self._labels = {peer: its for peer, its in self._labels.items() if its != label}
        return dict(self._counts)

    def totals(self) -> dict[str, int]:
        """Sums over all peers since the start, also those whose counts were dropped."""
        found = Counter(self._make().totals())
        found.update(self._dropped)
        for counts in self._counts.values():
            found.update(counts.totals())
        return dict(found)
