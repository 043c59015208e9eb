"""Sender: every transition alone. The model check (`test_protocol`) has their orders."""

from __future__ import annotations

import pytest

from quire.transfer.messages import Ask, Cancel, Gone, Refused, Release, Send, Sent, Want
from quire.transfer.sending import Begin, Disconnect, Drained, Drop, Sender, StartPrompt, StopPrompt

PEER = "decode-0@1"
WANT, OTHER = (Want(1, part, (), b"target") for part in (0, 1))


def ask_of(number: int, oldest: int = 1) -> Ask:
    return Ask(number, oldest, 10.0, b"s" * 16, "", "", b"abcd")


def computing() -> Sender:
    sender = Sender(margin_s=1.0, drain_s=5.0)
    assert sender.receive(PEER, ask_of(1), 0.0) == [StartPrompt(PEER, ask_of(1))]
    return sender


def writing() -> Sender:
    sender = computing()
    assert sender.receive(PEER, WANT, 0.0) == []
    assert sender.ready(PEER, WANT) == [Begin(PEER, WANT)]
    return sender


def test_an_ask_and_its_part() -> None:
    sender = computing()
    assert sender.receive(PEER, ask_of(1), 0.0) == [], "twice"
    assert sender.receive(PEER, WANT, 0.0) == []
    assert sender.waiting() == [(PEER, WANT)]
    assert sender.ready(PEER, WANT) == [Begin(PEER, WANT)]
    assert sender.waiting() == sender.ready(PEER, WANT) == sender.receive(PEER, WANT, 0.0) == []
    assert sender.landed(PEER, WANT) == [Send(PEER, Sent(1, 0))]
    assert sender.receive(PEER, WANT, 0.0) == [Send(PEER, Sent(1, 0))], "told again, and not written again"
    assert sender.receive(PEER, Release(1), 0.0) == [StopPrompt(PEER, 1), Drop(PEER, 1)]
    assert sender.receive(PEER, Release(1), 0.0) == []
    assert sender.receive(PEER, WANT, 0.0) == [Send(PEER, Gone(1, 0, "ended"))]
    assert sender.lost(PEER, 0.0) == [Drained(PEER)]
    assert sender.clients == {}


def test_a_part_that_is_cancelled_before_it_is_known_is_never_written() -> None:
    sender = computing()
    assert sender.receive(PEER, Cancel(1, 0), 0.0) == [Send(PEER, Gone(1, 0, "cancelled"))]
    assert sender.receive(PEER, WANT, 0.0) == [Send(PEER, Gone(1, 0, "cancelled"))]
    assert sender.waiting() == sender.ready(PEER, WANT) == []


def test_a_part_that_waits_is_cancelled_at_once() -> None:
    sender = computing()
    sender.receive(PEER, WANT, 0.0)
    assert sender.receive(PEER, Cancel(1, 0), 0.0) == [Send(PEER, Gone(1, 0, "cancelled"))]
    assert sender.ready(PEER, WANT) == sender.unavailable(PEER, WANT, "late") == []


@pytest.mark.parametrize("lands", [True, False])
def test_a_write_that_is_cancelled_is_answered_when_it_has_ended(lands: bool) -> None:
    sender = writing()
    assert sender.receive(PEER, Cancel(1, 0), 0.0) == []
    answer = Sent(1, 0) if lands else Gone(1, 0, "broken")
    assert (sender.landed(PEER, WANT) if lands else sender.failed(PEER, WANT, "broken")) == [Send(PEER, answer)]


def test_holds_last_until_the_last_write_has_ended() -> None:
    sender = writing()
    sender.receive(PEER, OTHER, 0.0)
    gone = Send(PEER, Gone(1, 1, "released"))
    assert sender.receive(PEER, Release(1), 0.0) == [StopPrompt(PEER, 1), gone]
    assert sender.receive(PEER, Want(1, 2, (), b""), 0.0) == [Send(PEER, Gone(1, 2, "cancelled"))]
    assert sender.landed(PEER, WANT) == [Send(PEER, Sent(1, 0)), Drop(PEER, 1)]


def test_pages_that_will_not_come() -> None:
    sender = computing()
    sender.receive(PEER, WANT, 0.0)
    assert sender.unavailable(PEER, WANT, "evicted") == [Send(PEER, Gone(1, 0, "evicted"))]


def test_a_request_that_is_not_admitted_or_fails() -> None:
    sender = writing()
    sender.receive(PEER, OTHER, 0.0)
    told = [Send(PEER, Refused(1, "failed", "no memory")), Send(PEER, Gone(1, 1, "no memory"))]
    assert sender.refuse(PEER, 1, 0.0, "failed", "no memory") == told
    assert sender.refuse(PEER, 1, 0.0, "failed", "no memory") == []
    assert sender.landed(PEER, WANT) == [Send(PEER, Sent(1, 0)), Drop(PEER, 1)]
    assert sender.receive(PEER, ask_of(1), 0.0) == [Send(PEER, Refused(1, "ended", "the ask has ended"))]


def test_an_ask_is_held_longer_than_the_peer_waits_and_its_writes_are_ended() -> None:
    sender = writing()
    assert sender.tick(10.9) == []
    late = "the prompt was not computed in time"
    assert sender.tick(11.0) == [Send(PEER, Refused(1, "deadline", late)), StopPrompt(PEER, 1)]
    assert sender.tick(15.9) == []
    assert sender.tick(16.0) == [Disconnect(PEER)]
    assert sender.tick(16.1) == []
    assert sender.failed(PEER, WANT, "disconnected") == [Send(PEER, Gone(1, 0, "disconnected")), Drop(PEER, 1)]
    assert sender.tick(1e9) == []


def test_a_lost_peer_is_drained_before_it_may_connect_again() -> None:
    sender = writing()
    sender.receive(PEER, OTHER, 0.0)
    assert sender.lost(PEER, 0.0) == [StopPrompt(PEER, 1), Disconnect(PEER)]
    assert sender.receive(PEER, ask_of(2), 0.0) == []
    assert sender.failed(PEER, WANT, "disconnected") == [Drop(PEER, 1), Drained(PEER)]
    assert sender.clients == {}
    assert sender.lost("unknown", 0.0) == [Drained("unknown")]


def test_new_weights_end_every_ask() -> None:
    sender = computing()
    sender.receive(PEER, ask_of(2), 0.0)
    told = [Send(PEER, Refused(ask, "weights", "new weights")) for ask in (1, 2)]
    effects = sender.end_all(0.0, "weights", "new weights")
    assert [each for each in effects if isinstance(each, Send)] == told
    assert [each for each in effects if isinstance(each, Drop)] == [Drop(PEER, 1), Drop(PEER, 2)]
    assert sender.end_all(0.0, "weights", "new weights") == []


def test_messages_out_of_order_end_an_ask_before_it_begins() -> None:
    sender = Sender()
    assert sender.receive(PEER, Want(4, 0, (), b""), 0.0) == [Send(PEER, Gone(4, 0, "ended"))]
    assert sender.receive(PEER, ask_of(4), 0.0) == [Send(PEER, Refused(4, "ended", "the ask has ended"))]
    assert sender.receive(PEER, Release(3), 0.0) == []
    assert sender.receive(PEER, ask_of(3), 0.0) == [Send(PEER, Refused(3, "ended", "the ask has ended"))]


def test_ended_asks_are_remembered_by_the_oldest() -> None:
    sender = computing()
    for number in range(2, 50):
        sender.receive(PEER, ask_of(number), 0.0)
        sender.receive(PEER, Release(number), 0.0)
    assert len(sender.clients[PEER].ended) == 48
    effects = sender.receive(PEER, ask_of(60, oldest=60), 0.0)
    assert effects == [StopPrompt(PEER, 1), Drop(PEER, 1), StartPrompt(PEER, ask_of(60, oldest=60))]
    assert sender.clients[PEER].ended == set()
    assert sender.receive(PEER, ask_of(49), 0.0) == [Send(PEER, Refused(49, "ended", "the ask has ended"))]
