"""S3Store against moto's server: the contract, and what happens when the server dies, lags or refuses."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from quire.errors import InvalidInput, StoreError
from quire.testing.contracts.records import make_key, make_keys, make_record, read, write
from quire.testing.contracts.store import StoreContract
from quire.tiers.store import Answer, StoreKey
from tests import waits
from tests.changes import STORES, unless_changed
from tests.tiers.stores.server_cases import check_first_stays, kill_while_written, read_right
from tests.tiers.stores.servers import Server, free_port, s3, started

obstore = pytest.importorskip("obstore")
pytest.importorskip("moto.server")
from quire.tiers.stores import s3 as s3_store  # noqa: E402

pytestmark = unless_changed(__name__, *STORES)
HIT, MISS, PENDING, RETRY = Answer.HIT, Answer.MISS, Answer.PENDING, Answer.RETRY
BUCKET = "quire-records"


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Where moto listens, with an empty bucket."""
    chosen = free_port()
    with with_bucket(chosen):
        yield chosen


def with_bucket(port: int) -> Server:
    server = started(lambda: s3(port))
    make_bucket(port)
    return server


def make_bucket(port: int) -> None:
    import boto3

    client = boto3.client(
        "s3",
        endpoint_url=f"http://127.0.0.1:{port}",
        region_name="us-east-1",
        aws_access_key_id="testing",
        aws_secret_access_key="testing",
    )
    client.create_bucket(Bucket=BUCKET)
    client.close()


def open_store(port: int, prefix: str, **options: object) -> s3_store.S3Store:
    more = "".join(f"&{name}={value}" for name, value in options.items())
    return s3_store.open(f"s3://{BUCKET}/{prefix}?endpoint=http://127.0.0.1:{port}{more}")


class S3Medium:
    """The objects under a prefix, by boto3: another client than the store's."""

    def __init__(self, client: Any, prefix: str) -> None:
        self._client = client
        self._prefix = prefix

    def read(self, key: StoreKey) -> bytes | None:
        try:
            body = self._client.get_object(Bucket=BUCKET, Key=f"{self._prefix}/{key}")["Body"]
        except self._client.exceptions.NoSuchKey:
            return None
        with body:
            content: bytes = body.read()
        return content

    def write(self, key: StoreKey, record: bytes) -> None:
        self._client.put_object(Bucket=BUCKET, Key=f"{self._prefix}/{key}", Body=record)

    def delete(self, key: StoreKey) -> None:
        self._client.delete_object(Bucket=BUCKET, Key=f"{self._prefix}/{key}")

    def keys(self) -> set[StoreKey]:
        found = set()
        for page in self._client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=f"{self._prefix}/"):
            for entry in page.get("Contents", ()):
                scope, name = entry["Key"].removeprefix(f"{self._prefix}/").split("/")
                digits, part = name.split(".")
                found.add(StoreKey(bytes.fromhex(scope), bytes.fromhex(digits), int(part)))
        return found


class TestS3(StoreContract):
    """The contract, each test under a prefix of its own."""

    bounded = False
    exclusive = False
    large_batch = 150
    made = 0

    @pytest.fixture(autouse=True)
    def place(self, port: int) -> Iterator[None]:
        import boto3

        self.port = port
        self.client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}", region_name="us-east-1")
        yield
        self.client.close()

    def make_store(self, capacity: int | None) -> s3_store.S3Store:
        type(self).made += 1
        self.prefix = f"run/{self.made}"
        return self.open_again()

    def open_again(self) -> s3_store.S3Store:
        return open_store(self.port, self.prefix)

    def medium(self) -> S3Medium:
        return S3Medium(self.client, self.prefix)


# -- a server that dies, lags, refuses


@pytest.fixture
def server() -> Iterator[Server]:
    """One to break."""
    with with_bucket(free_port()) as own:
        yield own


def test_a_server_killed_while_it_is_written_to(server: Server) -> None:
    """Moto forgets everything; what the store finds afterwards is right or nothing, and it writes again."""
    store, size = open_store(server.port, "kill", timeout=2), 50_000
    keys = make_keys(120)
    kill_while_written(server, store, keys, size, least=8)
    assert sum(store.failures.values()) >= 4
    server.start()
    make_bucket(server.port)
    read_right(store, keys[:12], size)
    assert write(store, keys[-1:], [make_record(119, size)]) == [HIT]
    assert read(store, keys[-1], size) == make_record(119, size)
    store.close()


class Trouble(BaseHTTPRequestHandler):
    """A server of S3 that lists an empty bucket and else does what `mood` says."""

    mood = "busy"
    asked = 0
    answers = threading.Event()  # a slow one waits for it

    def do_GET(self) -> None:
        if "list-type" in self.path:
            listing = b"<ListBucketResult><IsTruncated>false</IsTruncated><KeyCount>0</KeyCount></ListBucketResult>"
            self.answer(200, listing)
        else:
            self.trouble()

    def trouble(self) -> None:
        type(self).asked += 1
        if self.mood == "slow":
            self.answers.wait(waits.SOON_S)
            self.close_connection = True
        elif self.mood == "short":
            self.send_response(200)
            self.send_header("Content-Length", "5000")
            self.send_header("Last-Modified", "Sat, 21 Nov 2026 00:00:00 GMT")
            self.send_header("ETag", '"1"')
            self.end_headers()
            self.wfile.write(make_record(0, 3000))
            self.close_connection = True
        else:
            self.answer(503 if self.mood == "busy" else 403, b"<Error><Code>SlowDown</Code></Error>")

    do_HEAD = do_PUT = do_POST = trouble  # noqa: N815 - named by the base class

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def trouble() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Trouble)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    Trouble.answers.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("mood", ["busy", "slow", "refusing", "short"])
def test_trouble_is_an_answer(trouble: ThreadingHTTPServer, mood: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trouble, "mood", mood)
    monkeypatch.setattr(Trouble, "asked", 0)
    monkeypatch.setattr(Trouble, "answers", threading.Event())
    store = open_store(trouble.server_address[1], "any", timeout=1.0 if mood == "slow" else waits.SOON_S)
    keys = make_keys(2)
    assert store.get(keys, [bytearray(5000), bytearray(5000)]) == [RETRY, RETRY]
    if mood != "short":
        assert store.exists(keys) == [RETRY, RETRY]
        assert store.prepare(keys, [5, 5]) == [RETRY, RETRY]
        assert store.remove(keys) == 0
    assert sum(store.failures.values()) >= 2
    monkeypatch.setattr(Trouble, "asked", 0)
    assert set(store.get(make_keys(200), [bytearray(5000) for _ in range(200)])) == {RETRY}
    assert Trouble.asked <= 32, "it goes on asking"
    store.close()


# -- writers that die, or race


def test_a_writer_that_dies_leaves_nothing(port: int) -> None:
    """Nothing was sent before `complete`, so no call waits for it."""
    dead, store = open_store(port, "dies"), open_store(port, "dies")
    key = make_key(0)
    assert dead.prepare([key], [900]) == [MISS]
    assert dead.put([key], [make_record(0, 900)]) == [HIT]
    assert write(store, [key], [make_record(0, 900)]) == [HIT]
    assert read(store, key, 900) == make_record(0, 900)
    dead.close()
    store.close()


def test_of_two_uploads_the_first_stays(port: int) -> None:
    check_first_stays(open_store(port, "race"), open_store(port, "race"), 900)


# -- opening


def test_a_record_is_as_old_as_its_object(port: int) -> None:
    """So that `quire store gc` knows the oldest."""
    with closing(open_store(port, "ages")) as store:
        keys = make_keys(2)
        write(store, keys, [make_record(number, 900) for number in range(2)])
        assert [0 <= (entry.idle_seconds or 0) < 60 for entry in store.entries()] == [True] * 2
        assert None not in {entry.idle_seconds for entry in store.entries()}


def test_no_server(port: int) -> None:
    with pytest.raises(StoreError, match="cannot be reached"):
        open_store(free_port(), "any", timeout=1)
    with pytest.raises(StoreError, match="cannot be reached"):
        s3_store.open(f"s3://another-bucket?endpoint=http://127.0.0.1:{port}")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("s3:///prefix", "looks like"),
        ("file://bucket", "looks like"),
        ("s3://bucket?secret=1", "no option 'secret'"),
        ("s3://bucket?timeout=-1", "'timeout'"),
    ],
)
def test_urls_that_say_nothing(wrong: str, says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        s3_store.open(wrong)


def test_a_bucket_has_no_capacity() -> None:
    with pytest.raises(InvalidInput, match="lifecycle"):
        s3_store.open(f"s3://{BUCKET}", 1 << 30)
