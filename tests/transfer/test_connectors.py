"""Every connector passes the contract, and what is its own."""

from __future__ import annotations

import errno
import hmac
import importlib
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest

from quire.engine.config import engine_config
from quire.errors import ConnectorError, InvalidInput
from quire.transfer import network
from quire.transfer.connector import Connector, Memory, Progress, Runs, Spans, batches, join
from quire.transfer.connectors import registry
from quire.transfer.connectors.one_sided import MemoryPlace, OneSided
from quire.transfer.connectors.registry import open_connector
from quire.transfer.connectors.tcp import TcpConnector
from quire.transfer.handshake import PAGES, VERSION
from tests.changes import TRANSFER, slow_unless_changed
from tests.transfer.connector_contract import ConnectorContract
from tests.transfer.memory_connector import Fault, MemoryConnector

SECRET = b"a shared secret"
GREETING = PAGES + VERSION.to_bytes(2, "little")


def can_import(*names: str) -> bool:
    """Whether any of these modules can be imported here."""
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError:
            continue
        return True
    return False


@slow_unless_changed(*TRANSFER, "tests/transfer/")
class TestMemory(ConnectorContract):
    separate = False

    @staticmethod
    def make(memory: Memory, name: str) -> Connector:
        return MemoryConnector(memory, name=name)


class TestTcp(ConnectorContract):
    most_wakes_per_s = 10

    @staticmethod
    def make(memory: Memory, name: str) -> Connector:
        return open_connector("tcp", memory, name=name, secret=SECRET)


NEEDS_NIXL = pytest.mark.skipif(
    not can_import("nixl_cu12._bindings", "nixl_cu13._bindings"),
    reason="`pip install --no-deps nixl-cu12==1.5.1` brings NIXL",
)


@slow_unless_changed(*TRANSFER, "tests/transfer/")
@NEEDS_NIXL
class TestNixl(ConnectorContract):
    checks_tags = False

    @staticmethod
    def make(memory: Memory, name: str) -> Connector:
        return open_connector("nixl", memory, name=name)


@slow_unless_changed(*TRANSFER, "tests/transfer/")
@pytest.mark.skipif(
    not can_import("mooncake.engine"),
    reason="`pip install --no-deps mooncake-transfer-engine-non-cuda` and libibverbs1 bring Mooncake",
)
class TestMooncake(ConnectorContract):
    checks_tags = False
    leaves_nothing = False  # threads of the library stay

    @staticmethod
    def make(memory: Memory, name: str) -> Connector:
        return open_connector("mooncake", memory, name=name, unauthenticated=True)


# -- tcp: foreign connections

SPANS = np.array([[0, 3000], [5000, 70_000]])


@pytest.fixture
def receiver() -> Iterator[TcpConnector]:
    connector = TcpConnector(np.zeros(100_000, np.uint8), name="receiver", secret=SECRET)
    yield connector
    connector.close()


def ended(writer: Connector, receiver: TcpConnector, tag: int, target: bytes, seconds: float = 30.0) -> Progress:
    """How a write of SPANS ends."""
    writer.connect("receiver", receiver.address())
    write = writer.write("receiver", tag, SPANS, target)
    gives_up = time.monotonic() + seconds
    while write.poll() is Progress.PENDING and time.monotonic() < gives_up:
        time.sleep(0.001)
    return write.poll()


def call(receiver: TcpConnector) -> socket.socket:
    """A connection of a stranger."""
    _, _, host, port = msgspec.msgpack.decode(receiver.address())
    return socket.create_connection((host, port), 5)


def is_refused(receiver: TcpConnector, count: int, seconds: float = 30.0) -> bool:
    """Whether so many connections are counted, in time."""
    gives_up = time.monotonic() + seconds
    while receiver.refused.total() < count and time.monotonic() < gives_up:
        time.sleep(0.001)
    return receiver.refused.total() == count


def still_works(receiver: TcpConnector) -> None:
    writer = TcpConnector(np.full(100_000, 3, np.uint8), name="writer", secret=SECRET)
    assert ended(writer, receiver, 99, receiver.open(99, SPANS)) is Progress.LANDED
    writer.close()


def test_tcp_listens_on_loopback_alone(receiver: TcpConnector) -> None:
    _, _, _, port = msgspec.msgpack.decode(receiver.address())
    listening = [each.laddr for each in psutil.Process().net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    assert [ip for ip, own in listening if own == port] == ["127.0.0.1"]


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\nHost: quire\r\n\r\n" + b"x" * 80, b"\0" * 4096])
def test_tcp_refuses_what_is_no_connector(receiver: TcpConnector, said: bytes) -> None:
    with call(receiver) as stranger:
        stranger.sendall(said)
        with suppress(OSError):  # it was closed already
            stranger.shutdown(socket.SHUT_WR)
        assert is_refused(receiver, 1)
    still_works(receiver)


def test_tcp_refuses_another_secret(receiver: TcpConnector) -> None:
    target = receiver.open(1, SPANS)
    writer = TcpConnector(np.full(100_000, 3, np.uint8), name="writer", secret=SECRET + b"!")
    assert ended(writer, receiver, 1, target) is Progress.FAILED
    assert is_refused(receiver, 1) and not np.any(receiver._memory)
    writer.close()
    still_works(receiver)


def greeted(receiver: TcpConnector, nonce: bytes) -> tuple[socket.socket, bytes]:
    """A connection of a stranger that has said this nonce, and the receiver's."""
    stranger = call(receiver)
    stranger.sendall(GREETING + nonce)
    answer = b""
    while len(answer) < 48:
        answer += stranger.recv(48 - len(answer))
    assert answer[:16] == GREETING
    return stranger, answer[16:]


def test_tcp_says_nothing_of_the_secret_before_the_proof(receiver: TcpConnector) -> None:
    stranger, _ = greeted(receiver, bytes(32))
    with stranger:
        stranger.settimeout(0.2)
        with pytest.raises(TimeoutError):
            stranger.recv(1)
        stranger.settimeout(5.0)
        stranger.sendall(bytes(32))
        assert stranger.recv(1) == b""
    assert is_refused(receiver, 1)
    still_works(receiver)


def test_tcp_refuses_a_proof_that_was_heard(receiver: TcpConnector) -> None:
    """A proof is of one connection: both nonces are in it."""
    nonce = secrets.token_bytes(32)
    proof = b""
    for count in (0, 1):
        stranger, theirs = greeted(receiver, nonce)
        with stranger:
            proof = proof or hmac.digest(SECRET, PAGES + b"dialer" + nonce + theirs + b"receiver", "sha256")
            stranger.sendall(proof)
            assert bool(stranger.recv(1)) is (count == 0)
        if count:
            assert is_refused(receiver, 1)
    still_works(receiver)


def test_tcp_bounds_strangers_in_number_and_time(receiver: TcpConnector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "HANDSHAKE_S", 0.3)
    monkeypatch.setattr(network, "MOST_UNPROVEN", 16)
    silent = [call(receiver) for _ in range(20)]
    assert is_refused(receiver, 20)
    for stranger in silent:
        stranger.close()
    still_works(receiver)


def test_tcp_admits_a_peer_beside_many_strangers(receiver: TcpConnector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "MOST_UNPROVEN", 16)
    silent = [call(receiver) for _ in range(40)]
    still_works(receiver)
    for stranger in silent:
        stranger.close()


def test_tcp_survives_a_lack_of_descriptors(receiver: TcpConnector, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = TcpConnector(np.full(100_000, 3, np.uint8), name="writer", secret=SECRET)
    target = receiver.open(1, SPANS)
    with monkeypatch.context() as patch:
        patch.setattr(socket, "socket", lambda *_: (_ for _ in ()).throw(OSError(errno.EMFILE, "too many open files")))
        assert ended(writer, receiver, 1, target) is Progress.FAILED
    assert ended(writer, receiver, 1, target) is Progress.LANDED, "its thread has not ended"
    writer.close()


def test_tcp_is_not_taken_for_another_peer(receiver: TcpConnector) -> None:
    """A restarted receiver on the port of the old one has the secret, but not its name."""
    target = receiver.open(1, SPANS)
    writer = TcpConnector(np.full(100_000, 3, np.uint8), name="writer", secret=SECRET)
    kind, _, host, port = msgspec.msgpack.decode(receiver.address())
    writer.connect("receiver-1", msgspec.msgpack.encode((kind, "receiver-1", host, port)))
    write = writer.write("receiver-1", 1, SPANS, target)
    while write.poll() is Progress.PENDING:
        time.sleep(0.001)
    assert write.poll() is Progress.FAILED and "another peer" in write.error
    assert not np.any(receiver._memory)
    writer.close()


# -- memory: faults


@pytest.mark.parametrize(
    ("fault", "progress", "landed"),
    [
        (Fault(), Progress.LANDED, "all"),
        (Fault(delay_s=0.05), Progress.LANDED, "all"),
        (Fault(drop=True), Progress.PENDING, "none"),
        (Fault(short=True), Progress.LANDED, "some"),
        (Fault(swap=True), Progress.LANDED, "some"),
    ],
)
def test_faults(fault: Fault, progress: Progress, landed: str) -> None:
    memory = np.random.default_rng(0).integers(1, 256, 1000, np.uint8)
    writer = MemoryConnector(memory, name="faulty", faults=lambda peer, tag: fault)
    receiver = MemoryConnector(np.zeros(1000, np.uint8), name="target")
    writer.connect("target", receiver.address())
    spans = np.array([[0, 100], [200, 100], [400, 100]])
    write = writer.write("target", 1, spans, receiver.open(1, spans))
    if fault.delay_s:
        assert write.poll() is Progress.PENDING
        time.sleep(fault.delay_s)
    assert write.poll() is progress
    places = np.concatenate([np.arange(start, start + length) for start, length in spans])
    arrived = receiver._memory[places] == memory[places]
    assert {"all": arrived.all(), "none": not arrived.any(), "some": arrived.any() and not arrived.all()}[landed]
    writer.disconnect("target")
    assert write.poll() is (Progress.FAILED if fault.drop else progress)


def test_a_late_write() -> None:
    """It lands after its tag was shut, which `shut` does not deny."""
    writer = MemoryConnector(np.ones(1000, np.uint8), name="late", faults=lambda peer, tag: Fault(late=True))
    receiver = MemoryConnector(np.zeros(1000, np.uint8), name="target")
    writer.connect("target", receiver.address())
    spans = np.array([[0, 100]])
    write = writer.write("target", 1, spans, receiver.open(1, spans))
    assert not receiver.shut(1)
    assert write.poll() is Progress.LANDED and receiver._memory[:100].all()
    assert receiver.shut(1)


# -- the registry


def test_auto_is_nixl_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "find_spec", lambda name: name == "nixl_cu13")
    assert registry.connector_kind("auto") == "nixl"
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    assert registry.connector_kind("auto") == "tcp"


def test_unknown_and_missing_connectors(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = np.zeros(1000, np.uint8)
    for kind in ("pigeon", "memory"):
        with pytest.raises(InvalidInput, match="use auto, or one of nixl, tcp, mooncake"):
            open_connector(kind, memory, name="me")
    with pytest.raises(InvalidInput, match="secret"):
        open_connector("tcp", memory, name="me")
    with pytest.raises(ConnectorError, match=r"cannot listen on 192\.0\.2\.1"):
        open_connector("tcp", memory, name="me", secret=SECRET, host="192.0.2.1")
    for name in ("nixl_cu12", "nixl_cu12._api", "nixl_cu13", "nixl_cu13._api", "mooncake", "mooncake.engine"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr("quire.transfer.connectors.nixl.find_spec", lambda name: None)
    fixes = {"nixl": "pip install --no-deps nixl-cu12==1.5.1", "mooncake": "apt-get install libibverbs1"}
    for kind, command in fixes.items():
        with pytest.raises(ConnectorError, match=command):
            open_connector(kind, memory, name="me", unauthenticated=True)


@pytest.mark.parametrize("installed", [False, True])
def test_a_connector_without_credentials_is_not_reached_from_elsewhere_unless_told(
    installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is installed: the choice is made before a library is imported."""
    monkeypatch.setattr(registry, "find_spec", lambda name: installed or None)
    memory = np.zeros(1000, np.uint8)
    refused = [("mooncake", "127.0.0.1"), ("mooncake", "10.0.0.7"), ("nixl", "10.0.0.7"), ("nixl", "0.0.0.0")]
    for kind, host in [*refused, ("nixl", "::"), ("nixl", "prefill-0.local")]:
        with pytest.raises(InvalidInput, match=f"'{kind}' listens on .*--transfer-unauthenticated"):
            open_connector(kind, memory, name="me", host=host)
        assert registry.connector_kind(kind, host, unauthenticated=True) == kind
    for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"):
        assert registry.connector_kind("nixl", host) == "nixl"
        assert registry.connector_kind("auto", host) == ("nixl" if installed else "tcp")
    for host in ("10.0.0.7", "0.0.0.0", "::", "prefill-0.local"):
        for told in (False, True):
            assert registry.connector_kind("auto", host, unauthenticated=told) == "tcp"


def test_an_engine_refuses_such_a_connector_before_it_loads_a_model() -> None:
    given: dict[str, Any] = {"model": "nowhere", "role": "prefill", "transfer_secret": "s" * 16}
    away = {**given, "transfer_listen": "10.0.0.7:8998", "transfer_connector": "nixl"}
    with pytest.raises(InvalidInput, match=r"'nixl' listens on 10\.0\.0\.7 .*--transfer-unauthenticated"):
        engine_config(**away)
    with pytest.raises(InvalidInput, match=r"'mooncake' listens on every address .*--transfer-unauthenticated"):
        engine_config(**given, transfer_connector="mooncake")
    assert engine_config(**away, transfer_unauthenticated=True).transfer_unauthenticated
    assert engine_config(**given, transfer_connector="nixl").transfer_connector == "nixl"


_LISTENS = """
import sys
import numpy as np, psutil
from quire.transfer.connectors.registry import open_connector
connector = open_connector("nixl", np.zeros(4096, np.uint8), name="me", host=sys.argv[1])
each = psutil.Process().net_connections("inet")
print(*{one.laddr.ip for one in each if one.status == psutil.CONN_LISTEN})
connector.close()
"""


@NEEDS_NIXL
def test_nixl_listens_on_loopback_alone() -> None:
    """Whatever devices the environment names."""
    for host in ("127.0.0.1", "localhost"):
        done = subprocess.run(
            [sys.executable, "-c", _LISTENS, host],
            env=os.environ | {"UCX_NET_DEVICES": "all"},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.split() == ["127.0.0.1"]


# -- spans


@pytest.mark.parametrize("seed", range(20))
def test_runs_cover_the_same_bytes(seed: int) -> None:
    """Runs of random spans, partly adjacent, pair the same bytes in order, are bounded, and are as few as can be."""
    random = np.random.default_rng(seed)
    lengths = np.where(random.random(200) < 0.1, random.integers(4 << 20, 13 << 20, 200), random.integers(1, 50, 200))

    def side() -> Spans:
        gaps = random.integers(0, 2, 200) * random.integers(0, 2, 200)
        return np.stack([(lengths + gaps).cumsum() - lengths, lengths], axis=1)

    here, there = side(), side()
    runs = join(here, there)
    assert runs[:, 2].min() > 0 and runs[:, 2].max() <= 4 << 20 and runs[:, 2].sum() == lengths.sum()
    expected: list[list[int]] = []
    for (mine, length), (theirs, _) in zip(here.tolist(), there.tolist(), strict=True):
        if expected and expected[-1][0] + expected[-1][2] == mine and expected[-1][1] + expected[-1][2] == theirs:
            expected[-1][2] += length
        else:
            expected.append([mine, theirs, length])
    cut = [
        (mine + done, theirs + done, min(length - done, 4 << 20))
        for mine, theirs, length in expected
        for done in range(0, length, 4 << 20)
    ]
    assert runs.tolist() == [list(each) for each in cut]
    batched = list(batches(runs, 7, 6 << 20))
    assert np.array_equal(np.concatenate(batched), runs)
    assert all(len(batch) <= 7 and (len(batch) == 1 or batch[:, 2].sum() <= 6 << 20) for batch in batched)


def test_tcp_listens_on_ipv6_and_looks_up_no_name() -> None:
    """A name server that is slow would hold up the engine that connects."""
    memory = np.zeros(64, dtype=np.uint8)
    first, second = (TcpConnector(memory.copy(), name=name, secret=b"s", host="::1") for name in ("a@1", "b@1"))
    local = TcpConnector(memory.copy(), name="c@1", secret=b"s", host="localhost")
    try:
        spans = np.array([[0, 64]], dtype=np.int64)
        first.connect("b@1", second.address())
        write = first.write("b@1", 1, spans, second.open(1, spans))
        until = time.monotonic() + 30
        while write.poll() is Progress.PENDING:
            assert time.monotonic() < until
            time.sleep(0.001)
        assert write.poll() is Progress.LANDED, write.error
        first.connect("c@1", local.address())
        kind, name, _, port = msgspec.msgpack.decode(local.address())
        with pytest.raises(ConnectorError, match="is not one of a connector 'tcp'"):
            first.connect("c@1", msgspec.msgpack.encode([kind, name, "localhost", port]))
    finally:
        for each in (first, second, local):
            each.close()


def test_tcp_ends_its_writes_when_its_thread_fails(receiver: TcpConnector, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = TcpConnector(np.full(100_000, 3, np.uint8), name="writer", secret=SECRET)
    target = receiver.open(1, SPANS)
    assert ended(writer, receiver, 1, target) is Progress.LANDED and not writer.problem
    monkeypatch.setattr(writer._loop, "resume", lambda connection: 1 // 0)
    writes = [writer.write("receiver", 1, SPANS, target) for _ in range(3)]
    while any(each.poll() is Progress.PENDING for each in writes):
        time.sleep(0.001)
    assert writer.problem.startswith("ZeroDivisionError")
    assert all("ZeroDivisionError" in each.error for each in writes)
    assert ended(writer, receiver, 1, target) is Progress.FAILED
    writer.close()


class Copying(OneSided):
    """A library that fails as no error of its own says."""

    kind = "copying"
    most_runs, most_bytes = 4, 1 << 20

    def _start(self) -> bytes:
        return b"here"

    def _attach(self, place: MemoryPlace) -> str:
        return place.name

    def _begin(self, remote: str, runs: Runs) -> object:
        raise ZeroDivisionError("of the library")

    def _stop(self) -> None:
        pass


@pytest.mark.parametrize("place", [(1 << 63, 5), (-5, 5), (0, 1 << 63), (0, -1)])
def test_an_address_where_no_memory_can_be_is_refused(place: tuple[int, int]) -> None:
    connector = Copying(np.zeros(100_000, np.uint8), name="me")
    with pytest.raises(ConnectorError, match="not one of a connector 'copying'"):
        connector.connect("me", msgspec.msgpack.encode(MemoryPlace("copying", "me", *place, b"here")))
    connector.close()


def test_the_thread_of_a_library_that_fails_says_so() -> None:
    connector = Copying(np.zeros(100_000, np.uint8), name="me")
    connector.connect("me", connector.address())
    target = connector.open(1, SPANS)
    connector.write("me", 1, SPANS, target)
    while not connector.problem:
        time.sleep(0.001)
    assert connector.problem == "ZeroDivisionError: of the library"
    assert connector.write("me", 1, SPANS, target).poll() is Progress.FAILED
    with pytest.raises(ConnectorError, match="closed"):
        connector.connect("me", connector.address())
    connector.close()
