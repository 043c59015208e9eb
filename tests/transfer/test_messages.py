"""Encoding of messages: what is sent is read, and everything else is refused."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest

from quire.errors import InvalidInput
from quire.spec.ids import Ids
from quire.transfer.messages import (
    MOST_PARTS,
    Ask,
    Cancel,
    Gone,
    Message,
    Refused,
    Release,
    Sent,
    Serves,
    Want,
    decode_answer,
    decode_request,
    encode,
    tag_of,
)


def prompt(*tokens: int) -> Ids:
    return np.array(tokens, dtype=np.int32)


ASK = Ask(3, 2, 1.5, b"s" * 16, "lora", "salt", prompt(1, 2, 3).tobytes())
WANT = Want(3, 1, (prompt(0, 1).tobytes(), b""), b"target")
REQUESTS: tuple[Message, ...] = (ASK, WANT, Cancel(3, 1), Release(3))
ANSWERS: tuple[Message, ...] = (Refused(3, "full", "no room"), Sent(3, 1), Gone(3, 1, "cancelled"))


def test_round_trips() -> None:
    assert [decode_request(encode(message)) for message in REQUESTS] == list(REQUESTS)
    assert [decode_answer(encode(message)) for message in ANSWERS] == list(ANSWERS)
    assert [decode_answer(encode(Serves(is_on))) for is_on in (True, False)] == [Serves(True), Serves(False)]
    assert ASK.tokens().tolist() == [1, 2, 3]
    assert [places.tolist() for places in WANT.by_group()] == [[0, 1], []]


def test_a_message_of_the_other_direction_is_refused() -> None:
    for message in REQUESTS:
        with pytest.raises(InvalidInput):
            decode_answer(encode(message))
    for message in (*ANSWERS, Serves(True)):
        with pytest.raises(InvalidInput):
            decode_request(encode(message))


@pytest.mark.parametrize(
    "fields",
    [
        ["Cancel"],
        ["Cancel", 0, 1],
        ["Cancel", 1 << 47, 1],
        ["Cancel", 1, -1],
        ["Cancel", 1, MOST_PARTS],
        ["Cancel", 1, 1, 1],
        ["Cancel", "1", 1],
        ["Cancel", True, 1],
        ["Nothing", 1],
        ["Release", 1.5],
        [],
        1,
        {"type": "Cancel", "ask": 1, "part": 1},
        ["Want", 1, 1, [b"abc"], b""],
        ["Want", 1, 1, [b""] * 257, b""],
        ["Ask", 1, 2, 1.0, b"s" * 16, "", "", b"abcd"],
        ["Ask", 1, 1, 0.0, b"s" * 16, "", "", b"abcd"],
        ["Ask", 1, 1, math.nan, b"s" * 16, "", "", b"abcd"],
        ["Ask", 1, 1, math.inf, b"s" * 16, "", "", b"abcd"],
        ["Ask", 1, 1, 1.0, b"s" * 15, "", "", b"abcd"],
        ["Ask", 1, 1, 1.0, b"s" * 16, "a" * 1025, "", b"abcd"],
        ["Ask", 1, 1, 1.0, b"s" * 16, "", "", b"abcde"],
        ["Ask", 1, 1, 1.0, b"s" * 16, "", "", b""],
    ],
    ids=str,
)
def test_what_is_out_of_bounds_is_refused(fields: object) -> None:
    with pytest.raises(InvalidInput):
        decode_request(msgspec.msgpack.encode(fields))


def test_every_cut_and_every_changed_byte_is_read_or_refused() -> None:
    for message in (*REQUESTS, *ANSWERS):
        encoded = encode(message)
        changed = [encoded[:at] for at in range(len(encoded))]
        changed += [
            encoded[:at] + bytes([byte]) + encoded[at + 1 :] for at in range(len(encoded)) for byte in range(256)
        ]
        for each in changed:
            for decode in (decode_request, decode_answer):
                try:
                    decode(each)
                except InvalidInput:
                    continue


def test_tags_are_different_and_fit_an_int64() -> None:
    tags = {tag_of(ask, part) for ask in (1, 2, (1 << 47) - 1) for part in (0, 1, MOST_PARTS - 1)}
    assert len(tags) == 9
    assert 0 < min(tags) <= max(tags) < 1 << 63
