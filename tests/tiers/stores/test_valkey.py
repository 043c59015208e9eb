"""ValkeyStore on a real server: the contract, and what happens when servers and writers die."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from quire.errors import InvalidInput, StoreError
from quire.testing.contracts.records import make_key, make_keys, make_record, read, write
from quire.testing.contracts.store import StoreContract
from quire.tiers.store import Answer, StoreKey, check_records
from tests.tiers.stores.server_cases import kill_while_written, read_right
from tests.tiers.stores.servers import Server, free_port, listens, started, valkey

redis = pytest.importorskip("redis")
from quire.tiers.stores import valkey as valkey_store  # noqa: E402

HIT, MISS, PENDING, RETRY = Answer.HIT, Answer.MISS, Answer.PENDING, Answer.RETRY
MIB = 1 << 20


Starting = Callable[..., Server]


@pytest.fixture
def directory() -> Iterator[Path]:
    """A short path: a socket's name has room for 100 characters."""
    path = Path(tempfile.mkdtemp(prefix="quire-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def start(directory: Path) -> Iterator[Starting]:
    """Starts servers that end with the test."""
    with ExitStack() as running:
        yield lambda *options: running.enter_context(started(lambda: valkey(directory, *options)))


@pytest.fixture
def server(start: Starting) -> Server:
    """One that remembers what it held before it was killed."""
    return start("--appendonly", "yes", "--appendfsync", "no")


@pytest.fixture(scope="module")
def shared_directory() -> Iterator[Path]:
    """Where a server is that forgets everything, for all tests that empty it first."""
    path = Path(tempfile.mkdtemp(prefix="quire-"))
    with started(lambda: valkey(path)):
        yield path
    shutil.rmtree(path)


def url(directory: Path, **options: object) -> str:
    return f"unix://{directory}/valkey.sock?" + "&".join(f"{name}={value}" for name, value in options.items())


def open_store(directory: Path, *, counts_use: bool = True, **options: object) -> valkey_store.ValkeyStore:
    return valkey_store.open(url(directory, **options), counts_use=counts_use)


class ValkeyMedium:
    """The server's own keys, by redis-py's client."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client

    def read(self, key: StoreKey) -> bytes | None:
        return self._client.get(f"quire/{key}")

    def write(self, key: StoreKey, record: bytes) -> None:
        self._client.set(f"quire/{key}", record)

    def delete(self, key: StoreKey) -> None:
        self._client.delete(f"quire/{key}")

    def keys(self) -> set[StoreKey]:
        found = set()
        for name in self._client.keys("quire/*"):
            scope, rest = name.decode().removeprefix("quire/").split("/")
            page, part = rest.split(".")
            found.add(StoreKey(bytes.fromhex(scope), bytes.fromhex(page), int(part)))
        return found


class TestValkey(StoreContract):
    """The contract, on one server for all its tests, emptied for each."""

    bounded = False

    @pytest.fixture(autouse=True)
    def place(self, shared_directory: Path) -> Iterator[None]:
        self.directory = shared_directory
        self.client = redis.Redis(unix_socket_path=f"{shared_directory}/valkey.sock")
        yield
        self.client.close()

    def make_store(self, capacity: int | None) -> valkey_store.ValkeyStore:
        self.client.flushall()
        return open_store(self.directory)

    def open_again(self) -> valkey_store.ValkeyStore:
        return open_store(self.directory)

    def medium(self) -> ValkeyMedium:
        return ValkeyMedium(self.client)


def test_to_look_is_no_use(shared_directory: Path) -> None:
    """Reading and listing leave the time of the last use alone, on servers that can be told so."""
    keys, records = make_keys(2), [make_record(number, 700) for number in range(2)]
    with closing(redis.Redis(unix_socket_path=f"{shared_directory}/valkey.sock")) as client:
        client.flushall()
        version = tuple(map(int, str(client.info("server")["redis_version"]).split(".")))
        with closing(open_store(shared_directory, counts_use=False)) as store:
            assert write(store, keys, records) == [Answer.HIT] * 2
            time.sleep(1.1)  # the server counts in seconds
            found = [bytearray(700), bytearray(700), bytearray(701), bytearray(5)]
            asked = [*keys, keys[0], make_key(7)]
            assert store.get(asked, found) == [Answer.HIT, Answer.HIT, Answer.MISS, Answer.MISS]
            assert [bytes(each) for each in found[:2]] == records
            assert {entry.key: entry.num_bytes for entry in store.entries()} == dict.fromkeys(keys, 700)
            assert not store.failures
        idle = [client.object("idletime", f"quire/{key}") for key in keys]
        assert idle >= [1, 1] or version < (7, 2)


def test_what_counts_as_use(start: Starting, directory: Path) -> None:
    """Reading and announcing again do, asking does not. The server counts uses by this policy; by the other one it
    notes seconds."""
    server = start("--maxmemory-policy", "allkeys-lfu", "--lfu-log-factor", "0")
    store, (key,) = open_store(directory), make_keys(1)
    with redis.Redis(unix_socket_path=f"{directory}/valkey.sock") as client:

        def uses() -> int:
            return int(client.object("freq", f"quire/{key}"))

        assert write(store, [key], [make_record(0, 500)]) == [HIT]
        fresh = uses()
        assert store.exists([key]) == [HIT] and uses() == fresh
        assert store.prepare([key], [500]) == [HIT] and uses() == fresh + 1
    store.close()
    server.kill()


# -- a server that dies, hangs, fills up, changes its mind


def test_a_server_killed_while_it_is_written_to(directory: Path, server: Server) -> None:
    store = open_store(directory, timeout=1)
    keys, size = make_keys(2000), 100_000
    kill_while_written(server, store, keys, size, least=80)
    assert sum(store.failures.values()) >= 5
    server.start()
    found = read_right(store, keys, size)
    assert len(found) >= 80
    lost = sorted(set(range(len(keys))) - set(found))[:8]
    time.sleep(0.1)
    assert write(store, [keys[number] for number in lost], [make_record(number, size) for number in lost])[-1] is HIT
    store.close()


def test_a_server_killed_while_it_is_read(directory: Path, server: Server) -> None:
    store, size = open_store(directory, timeout=1), 300_000
    keys = make_keys(60)
    assert write(store, keys, [make_record(number, size) for number in range(60)]) == [HIT] * 60
    reading = threading.Event()

    def get() -> tuple[list[Answer], list[bytearray]]:
        buffers = [bytearray(size) for _ in keys]
        reading.set()
        return store.get(keys, buffers), buffers

    with ThreadPoolExecutor(1) as pool:
        for turn in range(4):
            reading.clear()
            got = pool.submit(get)
            reading.wait()
            time.sleep(0.003 * turn)
            server.kill()
            answers, buffers = got.result()
            assert set(answers) <= {HIT, RETRY}
            for number, answer in enumerate(answers):
                assert answer is RETRY or buffers[number] == make_record(number, size)
            server.start()
    assert store.get(keys, [bytearray(size) for _ in keys]) == [HIT] * 60
    store.close()


def test_a_server_that_hangs(directory: Path, server: Server) -> None:
    """Answers that come after their time are never taken for those of the next call."""
    store = open_store(directory, timeout=0.5, connections=1)
    keys = make_keys(3)
    assert write(store, keys[:2], [make_record(0, 5000), make_record(1, 5000)]) == [HIT, HIT]
    assert server.process is not None
    server.process.send_signal(signal.SIGSTOP)
    assert store.get(keys[:1], [bytearray(5000)]) == [RETRY]
    assert store.prepare(keys[2:], [5000]) == [RETRY]
    server.process.send_signal(signal.SIGCONT)
    assert read(store, keys[1], 5000) == make_record(1, 5000)
    assert store.exists(keys[:2]) == [HIT, HIT]
    assert write(store, keys[2:], [make_record(2, 5000)]) == [HIT], (
        "its own mark, whose answer was lost, stops no write"
    )
    assert store.failures["TimeoutError"] == 2
    server.process.send_signal(signal.SIGSTOP)
    many, buffers = make_keys(600), [bytearray(20_000) for _ in range(600)]
    assert set(store.get(many, buffers)) == set(store.exists(many)) == set(store.prepare(many, [9] * 600)) == {RETRY}
    assert store.remove(many) == 0
    assert store.failures["TimeoutError"] == 6, "it waits for each batch of a call"
    server.process.send_signal(signal.SIGCONT)
    store.close()


def test_more_callers_than_connections(directory: Path, server: Server) -> None:
    store = open_store(directory, timeout=1, connections=1)
    keys = make_keys(2)
    assert write(store, keys, [make_record(0, 500), make_record(1, 500)]) == [HIT, HIT]
    with ThreadPoolExecutor(6) as pool:
        got = [pool.submit(read, store, keys[number % 2], 500) for number in range(60)]
        assert [future.result() for future in got] == [make_record(number % 2, 500) for number in range(60)]
    assert server.process is not None
    server.process.send_signal(signal.SIGSTOP)
    with ThreadPoolExecutor(3) as pool:
        assert {
            answer for future in [pool.submit(store.exists, keys) for _ in range(3)] for answer in future.result()
        } == {RETRY}
    server.process.send_signal(signal.SIGCONT)
    assert store.exists(keys) == [HIT, HIT]
    store.close()


def test_a_full_server_that_may_not_evict(directory: Path, start: Starting) -> None:
    start("--maxmemory", "8mb", "--maxmemory-policy", "noeviction")
    store, size = open_store(directory), 400_000
    keys = make_keys(40)
    answers = [write(store, [key], [make_record(number, size)])[0] for number, key in enumerate(keys)]
    assert set(answers) == {HIT, RETRY}
    assert store.failures["OOM"] > 0
    for number, (key, answer) in enumerate(zip(keys, answers, strict=True)):
        assert read(store, key, size) == (make_record(number, size) if answer is HIT else None)
    assert store.remove(keys) == answers.count(HIT)
    time.sleep(0.2)
    assert write(store, keys[-1:], [make_record(39, size)]) == [HIT]
    store.close()


def test_the_largest_value_is_the_servers(directory: Path, start: Starting) -> None:
    start("--proto-max-bulk-len", "1mb")
    with closing(open_store(directory)) as store:
        assert store.largest_record == MIB
        with redis.Redis(unix_socket_path=f"{directory}/valkey.sock") as client:
            client.execute_command("ACL", "SETUSER", "default", "-config")  # as services do
        assert store.largest_record == 512 * MIB
        with pytest.raises(InvalidInput, match="takes none above 536,870,912"):
            check_records(store, 870 * MIB)


def test_a_full_server_evicts_what_was_not_used(directory: Path, start: Starting) -> None:
    start("--maxmemory", "12mb", "--maxmemory-policy", "allkeys-lru")
    store, size = open_store(directory), 200_000
    keys = make_keys(200)
    for start in range(0, 200, 10):
        records = [make_record(number, size) for number in range(start, start + 10)]
        assert set(write(store, keys[start : start + 10], records)) <= {HIT, RETRY}
    found = [read(store, key, size) for key in keys]
    assert all(record in (None, make_record(number, size)) for number, record in enumerate(found))
    kept = [number for number, record in enumerate(found) if record is not None]
    assert 10 <= len(kept) <= 60
    assert sum(kept) / len(kept) > 120, "it kept the old ones"
    store.close()


def test_a_replica_is_not_written_to(directory: Path, server: Server) -> None:
    store = open_store(directory)
    key, other = make_keys(2)
    assert write(store, [key], [make_record(0, 900)]) == [HIT]
    with redis.Redis(unix_socket_path=f"{directory}/valkey.sock") as client:
        client.execute_command("REPLICAOF", "127.0.0.1", str(free_port()))
        assert store.prepare([other], [900]) == [RETRY]
        assert store.exists([key]) == [HIT]
        client.execute_command("REPLICAOF", "NO", "ONE")
    assert write(store, [other], [make_record(1, 900)]) == [HIT]
    store.close()


# -- writers that die, or are late

WRITER = """
import sys
from quire.testing.contracts.records import make_keys, make_record
from quire.tiers.stores import valkey
store = valkey.open(sys.argv[1])
count, size, wait = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "wait"
keys = make_keys(count)
assert {answer.name for answer in store.prepare(keys, [size] * count)} == {"MISS"}
store.put(keys, [make_record(number, size) for number in range(count)])
print("ready", flush=True)
sys.stdin.readline()
store.complete(keys, [True] * count)
print("done", flush=True)
sys.stdin.readline()
"""


def writer(directory: Path, count: int, size: int, **options: object) -> subprocess.Popen[str]:
    """Another process that has prepared and put `count` records, and completes them at a line of its input."""
    arguments = [url(directory, **options), str(count), str(size), "wait"]
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_a_writer_that_dies_before_it_completes(directory: Path, server: Server) -> None:
    dying = writer(directory, 3, 5000, pending=60)
    store = open_store(directory)
    keys, records = make_keys(3), [make_record(number, 5000) for number in range(3)]
    assert store.exists(keys) == store.prepare(keys, [5000] * 3) == [PENDING] * 3
    end(dying)
    assert store.get(keys, [bytearray(5000) for _ in keys]) == [MISS] * 3
    with redis.Redis(unix_socket_path=f"{directory}/valkey.sock") as client:
        left = list(client.scan_iter("*"))
        assert left and all(0 < client.pttl(name) <= 60_000 for name in left), "its marks stay for ever"
        for name in left:
            client.pexpire(name, 1)
    time.sleep(0.01)
    assert store.exists(keys) == [MISS] * 3
    assert write(store, keys, records) == [HIT] * 3
    assert [read(store, key, 5000) for key in keys] == records
    store.close()


def test_a_writer_that_dies_while_it_sends(directory: Path, server: Server) -> None:
    """What can be found afterwards is whole; what cannot leaves no bytes behind."""
    store, count, size = open_store(directory), 60, MIB
    keys = make_keys(count)
    unfinished = 0
    with redis.Redis(unix_socket_path=f"{directory}/valkey.sock") as client:
        for arrived in (1, 3, 6) * 4:  # a busy machine lets the writer end before the test sees it
            dying = writer(directory, count, size, pending=0.5)
            assert dying.stdin is not None
            dying.stdin.write("\n")
            dying.stdin.flush()
            give_up = time.monotonic() + 5  # a machine may be too fast to see it
            while client.dbsize() < count + arrived and time.monotonic() < give_up:
                pass
            end(dying)
            unfinished += sum(1 for _ in client.scan_iter("quire.written/*"))
            for number, key in enumerate(keys):
                assert read(store, key, size) in (None, make_record(number, size))
            assert all(entry.num_bytes == size for entry in store.entries())
            store.remove(keys)
            time.sleep(0.6)
            assert list(client.scan_iter("*")) == []
            if unfinished:
                break
    assert unfinished, "it was never killed in the middle"
    store.close()


def test_records_outlive_the_time_their_writers_have(directory: Path, server: Server) -> None:
    store, keys = open_store(directory, pending=0.1), make_keys(2)
    assert write(store, keys, [make_record(0, 900), make_record(1, 900)]) == [HIT, HIT]
    time.sleep(0.3)
    assert [read(store, key, 900) for key in keys] == [make_record(0, 900), make_record(1, 900)]
    store.close()


def test_a_writer_that_is_late(directory: Path, server: Server) -> None:
    """Its mark has expired: it completes if no other writer has begun, else it stops."""
    late, other = open_store(directory, pending=0.1), open_store(directory)
    keys = make_keys(3)
    mine, theirs = [make_record(number, 900) for number in range(3)], [make_record(9, 900)]
    assert late.prepare(keys, [900] * 3) == [MISS] * 3
    assert late.put(keys, mine) == [HIT] * 3
    time.sleep(0.2)
    assert other.prepare(keys[1:], [900, 900]) == [MISS, MISS]
    assert other.put(keys[1:2], theirs) == [HIT]
    assert other.complete(keys[1:2], [True]) == [HIT]
    assert late.complete(keys, [True] * 3) == [HIT, HIT, RETRY]
    assert [read(other, key, 900) for key in keys] == [mine[0], theirs[0], None]
    assert other.put(keys[2:], theirs) == other.complete(keys[2:], [True]) == [HIT]
    assert read(late, keys[2], 900) == theirs[0]
    late.close()
    other.close()


def test_two_processes_write_the_same(directory: Path, server: Server) -> None:
    """Each record is written by one of them, the other is told to leave it, and all are whole."""
    store, other = open_store(directory), open_store(directory)
    keys, size = make_keys(100), 20_000
    records = [make_record(number, size) for number in range(100)]

    def fill(by: valkey_store.ValkeyStore, order: list[int]) -> list[Answer]:
        return [write(by, [keys[number]], [records[number]])[0] for number in order]

    with ThreadPoolExecutor(2) as pool:
        forward = pool.submit(fill, store, list(range(100)))
        back = pool.submit(fill, other, list(range(99, -1, -1)))
        assert set(forward.result()) | set(back.result()) <= {HIT, PENDING}
    assert [read(store, key, size) for key in keys] == records
    store.close()
    other.close()


# -- opening


def test_a_password(directory: Path, start: Starting) -> None:
    start("--requirepass", "correct horse")
    path = f"{directory}/valkey.sock"
    with pytest.raises(StoreError, match="does not answer") as refused:
        valkey_store.open(f"unix://:wrong-battery@{path}")
    assert "battery" not in str(refused.value)
    with pytest.raises(StoreError, match="does not answer"):
        valkey_store.open(f"unix://{path}")
    store = valkey_store.open(f"unix://:correct%20horse@{path}?db=3")
    assert write(store, make_keys(1), [make_record(0, 900)]) == [HIT]
    assert read(store, make_key(0), 900) == make_record(0, 900)
    store.close()


def test_tls(directory: Path, start: Starting) -> None:
    """Values arrive whole through TLS, which has no scattered reads."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl to make a certificate with")
    pair = ["-keyout", f"{directory}/key.pem", "-out", f"{directory}/cert.pem"]
    name = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    make = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *pair, *name]
    subprocess.run(make, check=True, capture_output=True)
    port = free_port()
    files = ["--tls-cert-file", f"{directory}/cert.pem", "--tls-key-file", f"{directory}/key.pem"]
    tls = ["--bind", "127.0.0.1", "--tls-port", str(port), *files, "--tls-auth-clients", "no"]
    start(*tls, "--tls-ca-cert-file", f"{directory}/cert.pem")
    assert listens(port)
    store = valkey_store.open(f"valkeys://127.0.0.1:{port}/0?ssl_ca_certs={directory}/cert.pem")
    keys, sizes = make_keys(6), [64, 5000, 65_600, MIB + 64, 3 * MIB, 700]
    records = [make_record(number, size) for number, size in enumerate(sizes)]
    assert write(store, keys, records) == [HIT] * 6
    buffers = [bytearray(size) for size in sizes]
    assert store.get(keys, buffers) == [HIT] * 6
    assert [bytes(buffer) for buffer in buffers] == records
    assert store.exists(keys) == [HIT] * 6
    store.close()
    with pytest.raises(StoreError, match="CERTIFICATE"):
        valkey_store.open(f"valkeys://127.0.0.1:{port}/0")


def test_no_server(directory: Path) -> None:
    with pytest.raises(StoreError, match="does not answer"):
        open_store(directory)
    with pytest.raises(StoreError, match="does not answer"):
        valkey_store.open(f"valkey://127.0.0.1:{free_port()}")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("http://host", "begins with"),
        ("valkey://host?colour=red", "no option 'colour'"),
        ("valkey://host?timeout=soon", "'timeout'"),
        ("valkey://host?connections=0", "'connections'"),
        ("valkey://host?db=two", "cannot be understood"),
        ("valkey://host:port", "cannot be understood"),
    ],
)
def test_urls_that_say_nothing(wrong: str, says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        valkey_store.open(wrong)


def test_its_capacity_is_the_servers() -> None:
    with pytest.raises(InvalidInput, match="maxmemory"):
        valkey_store.open("valkey://127.0.0.1", 1 << 30)


def test_pipelines_are_bounded(shared_directory: Path) -> None:
    """However much one call is given, the server never holds more than a pipeline of it for the client."""
    store, count, size = open_store(shared_directory), 60, MIB
    keys = make_keys(count)
    with redis.Redis(unix_socket_path=f"{shared_directory}/valkey.sock") as client:
        client.flushall()
        assert write(store, keys, [make_record(number, size) for number in range(count)]) == [HIT] * count
        client.config_set("client-output-buffer-limit", f"normal {12 * MIB} 0 0")
        buffers = [bytearray(size) for _ in keys]
        assert store.get(keys, buffers) == [HIT] * count
        client.config_set("client-output-buffer-limit", "normal 0 0 0")
        client.flushall()
    store.close()
