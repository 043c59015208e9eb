"""The handshake of two engines: proof of the shared secret, then who they are, then whether their pages fit.

    dialer                                  acceptor
    greeting: protocol, version, nonce  -->
                                        <-- greeting
    HMAC of both nonces                 -->                nothing else is read before it is right
                                        <-- HMAC of both nonces, Hello
    Hello                               -->
                                        <-- AcceptorVerdict

Both compare the identities, and refuse by name. Connections that carry pages end with the proofs (`prove`). No byte is
read beyond a handshake.
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
from collections.abc import Callable, Generator
from typing import Annotated, Final, Literal, TypeVar, cast, get_args

import msgspec
from msgspec import Meta

from quire.errors import InvalidInput, PeerRefused
from quire.transfer.network import Foreign, Steps, receive, receive_exactly, send

VERSION: Final = 4
MESSAGES: Final = b"quire-transfer"
PAGES: Final = b"quire-pages\0\0\0"
"""Protocols, by what a connection carries."""
MOST_HELLO_BYTES: Final = 256 << 10

_GREETING = struct.Struct("<14sH32s")
_LENGTH = struct.Struct("<I")
_HMAC_BYTES = 32

T = TypeVar("T")
Text = Annotated[str, Meta(max_length=4096)]
Role = Literal["prefill", "decode", "both"]


def parse_role(role: str) -> Role:
    """A role by its name. Raises InvalidInput."""
    if role not in get_args(Role):
        raise InvalidInput(f"'{role}' is no role.", fix=f"use one of {', '.join(get_args(Role))}.")
    return cast(Role, role)


class Identity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What two engines must have in common for the pages of one to be valid in the other. `layouts` are the
    fingerprints of all groups by name (`PageLayout.fingerprint`). `namespaces` is the key of one page in the namespace
    of requests without a name: both engines derive all keys in the same way."""

    model: Text
    weights_epoch: int
    page_size: int
    kv_format: Text
    tensor_parallel: int
    layouts: Annotated[dict[Text, Text], Meta(max_length=256)]
    namespaces: Text

    def compare(self, theirs: Identity) -> None:
        """Raises PeerRefused, which names the first difference."""
        for field, fix in _FIXES.items():
            if getattr(self, field) != getattr(theirs, field):
                raise PeerRefused(field, getattr(self, field), getattr(theirs, field), fix=fix)


_FIXES = {
    "weights_epoch": "load the same weights in both engines, then set the same weights epoch.",  # `model` depends on it
    "model": "start both engines with the same model, revision, --dtype, drafts and selection of --hisparse.",
    "page_size": "start both engines with the same --page-size.",
    "kv_format": "start both engines with the same --kv-cache-dtype.",
    "tensor_parallel": "start both engines with the same tensor-parallel width.",
    "layouts": "start both engines with the same version of Quire and the same settings of the cache.",
    "namespaces": "start both engines with the same version of Quire.",
}


class Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One engine to another. `epoch` is random for each start of the process, so that a restarted engine is another
    peer. `connector` and `address` are of the data connector (`Connector.address`). `label` is what its operator calls
    it, if anything."""

    name: Annotated[str, Meta(pattern=r"\A[A-Za-z0-9._:-]{1,64}\Z")]
    epoch: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    role: Role
    identity: Identity
    connector: Annotated[str, Meta(max_length=64)]
    address: Annotated[bytes, Meta(max_length=64 << 10)]
    label: Annotated[str, Meta(pattern=r"\A[A-Za-z0-9._:-]{0,64}\Z")] = ""

    @property
    def peer(self) -> str:
        """The name of the peer: of this engine since its start."""
        return f"{self.name}@{self.epoch:016x}"

    def compare(self, theirs: Hello, *, dials: bool) -> None:
        """Raises PeerRefused if one of the two cannot use the other."""
        prefill, decode = (theirs, self) if dials else (self, theirs)
        for engine, lacks, needed in ((prefill, "decode", "prefill"), (decode, "prefill", "decode")):
            if engine.role == lacks:
                fix = f"name an engine with --role {needed} or both as the peer." if dials else "change --role."
                raise PeerRefused("role", self.role, theirs.role, fix=fix)
        self.identity.compare(theirs.identity)
        if self.connector != theirs.connector:
            fix = "start both engines with the same --transfer-connector."
            raise PeerRefused("connector", self.connector, theirs.connector, fix=fix)


class AcceptorVerdict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The acceptor's last word: "", or why not now."""

    refusal: Text = ""


_ENCODER = msgspec.msgpack.Encoder()
_HELLOS: msgspec.msgpack.Decoder[Hello] = msgspec.msgpack.Decoder(Hello)
_VERDICTS: msgspec.msgpack.Decoder[AcceptorVerdict] = msgspec.msgpack.Decoder(AcceptorVerdict)


def frame(payload: bytes) -> bytes:
    """The payload after its length."""
    return _LENGTH.pack(len(payload)) + payload


def take_frame(inbox: bytearray, most_bytes: int) -> bytes | None:
    """Remove the first frame; None if it has not arrived whole. Raises Foreign for a longer one than `most_bytes`."""
    if len(inbox) < _LENGTH.size:
        return None
    (size,) = _LENGTH.unpack_from(inbox)
    if size > most_bytes:
        raise Foreign("malformed")
    if len(inbox) < _LENGTH.size + size:
        return None
    payload = bytes(inbox[_LENGTH.size : _LENGTH.size + size])
    del inbox[: _LENGTH.size + size]
    return payload


def prove(made: socket.socket, secret: bytes, protocol: bytes, *, dials: bool, about: bytes = b"") -> Steps:
    """Prove to the other side of a connection that this one has the shared secret, and check its proof. The proofs are
    of one connection of one `protocol`, and of `about`: what both sides say of it. Raises Foreign, EOFError and
    OSError."""

    def mac(role: bytes) -> bytes:
        return _hmac(secret, protocol, role, nonces, about)

    def check(role: bytes) -> Steps:
        if not hmac.compare_digest((yield from receive_exactly(made, _HMAC_BYTES)), mac(role)):
            raise Foreign("secret")

    assert secret
    nonce = os.urandom(32)
    greeting = _GREETING.pack(protocol, VERSION, nonce)
    if dials:
        yield from send(made, greeting)
        nonces = nonce + (yield from _greeting(made, protocol))
        yield from send(made, mac(b"dialer"))
        yield from check(b"acceptor")
    else:
        nonces = (yield from _greeting(made, protocol)) + nonce
        yield from send(made, greeting)
        yield from check(b"dialer")
        yield from send(made, mac(b"acceptor"))


def _hmac(secret: bytes, protocol: bytes, role: bytes, nonces: bytes, about: bytes) -> bytes:
    return hmac.digest(secret, protocol + role + nonces + about, "sha256")


def _greeting(made: socket.socket, protocol: bytes) -> Generator[int, None, bytes]:
    """The nonce of the other side. Refuses it at the first byte that no peer would send."""
    read = b""
    while len(read) < _GREETING.size:
        read += yield from receive(made, _GREETING.size - len(read))
        if not protocol.startswith(read[: len(protocol)]):
            raise Foreign("foreign")
    _, version, nonce = _GREETING.unpack(read)
    if version != VERSION:
        raise Foreign("version")
    return bytes(nonce)


def shake(
    made: socket.socket, mine: Hello, secret: bytes, *, dials: bool, admit: Callable[[Hello], str]
) -> Generator[int, None, Hello]:
    """One side of the handshake of two engines; returns the other's Hello. Before that is accepted, `admit` is called
    with it, and returns why the other engine is refused for now, or "". Raises as `prove`, and PeerRefused."""
    yield from prove(made, secret, MESSAGES, dials=dials)
    if dials:
        theirs = yield from _message(made, _HELLOS)
        refusal = "self" if theirs.peer == mine.peer else admit(theirs)
        if not refusal:
            yield from send(made, frame(_ENCODER.encode(mine)))
            mine.compare(theirs, dials=True)
            refusal = (yield from _message(made, _VERDICTS)).refusal
    else:
        yield from send(made, frame(_ENCODER.encode(mine)))
        theirs = yield from _message(made, _HELLOS)
        mine.compare(theirs, dials=False)
        refusal = admit(theirs)
        yield from send(made, frame(_ENCODER.encode(AcceptorVerdict(refusal))))
    if refusal:
        raise Foreign(refusal)
    return theirs


def _message(made: socket.socket, decoder: msgspec.msgpack.Decoder[T]) -> Generator[int, None, T]:
    (size,) = _LENGTH.unpack((yield from receive_exactly(made, _LENGTH.size)))
    if size > MOST_HELLO_BYTES:
        raise Foreign("malformed")
    try:
        return decoder.decode((yield from receive_exactly(made, size)))
    except (msgspec.DecodeError, ValueError) as error:
        raise Foreign("malformed") from error
