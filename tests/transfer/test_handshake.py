"""The handshake: who is refused, by which name, and that nothing is read before the secret."""

from __future__ import annotations

import random
import struct
from typing import Any

import msgspec
import pytest

from quire.errors import PeerRefused
from quire.transfer.handshake import MOST_HELLO_BYTES, VERSION, Hello, frame
from quire.transfer.network import Foreign
from tests.transfer.peers import IDENTITY, SECRET, Side, hello

PREFILL, DECODE = hello("prefill-0", "prefill"), hello("decode-0", "decode")


def both(
    dialer: Hello = DECODE,
    acceptor: Hello = PREFILL,
    secrets: tuple[bytes, bytes] = (SECRET, SECRET),
    refusal: str = "",
) -> tuple[object, object]:
    """Let two sides talk; what each ends with: the other's Hello, or its exception."""
    sides = [
        Side(dialer, secret=secrets[0], dials=True),
        Side(acceptor, secret=secrets[1], dials=False, refusal=refusal),
    ]
    ended: list[object] = [None, None]
    for _ in range(8):
        for number, side in enumerate(sides):
            if ended[number] is None:
                try:
                    if side.advance():
                        ended[number] = side.theirs
                except (Foreign, PeerRefused) as error:
                    ended[number] = error
            sides[1 - number].inbox += side.outbox
            side.outbox.clear()
    return ended[0], ended[1]


def test_two_engines_that_fit() -> None:
    assert both() == (PREFILL, DECODE)
    assert both(hello("a", "both"), hello("b", "both")) == (hello("b", "both"), hello("a", "both"))
    assert PREFILL.peer == "prefill-0@0000000000000001"


@pytest.mark.parametrize(
    ("field", "theirs"),
    [
        ("model", "tiny@other"),
        ("weights_epoch", 1),
        ("page_size", 64),
        ("kv_format", "fp8"),
        ("tensor_parallel", 2),
        ("layouts", {"full": "f" * 64}),
        ("layouts", {"full": "f" * 64, "window": "d" * 64}),
        ("namespaces", "c" * 64),
    ],
)
def test_each_field_of_the_identity_is_refused_by_its_name(field: str, theirs: Any) -> None:
    dialer, acceptor = both(dialer=hello("decode-0", "decode", **{field: theirs}))
    assert isinstance(dialer, PeerRefused)
    assert isinstance(acceptor, PeerRefused)
    assert (dialer.field, dialer.mine, dialer.theirs) == (field, theirs, getattr(IDENTITY, field))
    assert (acceptor.field, acceptor.mine, acceptor.theirs) == (field, getattr(IDENTITY, field), theirs)
    assert f"the peer's {field} is" in acceptor.message
    assert acceptor.fix


def test_every_field_has_a_case_above() -> None:
    assert set(IDENTITY.__struct_fields__) == {
        "model",
        "weights_epoch",
        "page_size",
        "kv_format",
        "tensor_parallel",
        "layouts",
        "namespaces",
    }


@pytest.mark.parametrize(
    ("dialer", "acceptor"),
    [(DECODE, hello("d", "decode")), (hello("p", "prefill"), PREFILL), (hello("p", "prefill"), hello("d", "decode"))],
)
def test_roles_that_do_not_fit(dialer: Hello, acceptor: Hello) -> None:
    for each in both(dialer, acceptor):
        assert isinstance(each, PeerRefused)
        assert each.field == "role"


def test_connectors_that_do_not_fit() -> None:
    for each in both(msgspec.structs.replace(DECODE, connector="nixl")):
        assert isinstance(each, PeerRefused)
        assert each.field == "connector"


def test_another_secret_is_refused_before_anything_else_is_read() -> None:
    dialer, acceptor = both(secrets=(b"one", b"other"))
    assert dialer is None, "it heard nothing"
    assert str(acceptor) == "secret"


def test_an_acceptor_without_the_secret_learns_nothing() -> None:
    side = Side(DECODE, dials=True)
    assert not side.advance()
    greeting = bytes(side.outbox)
    side.outbox.clear()
    side.inbox += greeting  # the same greeting, then the same proof: a reflection
    assert not side.advance()
    side.inbox += side.outbox
    side.outbox.clear()
    with pytest.raises(Foreign, match="secret"):
        side.advance()
    assert not side.outbox


def test_what_was_refused_never_succeeds() -> None:
    acceptor = Side(hello("a", "prefill"), dials=False)
    acceptor.inbox += b"GET / HTTP/1.1"
    with pytest.raises(Foreign, match="foreign"):
        acceptor.advance()
    assert not acceptor.advance()


def test_a_recorded_handshake_cannot_be_repeated() -> None:
    dialer = Side(DECODE, dials=True)
    acceptor = Side(PREFILL, dials=False)
    recorded = b""
    for _ in range(4):
        for side, other in ((dialer, acceptor), (acceptor, dialer)):
            side.advance()
            recorded += side.outbox if side is dialer else b""
            other.inbox += side.outbox
            side.outbox.clear()
    assert acceptor.theirs == DECODE
    again = Side(PREFILL, dials=False)
    again.inbox += recorded
    with pytest.raises(Foreign, match="secret"):
        again.advance()


def test_a_refusal_for_now_is_told() -> None:
    dialer, acceptor = both(refusal="not drained")
    assert str(dialer) == str(acceptor) == "not drained"


def test_an_engine_does_not_connect_to_itself() -> None:
    me = hello("a", "both")
    dialer, _ = both(me, me)
    assert str(dialer) == "self"


@pytest.mark.parametrize(
    "received",
    [b"GET / HTTP/1.1\r\n\r\n", b"\0", b"\x16\x03\x01", b"quire-transfex", b"quire-transfer\0\0" + bytes(32)],
)
def test_strangers_and_other_versions(received: bytes) -> None:
    side = Side(PREFILL, dials=False)
    side.inbox += received
    with pytest.raises(Foreign, match=r"foreign|version"):
        side.advance()
    assert not side.outbox, "a stranger hears nothing"


def test_a_hello_is_bounded_and_strict() -> None:
    fields: dict[str, Any] = msgspec.to_builtins(DECODE)
    fields["address"] = b""
    changes: list[dict[str, Any]] = [
        {"name": "a b"},
        {"name": ""},
        {"name": "n" * 65},
        {"epoch": -1},
        {"role": "boss"},
        {"more": 1},
        {"address": bytes(65 << 10)},
        {"identity": {}},
    ]
    payloads = [msgspec.msgpack.encode(fields | change) for change in changes]
    for encoded in (*(frame(each) for each in payloads), struct.pack("<I", MOST_HELLO_BYTES + 1), frame(b"\xff")):
        dialer = Side(DECODE, dials=True)
        acceptor = Side(PREFILL, dials=False)
        for _ in range(2):
            for side, other in ((dialer, acceptor), (acceptor, dialer)):
                if other is acceptor or not other.theirs:
                    side.advance()
                    other.inbox += side.outbox
                    side.outbox.clear()
        acceptor.inbox.clear()
        acceptor.inbox += encoded
        with pytest.raises(Foreign, match="malformed"):
            acceptor.advance()


def test_bytes_may_arrive_one_by_one_and_garbage_is_never_accepted() -> None:
    dialer = Side(DECODE, dials=True)
    acceptor = Side(PREFILL, dials=False)
    for _ in range(5):
        for side, other in ((dialer, acceptor), (acceptor, dialer)):
            side.advance()
            for byte in bytes(side.outbox):
                other.inbox.append(byte)
                other.advance()
            side.outbox.clear()
    assert (dialer.theirs, acceptor.theirs) == (PREFILL, DECODE)
    draws = random.Random(7)
    for _ in range(300):
        side = Side(PREFILL, dials=False)
        side.inbox += (b"quire-transfer" + VERSION.to_bytes(2, "little"))[: draws.randrange(17)] + draws.randbytes(
            draws.randrange(200)
        )
        try:
            assert not side.advance()
        except Foreign:
            continue
        assert side.theirs is None
