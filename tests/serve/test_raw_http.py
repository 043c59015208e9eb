"""Bytes that no HTTP library sends, and clients that take their time: each gets an answer or an end by its deadline.

The server is as it was before."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from quire.serve.connections import MAX_HEAD_BYTES, MAX_HEADERS
from tests.serve.live_server import LiveServer

READ_S = 1.0
MOST_CONNECTIONS = 200

GOOD = b'{"prompt": "ab", "max_tokens": 3}'
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    with LiveServer.echo(read_timeout_s=READ_S, max_connections=MOST_CONNECTIONS) as server:
        yield server
        server.wait_idle()
        assert "Traceback" not in server.log(), server.log()


def connect(live: LiveServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", live.port), timeout=60)


def exchange(live: LiveServer, raw: bytes, *, num_answers: int = 1) -> list[tuple[int, bytes]]:
    """The status and body of so many answers, of fewer if the server closes before."""
    with connect(live) as connection, connection.makefile("rb") as answers:
        with suppress(OSError):
            connection.sendall(raw)
        found = []
        with suppress(ConnectionResetError):
            while len(found) < num_answers and (line := answers.readline()):
                headers = dict(iter(lambda: split(answers.readline()), (b"", b"")))
                found.append((int(line.split()[1]), answers.read(int(headers.get(b"content-length", b"0")))))
        return found


def split(line: bytes) -> tuple[bytes, bytes]:
    name, _, value = line.strip().partition(b": ")
    return name.lower(), value


def statuses(answer: bytes) -> list[int]:
    return [int(code) for code in re.findall(rb"HTTP/1\.1 (\d{3})", answer)]


def is_well(live: LiveServer) -> None:
    status, answer = live.request("/v1/completions", {"prompt": "ab", "max_tokens": 3})
    assert (status, answer["choices"][0]["text"]) == (200, "aba")


def with_length(body: bytes) -> bytes:
    return POST + b"Content-Length: %d\r\n\r\n" % len(body) + body


CORPUS: list[tuple[str, bytes, set[int]]] = [
    ("nothing", b"", {408}),
    ("line ends", b"\r\n\r\n\r\n", {408}),
    ("zeros", bytes(1000), {400}),
    ("binary", bytes(range(256)) * 8, {400}),
    ("a TLS hello", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64), {400}),
    ("HTTP/2's preface", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", {400, 404, 405}),
    ("HTTP/0.9", b"GET /health\r\n\r\n", {200, 400}),
    ("HTTP/9.9", b"GET /health HTTP/9.9\r\nHost: x\r\n\r\n", {400}),
    ("no method", b" /health HTTP/1.1\r\n\r\n", {400}),
    ("a method of its own", b"QUIRE /health HTTP/1.1\r\nHost: x\r\n\r\n", {400, 405}),
    ("CONNECT", b"CONNECT example.org:443 HTTP/1.1\r\nHost: x\r\n\r\n", {400, 404, 405}),
    ("OPTIONS *", b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n", {400, 404, 405}),
    ("an absolute form", b"GET http://example.org/health HTTP/1.1\r\nHost: x\r\n\r\n", {200, 400, 404}),
    ("a path that is no ASCII", b"GET /v1/models/\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n", {400, 404}),
    ("an escape that is no UTF-8", b"GET /v1/models/%ff%00 HTTP/1.1\r\nHost: x\r\n\r\n", {404}),
    ("a half escape", b"GET /v1/models/%z HTTP/1.1\r\nHost: x\r\n\r\n", {400, 404}),
    ("dots", b"GET /v1/../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n", {404}),
    ("a zero in a header", b"GET /health HTTP/1.1\r\nHost: x\r\nX-Request-Id: a\x00b\r\n\r\n", {400}),
    ("a folded header", b"GET /health HTTP/1.1\r\nHost: x\r\nX-A: b\r\n c\r\n\r\n", {200, 400}),
    ("a header without a colon", b"GET /health HTTP/1.1\r\nHost x\r\n\r\n", {400}),
    ("a space before the colon", b"GET /health HTTP/1.1\r\nHost : x\r\n\r\n", {400}),
    ("bare line feeds", b"GET /health HTTP/1.1\nHost: x\n\n", {200, 400}),
    ("an id that splits headers", b"GET /health HTTP/1.1\r\nHost: x\r\nX-Request-Id: a\rSet-Cookie: b\r\n\r\n", {400}),
    ("a long header", b"GET /health HTTP/1.1\r\nX-A: " + b"a" * (2 * MAX_HEAD_BYTES) + b"\r\n\r\n", {431}),
    ("a header that never ends", b"GET /health HTTP/1.1\r\nX-A: " + b"a" * (1 << 20), {431}),
    ("a long path", b"GET /" + b"a" * (2 * MAX_HEAD_BYTES) + b" HTTP/1.1\r\nHost: x\r\n\r\n", {414, 431}),
    ("many headers", b"GET /health HTTP/1.1\r\n" + b"X-A: b\r\n" * (MAX_HEADERS + 1) + b"\r\n", {431}),
    ("a negative length", POST + b"Content-Length: -1\r\n\r\n" + GOOD, {400}),
    ("a length that is no number", POST + b"Content-Length: 1e3\r\n\r\n" + GOOD, {400}),
    ("a huge length", POST + b"Content-Length: 9223372036854775807\r\n\r\n", {400, 413}),
    ("a length beyond 64 bits", POST + b"Content-Length: 99999999999999999999\r\n\r\n", {400, 413}),
    ("two lengths", POST + b"Content-Length: 5\r\nContent-Length: 33\r\n\r\n" + GOOD, {400}),
    ("a length and chunks", POST + b"Content-Length: 33\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", {400}),
    ("another encoding", POST + b"Transfer-Encoding: gzip\r\n\r\n" + GOOD, {400, 501}),
    ("a chunk that is no number", POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", {400}),
    ("a huge chunk", POST + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n", {400, 413}),
    ("a compressed body", POST + b"Content-Encoding: gzip\r\nContent-Length: 4\r\n\r\n\x1f\x8b\x08\x00", {400, 415}),
    ("no body", POST + b"\r\n", {400}),
    ("less than was said", POST + b"Content-Length: 100\r\n\r\n" + GOOD, {408}),
    ("a body of another kind", with_length(b"prompt=ab"), {400}),
    ("UTF-16", with_length('{"prompt": "ab"}'.encode("utf-16")), {200, 400}),
    ("a byte order mark", with_length(b"\xef\xbb\xbf" + GOOD), {200, 400}),
    ("NaN for a body", with_length(b"NaN"), {400}),
    ("an endless number", with_length(b'{"prompt": 1' + b"0" * 100_000 + b"}"), {400}),
    ("deep JSON", with_length(b"[" * 500_000), {400}),
    ("an upgrade", b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n", {200, 400}),
    ("h2c", b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n", {200, 400}),
]


@pytest.mark.parametrize(("what", "raw", "expected"), CORPUS, ids=[what for what, *_ in CORPUS])
def test_bytes_that_are_no_request(live: LiveServer, what: str, raw: bytes, expected: set[int]) -> None:
    """The answer is one that is expected, and our own JSON where it is an error; the next client gets its answer."""
    found = exchange(live, raw)  # the socket fails if the server holds on to it
    assert {status for status, _ in found} <= expected, found
    for status, body in found:
        assert status < 400 or json.loads(body)["error"]["code"].startswith("QUIRE-"), body
    is_well(live)


def test_pipelined_requests_are_answered_in_order(live: LiveServer) -> None:
    assert [status for status, _ in exchange(live, with_length(GOOD) * 5, num_answers=5)] == [200] * 5


def test_a_client_that_pipelines_and_leaves(live: LiveServer) -> None:
    """Its answers are not made, and nothing is logged as a fault."""
    for count in (1, 2, 20):
        with connect(live) as connection:
            connection.sendall(with_length(GOOD) * count)
    live.wait_idle()
    is_well(live)
    assert "Traceback" not in live.log()


@pytest.mark.parametrize("sent", [b"", b"GET /hea", POST, POST + b"Content-Length: 33\r\n\r\n" + GOOD[:5]])
def test_who_does_not_send_a_whole_request_is_told_and_closed(live: LiveServer, sent: bytes) -> None:
    with connect(live) as connection:
        connection.sendall(sent)
        answer = b""
        while part := connection.recv(65536):
            answer += part
    assert statuses(answer) == [408]
    assert b"QUIRE-SERVE-04" in answer


def test_a_slow_body_does_not_outlive_its_deadline(live: LiveServer) -> None:
    """A byte now and then moves no deadline."""
    with connect(live) as connection:
        connection.sendall(POST + b"Content-Length: 1000\r\n\r\n")
        with suppress(OSError):  # a reset or a broken pipe
            while True:
                connection.sendall(b" ")
                time.sleep(0.05)
    is_well(live)


def test_an_answer_takes_longer_than_a_request_may(live: LiveServer) -> None:
    """The deadlines are of what the client sends, not of what it waits for."""
    connection = live.open_request("/v1/completions", {"prompt": "stall", "max_tokens": 2})
    with connection:
        connection.settimeout(2 * READ_S)
        with pytest.raises(TimeoutError):
            connection.recv(1)
    live.wait_idle()


def test_more_connections_than_there_may_be_are_refused_at_once(live: LiveServer) -> None:
    with ExitStack() as stack:
        held = [stack.enter_context(connect(live)) for _ in range(2 * MOST_CONNECTIONS)]
        answers = []
        for connection in held[-50:]:
            connection.settimeout(30)
            answers.append(connection.recv(65536))
        assert all(statuses(answer) in ([503], [408]) for answer in answers)
        assert any(b"QUIRE-SERVE-03" in answer for answer in answers)
        assert any(b"retry-after: 1" in answer for answer in answers)
        assert all(b"X-Quire-Untouched: 1" in answer for answer in answers), "a router may ask others"
    while live.request("/v1/models")[0] == 503:  # the server has not seen all of them end
        time.sleep(0.05)
    is_well(live)


def test_slow_and_idle_connections_leave_the_others_alone(live: LiveServer) -> None:
    """A good client beside half requests is answered, each time."""
    with ExitStack() as stack:
        for number in range(MOST_CONNECTIONS // 2):
            connection = stack.enter_context(connect(live))
            if number % 2:
                connection.sendall(POST + b"Content-Length: 100\r\n\r\n{")
        for _ in range(10):
            is_well(live)
