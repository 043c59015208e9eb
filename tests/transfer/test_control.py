"""Control: real sockets and processes. Times are limits that a machine under load keeps."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import struct
import threading
import time
from typing import Any

import pytest

from quire.errors import AddressInUse, InvalidInput
from quire.transfer import control as module
from quire.transfer import network
from quire.transfer.address import Address, format_address, parse_address, parse_peers
from quire.transfer.control import Arrived, Closed, Connected, Control, Left, Silent, Speaks, Unreachable
from quire.transfer.handshake import VERSION
from quire.transfer.messages import MOST_FRAME_BYTES, Ask, Refused, Release, Sent, Want
from tests.transfer.peers import IDENTITY, LONG_S, SECRET, Side, Watched, control, hello, process, until

PREFILL, DECODE = hello("prefill-0", "prefill"), hello("decode-0", "decode")
ASK = Ask(1, 1, 2.0, b"s" * 16, "", "", b"abcd")


def address_of(watched: Watched) -> Address:
    assert watched.control.address is not None
    return watched.control.address


def raw(address: Address) -> socket.socket:
    return socket.create_connection(address, timeout=LONG_S)


def shaken(address: Address) -> socket.socket:
    """A connection whose handshake has succeeded."""
    made, side = raw(address), Side(DECODE, dials=True)
    while not side.advance():
        made.sendall(side.outbox)
        side.outbox.clear()
        side.inbox += made.recv(4096)
    return made


def is_closed(made: socket.socket) -> bool:
    """Whether the other end has closed it; waits for bytes until its timeout."""
    try:
        while made.recv(4096):
            pass
    except (ConnectionResetError, TimeoutError) as error:
        return isinstance(error, ConnectionResetError)
    return True


def test_requests_and_answers() -> None:
    with control(PREFILL) as prefill, control(DECODE, listen=None, peers=[address_of(prefill)]) as decode:
        there, here = decode.wait(Connected), prefill.wait(Connected)
        assert (there.peer, there.dialed, there.hello) == (PREFILL.peer, True, PREFILL)
        assert (here.peer, here.dialed, here.hello) == (DECODE.peer, False, DECODE)
        assert decode.control.address is None
        assert address_of(prefill)[0] == "127.0.0.1", "loopback unless told otherwise"
        assert decode.control.send(PREFILL.peer, ASK)
        assert prefill.wait(Arrived) == Arrived(DECODE.peer, ASK)
        assert prefill.control.send(DECODE.peer, Sent(1, 0))
        assert decode.wait(Arrived) == Arrived(PREFILL.peer, Sent(1, 0))
        assert not decode.control.send(PREFILL.peer, Sent(1, 0)), "the answers of a decode engine go nowhere"
        assert not decode.control.send("prefill-0@2", ASK)
        large = Want(1, 0, (bytes(4 << 20),), bytes(8 << 20))
        assert decode.control.send(PREFILL.peer, large)
        assert prefill.wait(Arrived) == Arrived(DECODE.peer, large)
        assert decode.control.problems() == {}
        assert not prefill.control.refused


def test_an_orderly_end_is_proof_and_the_connection_comes_back_after_the_drain() -> None:
    with control(PREFILL) as prefill:
        with control(DECODE, listen=None, peers=[address_of(prefill)]):
            prefill.wait(Connected)
        assert prefill.wait(Closed) == Closed(DECODE.peer, False)
        with control(DECODE, listen=None, peers=[address_of(prefill)]) as decode:
            until(lambda: prefill.control.refused["not drained"] > 1)
            decode.none(Connected)
            assert "not drained" in decode.control.problems()[address_of(prefill)]
            prefill.control.drained(DECODE.peer)
            decode.wait(Connected)
            prefill.wait(Connected)


def test_the_same_peer_on_a_second_connection_has_lost_the_first() -> None:
    with control(PREFILL) as prefill:
        made = shaken(address_of(prefill))
        prefill.wait(Connected)
        with made as first, control(DECODE, listen=None, peers=[address_of(prefill)]) as decode:
            assert prefill.wait(Closed) == Closed(DECODE.peer, False)
            first.settimeout(0.3)
            assert not is_closed(first), "a closed connection would prove that the writes to it have ended"
            prefill.control.drained(DECODE.peer)
            decode.wait(Connected)
            first.settimeout(LONG_S)
            assert is_closed(first)


def test_a_killed_peer_is_closed_before_it_is_silent_and_its_successor_is_another_peer() -> None:
    with process(PREFILL) as (prefill, address, _), control(DECODE, listen=None, peers=[address]) as decode:
        decode.wait(Connected)
        prefill.kill()
        assert decode.wait(Closed) == Closed(PREFILL.peer, True)
        assert not any(isinstance(event, Silent) for event in decode.seen)
        assert not decode.control.send(PREFILL.peer, ASK)
        again = hello("prefill-0", "prefill", epoch=2)
        with process(again, address):
            assert decode.wait(Connected).peer == again.peer


def test_a_stopped_peer_is_silent_and_speaks_again() -> None:
    with process(PREFILL) as (prefill, address, _), control(DECODE, listen=None, peers=[address]) as decode:
        decode.wait(Connected)
        assert prefill.pid is not None
        os.kill(prefill.pid, signal.SIGSTOP)
        try:
            assert decode.wait(Silent) == Silent(PREFILL.peer, True)
            assert decode.control.send(PREFILL.peer, ASK), "it is connected"
        finally:
            os.kill(prefill.pid, signal.SIGCONT)
        assert decode.wait(Speaks) == Speaks(PREFILL.peer, True)
        decode.none(Closed, Unreachable, Silent)
        prefill.kill()
        decode.wait(Closed)


def test_idle_connections_stay() -> None:
    with control(PREFILL) as prefill, control(DECODE, listen=None, peers=[address_of(prefill)]) as decode:
        decode.wait(Connected)
        prefill.wait(Connected)
        time.sleep(module.SILENT_S + 2 * module.BEAT_S)
        for each in (prefill, decode):
            each.none(Silent, Closed, Unreachable)


def test_a_peer_that_starts_later_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = taken.getsockname()[:2]
    with control(DECODE, listen=None, peers=[address]) as decode:
        until(lambda: "refused" in decode.control.problems().get(address, ""))
        time.sleep(0.5)
        decode.none(Connected, Closed, Unreachable)
        with control(PREFILL, listen=address):
            decode.wait(Connected)


def test_an_address_that_can_be_no_name_is_a_problem_of_its_own() -> None:
    with control(DECODE, listen=None, peers=[("a..b", 1)]) as decode:
        until(lambda: "idna" in decode.control.problems().get(("a..b", 1), ""))
        assert decode.control._loop.thread.is_alive() and not decode.control.problem


def test_waiting_between_attempts_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[float] = []
    real = module.Control._dial
    monkeypatch.setattr(module.Control, "_dial", lambda *given: (tries.append(given[2]), real(*given)))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = taken.getsockname()[:2]
    with control(DECODE, listen=None, peers=[address]):
        until(lambda: len(tries) == 5)
    gaps = [after - before for before, after in itertools.pairwise(tries)]
    assert all(gap >= least for gap, least in zip(gaps, (0.1, 0.2, 0.4, 0.8), strict=True)), gaps


STRANGERS = {
    "http": (b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n", "foreign"),
    "garbage": (bytes(range(256)) * 64, "foreign"),
    "version": (b"quire-transfer\xff\xff" + bytes(32), "version"),
    "secret": (b"quire-transfer" + VERSION.to_bytes(2, "little") + bytes(32) + bytes(32), "secret"),
}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_strangers_are_refused_and_counted_and_nothing_else_changes(stranger: str) -> None:
    sent, reason = STRANGERS[stranger]
    with control(PREFILL) as prefill, control(DECODE, listen=None, peers=[address_of(prefill)]) as decode:
        decode.wait(Connected)
        prefill.wait(Connected)
        with raw(address_of(prefill)) as made:
            made.sendall(sent)
            until(lambda: prefill.control.refused[reason] == 1)
            heard = b""
            try:
                while read := made.recv(4096):
                    heard += read
            except ConnectionResetError:
                pass
            assert len(heard) <= 48, "at most a nonce"
        assert decode.control.send(PREFILL.peer, ASK)
        assert prefill.wait(Arrived).message == ASK
        assert [type(event) for event in prefill.seen] == [Connected, Arrived]
        assert prefill.control.refused.total() == 1


def test_half_open_connections_end_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "HANDSHAKE_S", 0.5)
    monkeypatch.setattr(network, "MOST_UNPROVEN", 4)
    with control(PREFILL) as prefill:
        strangers = [raw(address_of(prefill)) for _ in range(6)]
        until(lambda: prefill.control.refused == {"too many": 2, "timeout": 4})
        for each in strangers:
            with each:
                assert is_closed(each)
        assert prefill.control.events() == []
        with control(DECODE, listen=None, peers=[address_of(prefill)]):
            prefill.wait(Connected)


def test_a_peer_gets_in_beside_any_number_of_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "HANDSHAKE_S", LONG_S)
    with control(PREFILL) as prefill:
        strangers = [raw(address_of(prefill)) for _ in range(network.MOST_UNPROVEN)]
        with control(DECODE, listen=None, peers=[address_of(prefill)]):
            prefill.wait(Connected, 5.0)
        assert prefill.control.refused["too many"] >= 1
        for each in strangers:
            each.close()


BROKEN = {
    "oversized": struct.pack("<I", MOST_FRAME_BYTES + 1),
    "garbage": struct.pack("<I", 4) + b"\xff\xff\xff\xff",
    "an answer where requests come": struct.pack("<I", 8) + b"\x93\xa4Sent\1\0",
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_peer_that_breaks_the_protocol_is_lost_without_proof(broken: str) -> None:
    with control(PREFILL) as prefill, shaken(address_of(prefill)) as made:
        prefill.wait(Connected)
        made.sendall(BROKEN[broken])
        assert prefill.wait(Unreachable).peer == DECODE.peer
        assert prefill.control.refused == {"malformed": 1}
        prefill.none(Arrived)
        assert not prefill.control.send(DECODE.peer, Sent(1, 0))
        prefill.control.drained(DECODE.peer)
        assert is_closed(made)
        with control(hello("decode-1", "decode"), listen=None, peers=[address_of(prefill)]):
            assert prefill.wait(Connected).peer == hello("decode-1", "decode").peer


def test_a_frame_may_arrive_in_pieces() -> None:
    with control(PREFILL) as prefill, shaken(address_of(prefill)) as made:
        for byte in module.frame(module.encode(ASK)) + module.frame(b"") + module.frame(module.encode(Release(1))):
            made.sendall(bytes([byte]))
        assert prefill.wait(Arrived).message == ASK
        assert prefill.wait(Arrived).message == Release(1)


def test_a_peer_that_reads_nothing_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_QUEUED_BYTES", 1 << 20)
    with control(PREFILL) as prefill, shaken(address_of(prefill)):
        prefill.wait(Connected)
        while prefill.control.send(DECODE.peer, Refused(1, "long", "r" * 1000)):
            pass
        assert prefill.wait(Unreachable).reason == "it takes no messages"


def test_a_refused_identity_is_a_problem_with_a_name(caplog: pytest.LogCaptureFixture) -> None:
    other = hello("decode-0", "decode", page_size=64)
    with control(PREFILL) as prefill, control(other, listen=None, peers=[address_of(prefill)]) as decode:
        until(lambda: prefill.control.refused["page_size"] >= 2)
        problem = decode.control.problems()[address_of(prefill)]
        assert "the peer's page_size is 16, and this engine's is 64" in problem
        assert [problem in record.message for record in caplog.records].count(True) == 1, "once, not at each attempt"
        decode.none(Connected)
        prefill.none(Connected)
        decode.control.set_identity(IDENTITY)
        decode.wait(Connected)


def test_two_addresses_of_one_peer_are_one_connection() -> None:
    with control(PREFILL) as prefill:
        address = address_of(prefill)
        with control(DECODE, listen=None, peers=[address, ("localhost", address[1])]) as decode:
            decode.wait(Connected)
            until(lambda: decode.control.refused["another address of a connected peer"] > 0)
            for each in (prefill, decode):
                each.none(Closed, Unreachable)


def test_engines_with_both_roles_have_a_connection_each_way() -> None:
    ones, others = hello("a", "both"), hello("b", "both")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = taken.getsockname()[:2]
    with control(ones, peers=[address]) as one, control(others, listen=address, peers=[address_of(one)]) as other:
        for each in (one, other):
            assert {each.wait(Connected).dialed, each.wait(Connected).dialed} == {True, False}
        assert one.control.send(others.peer, ASK)
        assert other.control.send(ones.peer, Release(7))
        assert other.wait(Arrived).message == ASK
        assert one.wait(Arrived).message == Release(7)


def test_another_engine_at_the_address_of_an_unreachable_one_proves_its_end() -> None:
    with control(PREFILL) as prefill, control(DECODE, listen=None, peers=[address_of(prefill)]) as decode:
        decode.wait(Connected)
        address = address_of(prefill)
        prefill.control._peers[DECODE.peer, False].outbox.extend(BROKEN["garbage"])
        assert decode.wait(Unreachable).peer == PREFILL.peer
        prefill.control.close()
        again = hello("prefill-0", "prefill", epoch=2)
        with control(again, listen=address):
            assert decode.wait(Closed) == Closed(PREFILL.peer, True)
            assert decode.wait(Connected).peer == again.peer


def test_peers_change_and_those_that_stay_keep_their_connection() -> None:
    other = hello("prefill-1", "prefill")
    with control(PREFILL) as stays, control(other) as leaves, control(hello("prefill-2", "prefill")) as comes:
        kept, old, new = (address_of(each) for each in (stays, leaves, comes))
        with control(DECODE, listen=None, peers=[kept, old]) as decode:
            assert {decode.wait(Connected).peer for _ in range(2)} == {PREFILL.peer, other.peer}
            leaves.wait(Connected)
            decode.control.set_peers([new, kept])
            assert decode.wait(Left) == Left(other.peer, True)
            assert decode.wait(Connected).peer == "prefill-2@0000000000000001"
            assert not decode.control.send(other.peer, ASK), "it is asked no more"
            assert leaves.wait(Closed) == Closed(DECODE.peer, False)
            decode.none(Closed, Unreachable, Silent)  # its writes may go on
            leaves.control.drained(DECODE.peer)
            assert decode.wait(Closed) == Closed(other.peer, True)
            decode.control.set_peers([kept, new])
            time.sleep(2 * module._TICK_S)
            decode.none(Connected, Left, Closed)
            assert decode.control.problems() == {} and not leaves.control.refused
            decode.control.set_peers([])
            assert {decode.wait(Left).peer for _ in range(2)} == {PREFILL.peer, "prefill-2@0000000000000001"}


def test_a_peer_that_is_added_while_it_leaves_connects_when_it_has_left() -> None:
    with control(PREFILL) as prefill, control(DECODE, listen=None, peers=[address_of(prefill)]) as decode:
        decode.wait(Connected)
        for peers in ([], [address_of(prefill)], [], [address_of(prefill)]):
            decode.control.set_peers(peers)
        decode.wait(Left)
        prefill.wait(Closed)
        time.sleep(2 * module._TICK_S)
        decode.none(Connected, Closed, Left)
        prefill.control.drained(DECODE.peer)
        decode.wait(Closed)
        assert decode.wait(Connected).peer == PREFILL.peer
        assert not prefill.control.refused, "it was not dialed before"


def test_a_removed_peer_that_is_stopped_or_killed_is_neither_silent_nor_asked() -> None:
    with process(PREFILL) as (prefill, address, _), control(DECODE, listen=None, peers=[address]) as decode:
        decode.wait(Connected)
        assert prefill.pid is not None
        os.kill(prefill.pid, signal.SIGSTOP)
        decode.wait(Silent)
        decode.control.set_peers([])
        decode.wait(Left)
        time.sleep(module.SILENT_S + 2 * module.BEAT_S)
        decode.none(Silent, Speaks, Closed, Unreachable)
        prefill.kill()
        assert decode.wait(Closed) == Closed(PREFILL.peer, True)
        decode.none(Speaks, Connected)
        assert decode.control.problems() == {}


def test_an_address_that_is_removed_is_dialed_no_more_and_its_last_engine_is_remembered() -> None:
    with control(PREFILL) as prefill, control(DECODE, listen=None, peers=[address_of(prefill)]) as decode:
        decode.wait(Connected)
        address = address_of(prefill)
        prefill.control._peers[DECODE.peer, False].outbox.extend(BROKEN["garbage"])
        decode.wait(Unreachable)
        decode.control.set_peers([])
        prefill.control.close()
        with control(hello("prefill-0", "prefill", epoch=2), listen=address) as again:
            time.sleep(3 * module._TICK_S)
            assert again.control.events() == []
            decode.control.set_peers([address])
            assert decode.wait(Closed) == Closed(PREFILL.peer, True), "another engine is at its address: it has ended"
            decode.wait(Connected)


def test_a_handshake_that_goes_on_ends_with_the_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as quiet:
        address = quiet.getsockname()[:2]
        with control(DECODE, listen=None, peers=[address]) as decode:
            made, _ = quiet.accept()
            decode.control.set_peers([])
            made.settimeout(LONG_S / 4)
            with made:
                assert is_closed(made)
            decode.none(Closed, Unreachable, Left)
            assert decode.control.problems() == {} and not decode.control.refused


def test_what_cannot_start() -> None:
    with control(PREFILL) as prefill, pytest.raises(AddressInUse, match="--transfer-listen"):
        module.Control(PREFILL, SECRET, listen=address_of(prefill))
    with pytest.raises(InvalidInput, match="shared secret"):
        module.Control(PREFILL, b"")


def test_wake_is_called_for_each_event() -> None:
    woken: list[int] = []
    with control(PREFILL, wake=lambda: woken.append(1)) as prefill:
        with shaken(address_of(prefill)):
            prefill.wait(Connected)
        prefill.wait(Closed)
    assert len(woken) == 2


def test_another_secret_is_named_on_both_sides(caplog: pytest.LogCaptureFixture) -> None:
    with (
        control(PREFILL) as prefill,
        control(DECODE, listen=None, peers=[address_of(prefill)], secret=b"another secret") as decode,
    ):
        until(lambda: any("another --transfer-secret" in why for why in decode.control.problems().values()))
        until(lambda: prefill.control.refused["secret"] > 1)
    told = [record.message for record in caplog.records]
    assert sum("another --transfer-secret" in each for each in told) == 1
    assert sum("refused (secret)" in each for each in told) == 1


def test_a_name_that_does_not_resolve_delays_no_other_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    found, real = threading.Event(), socket.getaddrinfo

    def slow(host: str, *given: Any, **more: Any) -> Any:
        if host == "slow.invalid":
            found.wait(LONG_S)
            raise socket.gaierror("no such host")
        return real(host, *given, **more)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    slow_address = ("slow.invalid", 8998)
    with control(PREFILL) as prefill:
        try:
            peers = [slow_address, address_of(prefill)]
            with control(DECODE, listen=None, peers=peers) as decode:
                decode.wait(Connected, LONG_S / 2)
                prefill.wait(Connected)
                time.sleep(1.5 * module.SILENT_S)
                decode.none(Silent, Closed, Unreachable)
                found.set()
                until(lambda: decode.control.problems() == {slow_address: "no such host"}, LONG_S / 2)
        finally:
            found.set()


def test_all_addresses_of_a_name_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    with control(PREFILL) as prefill:
        real, (host, port) = socket.getaddrinfo, address_of(prefill)
        addresses = [*real("::1", port, type=socket.SOCK_STREAM), *real(host, port, type=socket.SOCK_STREAM)]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *given, **more: addresses)
        with control(DECODE, listen=None, peers=[("two.invalid", port)]) as decode:
            assert decode.wait(Connected, LONG_S / 2).address == f"two.invalid:{port}"


def test_ipv6() -> None:
    with control(PREFILL, listen=("::1", 0)) as prefill:
        host, port = address_of(prefill)
        assert host == "::1"
        with control(DECODE, listen=None, peers=[parse_address(f"[::1]:{port}")]) as decode:
            assert decode.wait(Connected).address == f"[::1]:{port}"
            assert prefill.wait(Connected).address == "::1"
    with pytest.raises(AddressInUse, match=r"\[::1\]:\d+ cannot be used"), control(PREFILL, listen=("::1", 0)) as first:
        Control(PREFILL, SECRET, listen=address_of(first))


@pytest.mark.parametrize("text", ["127.0.0.1:8998", "[::1]:8998", "[fe80::1]:1", "prefill-0.cluster.local:65535"])
def test_an_address_is_read_as_it_is_written(text: str) -> None:
    assert format_address(parse_address(f" {text} ")) == text


@pytest.mark.parametrize(
    "text", ["::1:8998", "[::1]", "host", "host:", ":1", "[]:1", "host:65536", "host:-1", "host:1_0"]
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(InvalidInput, match="is not HOST:PORT"):
        parse_address(text)


def test_what_are_no_peers() -> None:
    assert parse_peers([" a:1", "[::1]:1"]) == [("a", 1), ("::1", 1)]
    for peers, said in ((["a:1", "a:0"], "port 0, as 'a:0'"), (["a:1", "b:1", " a:1"], "' a:1' is given twice")):
        with pytest.raises(InvalidInput, match=said):
            parse_peers(peers)


def test_a_thread_that_cannot_start_is_a_problem_of_its_address_until_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    refused, start = [True], threading.Thread.start

    def scarce(thread: threading.Thread) -> None:
        if thread.name == "quire-resolve" and refused[0]:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", scarce)
    with control(PREFILL) as prefill, control(DECODE, listen=None, peers=[address_of(prefill)]) as decode:
        until(lambda: decode.control.problems() == {address_of(prefill): "can't start new thread"})
        refused[0] = False
        decode.wait(Connected)
        assert decode.control.problems() == {} and not decode.control.problem


def test_a_thread_that_fails_says_so_and_its_peers_are_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection of a decode engine stays open: its end would prove that the writes to it have ended."""
    with control(PREFILL) as prefill, shaken(address_of(prefill)) as made:
        prefill.wait(Connected)
        monkeypatch.setattr(prefill.control._loop, "_tick", lambda now: 1 // 0)
        assert prefill.wait(Unreachable) == Unreachable(
            DECODE.peer, False, "its network thread has failed: ZeroDivisionError: integer division or modulo by zero"
        )
        assert prefill.control.problem.startswith("ZeroDivisionError")
        until(lambda: not prefill.control._loop.thread.is_alive())
        assert not prefill.control.send(DECODE.peer, Sent(1, 0))
        made.settimeout(0.3)
        assert not is_closed(made)
        with pytest.raises(ConnectionRefusedError):
            raw(address_of(prefill))
        prefill.control.close()
        made.settimeout(LONG_S)
        assert is_closed(made)
