"""Messages between an engine process and its owner, with sockets that take less than a message."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from hypothesis import given, settings
from hypothesis import strategies as st

from quire.client.channel import Channel
from tests import waits


@contextmanager
def pair() -> Iterator[tuple[Channel, Channel]]:
    own, other = Channel.pair()
    for end in (own._end, other):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    reader = Channel(other)
    try:
        yield own, reader
    finally:
        own.close()
        reader.close()


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40_000), st.booleans()), max_size=12))
def test_messages_arrive_whole_and_in_order(lengths: list[tuple[int, bool]]) -> None:
    """The writer never waits: what the socket does not take goes out by `flush`."""
    with pair() as (writer, reader):
        sent = [bytes([i]) * length for i, (length, _) in enumerate(lengths)]
        received: list[bytes] = []
        was_full = False
        for message, (_, is_read) in zip(sent, lengths, strict=True):
            was_full |= not writer.send(message)
            received += reader.receive() if is_read else []
        while len(received) < len(sent):
            writer.flush()
            received += reader.receive()
        assert received == sent
        assert was_full or sum(map(len, sent)) < 60_000
        assert not reader.is_within_message
        assert reader.receive() == []


def check_messages() -> None:
    """More than the socket takes at once."""
    with pair() as (writer, reader):
        writer.send(bytes(400_000))
        received: list[bytes] = []
        for _ in range(100):
            writer.flush()
            received += reader.receive()
        assert received == [bytes(400_000)]


def test_what_was_sent_before_the_end_is_received() -> None:
    with pair() as (writer, reader):
        writer.send(b"last")
        writer.close()
        assert reader.receive() == [b"last"]
        assert reader.is_open
        assert reader.receive() == []
        assert not reader.is_open
        assert reader.send(b"to no one"), "it is dropped, and nothing is left to flush"


def test_a_close_gives_the_reader_time_and_no_more() -> None:
    with pair() as (writer, _):
        assert not writer.send(bytes(10_000_000))
        writer.close(linger_s=0.2)
    with pair() as (writer, reader), ThreadPoolExecutor() as pool:
        assert not writer.send(bytes(1_000_000))
        closed = pool.submit(writer.close, linger_s=waits.FOR_EVER_S)
        received = []
        while not received:
            received = reader.receive()
            time.sleep(0.001)
        assert received == [bytes(1_000_000)]
        closed.result()
