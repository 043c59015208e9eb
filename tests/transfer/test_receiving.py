"""Receiver: every transition alone. The model check (`test_protocol`) has their orders."""

from __future__ import annotations

import numpy as np
import pytest

from quire.transfer.messages import Ask, Cancel, Gone, Refused, Release, Send, Sent, Want
from quire.transfer.receiving import Effects, Ended, PartState, ReceivedPart, Receiver, Shut

PEER, OTHER = "prefill-0@1", "prefill-1@1"
PLACES = [np.arange(2, dtype=np.int32)]


def asked(receiver: Receiver, *, seconds: float = 10.0, now: float = 0.0, peer: str = PEER) -> tuple[int, Effects]:
    return receiver.ask(peer, seconds=seconds, scope=b"s" * 16, adapter="", salt="", prompt=b"abcd", now=now)


def wanted(receiver: Receiver) -> ReceivedPart:
    ask, _ = asked(receiver)
    part = receiver.part(ask)
    receiver.want(part, PLACES, b"target")
    return part


def test_an_ask_and_its_part() -> None:
    receiver = Receiver()
    ask, effects = asked(receiver)
    assert effects == [Send(PEER, Ask(1, 1, 10.0, b"s" * 16, "", "", b"abcd"))]
    assert not receiver.asks[ask].has_ended
    part = receiver.part(ask)
    want = Want(1, 0, (PLACES[0].tobytes(),), b"target")
    assert receiver.want(part, PLACES, b"target") == [Send(PEER, want)]
    assert receiver.want(part, PLACES, b"target") == [], "once"
    assert not part.may_reuse
    assert receiver.receive(PEER, Sent(ask, 0)) == []
    assert (part.state, part.may_reuse) == (PartState.SENT, True)
    assert receiver.release(ask) == [Send(PEER, Release(ask))]
    assert receiver.asks == {}
    assert receiver.release(ask) == []


def test_a_refusal_ends_the_ask_and_its_parts_are_still_answered() -> None:
    receiver = Receiver()
    part = wanted(receiver)
    new = receiver.part(1)
    assert receiver.receive(PEER, Refused(1, "full", "no room")) == [Ended(1, "full", "no room")]
    assert (part.state, new.state) == (PartState.WANTED, PartState.GONE)
    assert receiver.part(1).state is PartState.GONE
    receiver.receive(PEER, Sent(1, 0))
    assert part.state is PartState.SENT
    assert receiver.asks == {}


def test_a_part_that_was_never_wanted_is_over_with_its_ask() -> None:
    receiver = Receiver()
    ask, _ = asked(receiver)
    part = receiver.part(ask)
    receiver.release(ask)
    assert part.state is PartState.GONE
    assert receiver.want(part, PLACES, b"target") == []
    other = receiver.part(asked(receiver)[0])
    assert receiver.cancel(other) == []
    assert other.may_reuse


@pytest.mark.parametrize("answer", [Sent(1, 0), Gone(1, 0, "cancelled")])
def test_a_cancelled_part_is_over_when_the_peer_says_so(answer: Sent | Gone) -> None:
    receiver = Receiver()
    part = wanted(receiver)
    assert receiver.cancel(part) == [Shut(part), Send(PEER, Cancel(1, 0))]
    assert receiver.cancel(part) == []
    assert not part.may_reuse
    receiver.receive(PEER, answer)
    assert part.may_reuse


def test_a_stranger_ends_no_part() -> None:
    receiver = Receiver()
    part = wanted(receiver)
    assert receiver.receive(OTHER, Gone(1, 0, "cancelled")) == receiver.receive(OTHER, Refused(1, "full", "")) == []
    receiver.receive(OTHER, Sent(1, 0))
    assert part.state is PartState.WANTED
    receiver.receive(PEER, Gone(1, 1, "no such part"))
    assert part.state is PartState.WANTED


def test_a_cancelled_part_is_over_when_its_tag_is_shut() -> None:
    receiver = Receiver()
    part = wanted(receiver)
    receiver.shut(part)
    assert part.state is PartState.WANTED, "it is not cancelled"
    receiver.cancel(part)
    receiver.shut(part)
    assert part.state is PartState.GONE


def test_at_the_deadline_the_ask_ends_and_its_frames_are_kept() -> None:
    receiver = Receiver()
    part = wanted(receiver)
    assert receiver.tick(9.9) == []
    assert receiver.tick(10.0) == [Ended(1, "deadline", "the peer is too slow"), Shut(part), Send(PEER, Release(1))]
    assert receiver.tick(1e9) == []
    assert not part.may_reuse
    receiver.connected(PEER)
    assert part.may_reuse
    assert receiver.asks == {}


def test_a_silent_peer_keeps_frames_and_no_request() -> None:
    receiver = Receiver()
    part = wanted(receiver)
    ended = Ended(1, "silent", "the peer does not answer")
    assert receiver.silent(PEER) == [ended, Shut(part), Send(PEER, Release(1))]
    assert receiver.silent(PEER) == []
    assert not part.may_reuse
    receiver.closed(OTHER)
    assert not part.may_reuse
    assert receiver.closed(PEER) == []
    assert part.may_reuse


def test_a_broken_connection_is_no_proof_and_a_closed_one_is() -> None:
    receiver = Receiver()
    part, other = wanted(receiver), wanted(receiver)
    receiver.cancel(other)
    effects = receiver.unreachable(PEER)
    assert effects == [
        Ended(1, "unreachable", "the peer is not reachable"),
        Shut(part),
        Ended(2, "unreachable", "the peer is not reachable"),
    ]
    assert not part.may_reuse
    assert not other.may_reuse
    assert receiver.tick(1e9) == []
    receiver.connected(PEER)
    assert part.may_reuse
    assert other.may_reuse
    third = wanted(receiver)
    assert receiver.closed(PEER) == [Ended(3, "closed", "the peer is gone"), Shut(third)]
    assert third.may_reuse


def test_a_removed_peer_is_sent_nothing_and_keeps_its_frames_until_it_closes() -> None:
    receiver = Receiver()
    part, other = wanted(receiver), receiver.part(asked(receiver, peer=OTHER)[0])
    receiver.want(other, PLACES, b"target")
    assert receiver.left(PEER) == [Ended(1, "removed", "the peer was removed"), Shut(part)]
    assert receiver.left(PEER) == receiver.tick(1.0) == []
    assert (part.state, other.state) == (PartState.CANCELLING, PartState.WANTED)
    receiver.closed(PEER)
    assert (part.state, other.state) == (PartState.GONE, PartState.WANTED)


def test_the_oldest_ask_is_the_first_with_frames() -> None:
    receiver = Receiver()
    part = wanted(receiver)
    second, _ = asked(receiver)
    receiver.release(second)
    receiver.cancel(part)
    receiver.release(1)
    _, effects = asked(receiver)
    assert isinstance(effects[0], Send)
    assert isinstance(effects[0].message, Ask)
    assert effects[0].message.oldest == 1
    receiver.receive(PEER, Gone(1, 0, "cancelled"))
    _, effects = asked(receiver)
    assert isinstance(effects[0], Send)
    assert isinstance(effects[0].message, Ask)
    assert effects[0].message.oldest == 3


def test_frames_that_one_peer_holds_do_not_make_another_remember_every_ask() -> None:
    receiver = Receiver()
    receiver.cancel(wanted(receiver))
    receiver.release(1)
    number, (sent,) = asked(receiver, peer="prefill-1@1")
    assert isinstance(sent, Send) and isinstance(sent.message, Ask)
    assert sent.message.oldest == number == 2
