"""ReplyReader: replies cut anywhere on their way are the replies that were sent."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

redis = pytest.importorskip("redis")
from quire.tiers.store import RecordViews  # noqa: E402
from quire.tiers.stores.connections import Reply, ReplyReader  # noqa: E402

Sent = int | bytes | list["Sent"] | str | None
"""A number, a value, several, a refusal, nothing."""

sizes = st.one_of(st.integers(0, 20), st.integers(4080, 4110), st.integers(8180, 8200), st.just(70_000))
values = st.builds(lambda size, fill: (bytes([fill, 13, 10, 36]) * (size // 4 + 1))[:size], sizes, st.integers(0, 255))
replies = st.lists(
    st.recursive(
        st.one_of(st.integers(-5, 10**9), values, st.none(), st.sampled_from(["OOM too much", "ERR no"])),
        lambda inner: st.lists(inner, max_size=4),
        max_leaves=6,
    ),
    min_size=1,
    max_size=6,
)


def encode(reply: Sent) -> bytes:
    if reply is None:
        return b"$-1\r\n"
    if isinstance(reply, int):
        return b":%d\r\n" % reply
    if isinstance(reply, bytes):
        return b"$%d\r\n%s\r\n" % (len(reply), reply)
    if isinstance(reply, str):
        return b"-%s\r\n" % reply.encode()
    return b"*%d\r\n" % len(reply) + b"".join(map(encode, reply))


def same(reply: Reply, sent: Sent) -> bool:
    if isinstance(sent, str):
        return isinstance(reply, redis.ResponseError) and str(reply) == sent
    if isinstance(sent, list):
        return isinstance(reply, list) and len(reply) == len(sent) and all(map(same, reply, sent))
    return reply == sent


@contextmanager
def arriving(content: bytes, cuts: list[int]) -> Iterator[ReplyReader]:
    """A reader to which the content comes in pieces, after which the connection ends."""
    here, there = socket.socketpair()
    reader = ReplyReader()
    reader.on_connect(SimpleNamespace(_sock=here))

    def send() -> None:
        with there, suppress(BrokenPipeError):
            at = 0
            for cut in [*cuts, len(content)]:
                there.sendall(content[at : at + cut])
                at += cut

    sender = threading.Thread(target=send)
    sender.start()
    with here:
        yield reader
    sender.join()


@given(replies, st.lists(st.integers(1, 5000), max_size=8))
def test_replies_arrive_as_they_were_sent(sent: list[Sent], cuts: list[int]) -> None:
    with arriving(b"".join(map(encode, sent)), cuts) as reader:
        assert all(same(reader.read_response(), reply) for reply in sent)
        with pytest.raises(redis.ConnectionError):
            reader.read_response()


@given(
    st.lists(st.one_of(values, st.none(), st.just("ERR no")), max_size=6), st.lists(st.integers(1, 5000), max_size=8)
)
def test_values_arrive_in_their_targets(sent: list[bytes | str | None], cuts: list[int]) -> None:
    """And nowhere else: every second target is of another length, and stays as it was."""
    with arriving(b"".join(map(encode, sent)), cuts) as reader:
        for index, value in enumerate(sent):
            length = (len(value) if isinstance(value, bytes) else 3) + index % 2
            row = bytearray(b"." * (length + 16))
            reader.target = RecordViews(
                (memoryview(row)[8 : 8 + length // 3], memoryview(row)[8 + length // 3 : 8 + length])
            )
            reply = reader.read_response()
            if isinstance(value, bytes):
                assert reply == len(value)
                assert row == b"." * 8 + (value if not index % 2 else b"." * length) + b"." * 8
            else:
                assert same(reply, value)
                assert row == b"." * (length + 16)


def test_what_is_no_reply() -> None:
    for content in (b"?what\r\n", b"$3\r\nabcd\r\n"):
        with arriving(content, []) as reader, pytest.raises(redis.exceptions.InvalidResponse):
            reader.read_response()
