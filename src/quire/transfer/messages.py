"""Messages between a decode engine, which asks, and a prefill engine, which answers; their encoding and bounds.

    request   Ask, Want, Cancel, Release       decode -> prefill
    answer    Refused, Sent, Gone              prefill -> decode
    state     Serves                           prefill -> decode

An ask is one prompt. A part is a set of its pages with frames that were prepared for them. Ids of asks ascend for as
long as the decode engine lives, ids of parts ascend in their ask, and neither is used twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec
import numpy as np
from msgspec import Meta

from quire.errors import InvalidInput
from quire.spec.ids import Ids

MOST_PARTS: Final = 1 << 16
MOST_SECONDS: Final = 3600.0
MOST_FRAME_BYTES: Final = 64 << 20
"""Bytes of one encoded message. The longest are a `Want` of millions of pages."""

_MOST_TOKEN_BYTES = 32 << 20
_MOST_GROUPS = 256

MOST_NAME: Final = 1024
MOST_REASON: Final = 1024

AskId = Annotated[int, Meta(ge=1, lt=1 << 47)]
PartId = Annotated[int, Meta(ge=0, lt=MOST_PARTS)]
Name = Annotated[str, Meta(max_length=MOST_NAME)]
ReasonText = Annotated[str, Meta(max_length=MOST_REASON)]


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    ask: AskId


class Ask(_Message, frozen=True):
    """Compute the whole pages of a prompt, and hold them for `seconds`: the decode engine waits no longer. Asks below
    `oldest` have ended. `scope` names model, weights and namespace (`quire.prefix.hashing.scope_of`): an engine with
    another one for the same adapter and salt refuses. `prompt` is raw int32."""

    oldest: AskId
    seconds: Annotated[float, Meta(gt=0, le=MOST_SECONDS)]
    scope: Annotated[bytes, Meta(min_length=16, max_length=16)]
    adapter: Name
    salt: Name
    prompt: Annotated[bytes, Meta(min_length=4, max_length=_MOST_TOKEN_BYTES)]

    def __post_init__(self) -> None:
        if len(self.prompt) % 4 or self.oldest > self.ask:
            raise ValueError("a prompt of whole tokens, and an oldest ask that is not newer")

    def tokens(self) -> Ids:
        """The prompt, int32 `[num_tokens]`, a read-only view."""
        return np.frombuffer(self.prompt, dtype=np.int32)


class Want(_Message, frozen=True):
    """Write these pages to `target`, which the decode engine's connector has opened. `places` are page numbers of the
    prompt, by index of group, raw int32; spans of the target are in the same order. Answered by `Sent` or `Gone`."""

    part: PartId
    places: Annotated[tuple[Annotated[bytes, Meta(max_length=_MOST_TOKEN_BYTES)], ...], Meta(max_length=_MOST_GROUPS)]
    target: Annotated[bytes, Meta(max_length=MOST_FRAME_BYTES)]

    def __post_init__(self) -> None:
        if any(len(places) % 4 for places in self.places):
            raise ValueError("places of 4 bytes")

    def by_group(self) -> list[Ids]:
        """The places of each group, int32 `[num_pages]`, read-only views."""
        return [np.frombuffer(places, dtype=np.int32) for places in self.places]


class Cancel(_Message, frozen=True):
    """This part is not wanted any more. Answered by `Sent` or `Gone` when nothing is written any more."""

    part: PartId


class Release(_Message, frozen=True):
    """The ask has ended. Its parts are cancelled, and each is answered as after `Cancel`."""


class Refused(_Message, frozen=True):
    """Nothing more is computed for this ask: it was not admitted, or it failed. Parts that it has are answered."""

    code: Annotated[str, Meta(max_length=64)]
    reason: ReasonText


class Sent(_Message, frozen=True):
    """All bytes of the part are in the frames of its target."""

    part: PartId


class Gone(_Message, frozen=True):
    """The part is not complete, and nothing is written to its target any more."""

    part: PartId
    reason: ReasonText


class Serves(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Whether the prefill engine computes prompts from now on. It does after the handshake, until it says otherwise."""

    is_on: bool


Request = Ask | Want | Cancel | Release
Answer = Refused | Sent | Gone
Message = Request | Answer | Serves

_ENCODER = msgspec.msgpack.Encoder()
_REQUESTS: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_ANSWERS: msgspec.msgpack.Decoder[Answer | Serves] = msgspec.msgpack.Decoder(Answer | Serves)


@dataclass(frozen=True, slots=True)
class Send:
    """Effect of both state machines: send this message to this peer."""

    peer: str
    message: Message


def tag_of(ask: int, part: int) -> int:
    """The connector's tag of a part: unique for as long as the decode engine lives."""
    return ask * MOST_PARTS + part


def encode(message: Message) -> bytes:
    """The bytes of a message."""
    return _ENCODER.encode(message)


def decode_request(encoded: bytes) -> Request:
    """A message to a prefill engine. Raises InvalidInput for any other bytes."""
    with _refusing():
        return _REQUESTS.decode(encoded)


def decode_answer(encoded: bytes) -> Answer | Serves:
    """A message to a decode engine. Raises InvalidInput for any other bytes."""
    with _refusing():
        return _ANSWERS.decode(encoded)


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except (msgspec.DecodeError, ValueError) as error:  # ValueError: text that is no UTF-8
        raise InvalidInput(f"a message of a peer could not be read: {error}") from error
