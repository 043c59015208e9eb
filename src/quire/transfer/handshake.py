"""The handshake of two engines: proof of the shared secret, then who they are, then whether their pages fit.

    dialer                                  acceptor
    greeting: protocol, version, nonce  -->
                                        <-- greeting
    HMAC of both nonces                 -->                nothing else is read before it is right
                                        <-- HMAC of both nonces, Hello
    Hello                               -->
                                        <-- AcceptorVerdict

Both compare the identities, and refuse by name. Connections that carry pages end with the proofs (`SecretProof`). No
I/O: bytes come in by `inbox` and leave by `outbox`.
"""

from __future__ import annotations

import hmac
import os
import struct
from collections.abc import Callable, Generator
from typing import Annotated, ClassVar, Final, Literal, TypeVar, cast, get_args

import msgspec
from msgspec import Meta

from quire.errors import InvalidInput, PeerRefused

VERSION: Final = 3
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


class Foreign(Exception):
    """A connection that is no peer's, or breaks the protocol. The `reason` is "foreign", "version", "secret",
    "malformed", "timeout", "too many", "self", the field that differs, or what the acceptor said."""

    def __init__(self, reason: str, problem: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.problem = problem or f"the connection is refused: {reason}."


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
    "model": "start both engines with the same model and revision.",
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


class SecretProof:
    """One side's proof that it has the shared secret, and the check of the other's. The proofs are of one connection of
    one `protocol`, and of `about`: what both sides say of it."""

    protocol: ClassVar[bytes] = b"quire-pages\0\0\0"

    def __init__(self, secret: bytes, *, dials: bool, about: bytes = b"") -> None:
        assert secret
        self.inbox = bytearray()
        self.outbox = bytearray()
        self.num_missing = 0
        """Bytes without which `advance` gets no further, at least one; those after them may be of what follows."""
        self._secret = secret
        self._dials = dials
        self._about = about
        self._has_succeeded = False
        self._steps = self._run()

    def advance(self) -> bool:
        """Read what is in `inbox`; returns whether the handshake has succeeded. Raises Foreign or PeerRefused; then
        `outbox` may have last words."""
        next(self._steps, None)
        return self._has_succeeded

    def _run(self) -> Generator[None, None, None]:
        yield from self._prove()
        yield from self._introduce()
        self._has_succeeded = True

    def _introduce(self) -> Generator[None, None, None]:
        """What follows the proofs: nothing."""
        yield from ()

    def _prove(self) -> Generator[None, None, None]:
        nonce = os.urandom(32)
        greeting = _GREETING.pack(self.protocol, VERSION, nonce)
        if self._dials:
            self.outbox += greeting
            nonces = nonce + (yield from self._greeting())
            self.outbox += self._hmac(b"dialer", nonces)
            yield from self._check(b"acceptor", nonces)
        else:
            nonces = (yield from self._greeting()) + nonce
            self.outbox += greeting
            yield from self._check(b"dialer", nonces)
            self.outbox += self._hmac(b"acceptor", nonces)

    def _hmac(self, role: bytes, nonces: bytes) -> bytes:
        return hmac.digest(self._secret, self.protocol + role + nonces + self._about, "sha256")

    def _check(self, role: bytes, nonces: bytes) -> Generator[None, None, None]:
        if not hmac.compare_digest((yield from self._take(_HMAC_BYTES)), self._hmac(role, nonces)):
            raise Foreign("secret")

    def _greeting(self) -> Generator[None, None, bytes]:
        while len(self.inbox) < _GREETING.size:
            self._check_protocol()
            self.num_missing = _GREETING.size - len(self.inbox)
            yield
        self._check_protocol()
        _, version, nonce = _GREETING.unpack((yield from self._take(_GREETING.size)))
        if version != VERSION:
            raise Foreign("version")
        return bytes(nonce)

    def _check_protocol(self) -> None:
        """Refuse at the first byte that no peer would send."""
        if not self.protocol.startswith(self.inbox[: len(self.protocol)]):
            raise Foreign("foreign")

    def _take(self, count: int) -> Generator[None, None, bytes]:
        while len(self.inbox) < count:
            self.num_missing = count - len(self.inbox)
            yield
        taken = bytes(self.inbox[:count])
        del self.inbox[:count]
        return taken


class Handshake(SecretProof):
    """One side of the handshake of two engines. `theirs` is known before it is accepted: `admit` is called with it, and
    returns why the other engine is refused for now, or ""."""

    protocol = b"quire-transfer"

    def __init__(self, mine: Hello, secret: bytes, *, dials: bool, admit: Callable[[Hello], str]) -> None:
        super().__init__(secret, dials=dials)
        self.theirs: Hello | None = None
        self._mine = mine
        self._admit = admit

    def _introduce(self) -> Generator[None, None, None]:
        if self._dials:
            self.theirs = theirs = yield from self._message(_HELLOS)
            refusal = "self" if theirs.peer == self._mine.peer else self._admit(theirs)
            if refusal:
                raise Foreign(refusal)
            self.outbox += frame(_ENCODER.encode(self._mine))
            self._mine.compare(theirs, dials=True)
            refusal = (yield from self._message(_VERDICTS)).refusal
        else:
            self.outbox += frame(_ENCODER.encode(self._mine))
            self.theirs = theirs = yield from self._message(_HELLOS)
            self._mine.compare(theirs, dials=False)
            refusal = self._admit(theirs)
            self.outbox += frame(_ENCODER.encode(AcceptorVerdict(refusal)))
        if refusal:
            raise Foreign(refusal)

    def _message(self, decoder: msgspec.msgpack.Decoder[T]) -> Generator[None, None, T]:
        (size,) = _LENGTH.unpack((yield from self._take(_LENGTH.size)))
        if size > MOST_HELLO_BYTES:
            raise Foreign("malformed")
        try:
            return decoder.decode((yield from self._take(size)))
        except (msgspec.DecodeError, ValueError) as error:
            raise Foreign("malformed") from error
