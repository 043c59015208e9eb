"""Counts by peer: few labels, however often peers restart, and sums that never shrink."""

from __future__ import annotations

from quire.counters import plain
from quire.transfer.counts import KEEP_S, ByPeer, ReceivedCounts


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_restarted_peer_goes_on_under_its_label() -> None:
    counts = ByPeer(ReceivedCounts)
    for epoch in range(1000):
        peer = f"host.1@{epoch}"
        counts.connected(peer, "prefill-0")
        counts.of(peer).asks += 1
        assert counts.lost(peer) and not counts.lost(peer)
        counts.of(peer).bytes += 5  # what ends after the loss
    assert {label: each.asks for label, each in counts.by_label().items()} == {"prefill-0": 1000}
    assert counts.totals() == {"asks": 1000, "received_tokens": 0, "received_bytes": 5000, "fallbacks": 0}
    assert counts.label("host.1@0") == "" and counts.label("host.1@999") == "prefill-0"


def test_a_label_without_a_peer_is_dropped_after_an_hour_and_stays_in_the_sums() -> None:
    clock = Clock()
    counts = ByPeer(ReceivedCounts, clock)
    for peer, label in (("a", "prefill-0"), ("b", "prefill-0"), ("c", "prefill-1")):
        counts.connected(peer, label)
        counts.of(peer).tokens += 16
    counts.lost("a")
    counts.lost("c")
    clock.now = KEEP_S + 1
    assert list(counts.by_label()) == ["prefill-0"], "b is still there"
    assert counts.totals()["received_tokens"] == 48
    counts.connected("d", "prefill-1")
    counts.of("d").tokens += 16
    assert counts.by_label()["prefill-1"].tokens == 16
    assert counts.totals()["received_tokens"] == 64


def test_prompts_without_a_peer_are_counted_under_no_label() -> None:
    counts = ByPeer(ReceivedCounts)
    counts.of("").fallbacks["unconnected"] += 2
    assert plain(counts.by_label()[""].fallbacks) == {"unconnected": 2} and counts.totals()["fallbacks"] == 2
