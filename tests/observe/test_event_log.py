"""EventLog: numbered events, and a reader that is told when it missed some."""

from __future__ import annotations

from quire.observe.events import EventLog
from quire.prefix.hashing import PageHashes
from quire.spec.events import AllCleared, Namespace, PagesRemoved

EVENTS = [PagesRemoved(Namespace(), PageHashes(b"seed", bytes([number] * 4), 4)) for number in range(99)]


def removed(number: int) -> PagesRemoved:
    return EVENTS[number]


def test_numbers_start_at_zero_and_have_no_gaps() -> None:
    log = EventLog()
    assert log.since(0) == (0, [])
    for number in range(3):
        assert log.next_sequence == number
        log.append(removed(number))
    assert log.since(0) == (0, [removed(0), removed(1), removed(2)])
    assert log.since(2) == (2, [removed(2)])
    assert log.since(3) == (3, [])


def test_a_reader_that_is_too_late_is_told_where_the_log_begins() -> None:
    log = EventLog(capacity=2)
    for number in range(5):
        log.append(removed(number))
    assert log.since(0) == (3, [removed(3), removed(4)])
    assert log.since(4) == (4, [removed(4)])
    assert log.next_sequence == 5


def test_a_reader_that_is_ahead_gets_nothing() -> None:
    log = EventLog()
    log.append(AllCleared())
    first, events = log.since(7)
    assert events == []
    assert first >= log.next_sequence


def test_following_in_pieces_gives_every_event_once() -> None:
    log = EventLog(capacity=8)
    seen, position = [], 0
    for number in range(30):
        log.append(removed(number))
        if number % 7 == 6 or number == 29:
            first, events = log.since(position)
            assert first == position
            seen += events
            position = first + len(events)
    assert seen == [removed(number) for number in range(30)]
