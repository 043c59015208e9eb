"""Streams whose server is lost: another one goes on, and the client sees one stream."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from quire.routing import relay
from quire.routing.relay import Relay
from quire.routing.tracing import RouteSpan
from quire.routing.upstream import Preference, Upstream
from quire.serve.journal import JOURNAL
from tests.routing.live_router import SECRET, LiveRouter, wait_until
from tests.serve.live_server import LiveServer

WHOLE = 240


def echo(**settings: object) -> LiveServer:
    return LiveServer.echo(router_secret=SECRET, **{"max_restarts": 0} | settings)


def body(number: int = 0, **more: Any) -> dict[str, Any]:
    given = {"prompt": f"stream {number:02}", "max_tokens": WHOLE, "stream": True}
    return given | {"stream_options": {"include_usage": True}} | more


def events(live: LiveServer, given: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a whole stream, which ends with [DONE]."""
    status, text = live.request("/v1/completions", given)
    assert status == 200, text
    *found, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(each.removeprefix("data: ")) for each in found]


def check(found: list[dict[str, Any]], given: dict[str, Any]) -> None:
    """It is as if no server had been lost."""
    *chunks, last = found
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert text == (given["prompt"] * WHOLE)[:WHOLE]
    assert last["usage"]["completion_tokens"] == WHOLE
    assert last["usage"]["prompt_tokens"] == len(given["prompt"])
    assert len({event["id"] for event in found}) == len({event["created"] for event in found}) == 1


def lose(router: LiveRouter, servers: list[LiveServer], end: Callable[[LiveServer], object]) -> None:
    """End the server of a part of 8 streams, in their middle. All of them are whole."""
    with ThreadPoolExecutor(8) as pool:
        given = [body(number) for number in range(8)]
        streams = [pool.submit(events, router, each) for each in given]
        busy = router.upstreams[0]
        wait_until(lambda: servers[0].statistics()["running_requests"] == busy.in_flight > 0)
        time.sleep(0.05)
        end(servers[0])
        for stream, each in zip(streams, given, strict=True):
            check(stream.result(), each)
    assert busy.num_failures > 0, "no stream was lost"


@pytest.mark.parametrize("name", ["the server is killed", "its engine is killed", "it ends in order"])
def test_all_streams_are_whole(name: str) -> None:
    ends: dict[str, Callable[[LiveServer], object]] = {
        "the server is killed": LiveServer.close,
        "its engine is killed": lambda live: live.engine().kill(),
        "it ends in order": LiveServer.terminate,
    }
    servers = [echo(drain_s=0.0) for _ in range(2)]
    try:
        with LiveRouter(servers) as router:
            lose(router, servers, ends[name])
    finally:
        for server in servers:
            server.close()


def check_a_kill() -> None:
    """One of two servers is killed under streams."""
    with echo() as first, echo() as second, LiveRouter([first, second]) as router:
        lose(router, [first, second], LiveServer.close)


def test_a_stream_waits_for_its_only_server() -> None:
    with echo(max_restarts=3) as server, LiveRouter([server]) as router:
        lose(router, [server], lambda live: live.engine().kill())


def test_a_request_that_ends_two_servers_gets_no_third() -> None:
    servers = [echo() for _ in range(3)]
    try:
        with LiveRouter(servers) as router:
            status, text = router.request("/v1/completions", body(prompt="a late crash"))
            assert status == 200
            *shown, error, done, _ = text.split("\n\n")
            assert done == "data: [DONE]" and "none can go on" in error
            assert "".join(json.loads(each[6:])["choices"][0]["text"] for each in shown) == ("a late crash" * 9)[:99]
            wait_until(lambda: sum(upstream.is_healthy for upstream in router.upstreams) == 1)
            check(events(router, body()), body())
    finally:
        for server in servers:
            server.close()


def test_clients_see_no_journal_and_write_none() -> None:
    with echo() as server, LiveRouter([server]) as router:
        forged = json.dumps(body()).encode()
        status, headers, text = router.exchange("/v1/completions", raw=forged, headers={JOURNAL: f"3 {SECRET}"})
        assert status == 200 and JOURNAL not in headers and "\n: {" not in text
        assert "\n: {" in server.request("/v1/completions", raw=forged, headers={JOURNAL: f"0 {SECRET}"})[1]
        assert "\n: {" not in server.request("/v1/completions", raw=forged, headers={JOURNAL: "0 another"})[1]
    with LiveServer.echo() as server:
        assert "\n: {" not in server.request("/v1/completions", raw=forged, headers={JOURNAL: f"0 {SECRET}"})[1]


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (b"no line", "cannot be read"),
        (b'{"outputs":[]}\n', "has no beginning"),
        (b'{"start":{"request_id":"cmpl-1","created":1,"seed":1,"prompt":"another one"}}\n', "cannot be continued"),
        (
            b'{"start":{"request_id":"cmpl-1","created":1,"seed":1}}\n{"outputs":[{"request_id":"7"}]}',
            "cannot be continued",
        ),
    ],
)
def test_a_server_refuses_a_journal_that_is_not_of_the_request(lines: bytes, why: str) -> None:
    with echo() as server:
        given = lines + json.dumps(body()).encode()
        _, text = server.request("/v1/completions", raw=given, headers={JOURNAL: f"{len(lines)} {SECRET}"})
        assert why in json.dumps(text)
        check(events(server, body()), body())


def test_a_stream_ends_with_an_error_if_no_server_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "CONTINUE_S", 0.5)
    with echo() as server, LiveRouter([server]) as router, ThreadPoolExecutor(1) as pool:
        stream = pool.submit(router.request, "/v1/completions", body())
        wait_until(lambda: server.statistics()["running_requests"])
        time.sleep(0.05)
        server.close()
        error, done, _ = stream.result()[1].split("\n\n")[-3:]
        assert done == "data: [DONE]" and "no server can answer now: decode-0 does not answer" in error


def relayed(chunks: Sequence[bytes], headers: dict[str, str]) -> bytes:
    """What the client sees of a stream that comes in these chunks."""
    seen = bytearray()

    async def aiter_raw() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk

    async def send(message: Any) -> None:
        seen.extend(message.get("body", b""))

    request: Any = SimpleNamespace(scope={"path": "/v1/completions"}, state=SimpleNamespace(request_id="r"))
    answer: Any = SimpleNamespace(status_code=200, headers=httpx.Headers(headers), aiter_raw=aiter_raw)
    client: Any = None
    relay = Relay(client, request, b"{}", Preference(b""), send, RouteSpan())
    assert asyncio.run(relay._stream(Upstream(name="a", role="engine", url=""), answer))
    return bytes(seen)


@pytest.mark.parametrize("headers", [{JOURNAL: "1"}, {}])
def test_events_are_whole_wherever_chunks_end(headers: dict[str, str]) -> None:
    events = b"data: a\n\n\n\ndata: b\ndata: c\n\n"
    stream = events + (b': {}\n\n: {"end":true}\n\n' if headers else b"data: d")
    for size in range(1, len(stream) + 1):
        chunks = [stream[at : at + size] for at in range(0, len(stream), size)]
        assert relayed(chunks, headers) == events + (b"" if headers else b"data: d"), size


class Joined(bytearray):
    """Chunks that came; it counts the bytes that are searched in them."""

    searched = 0

    def __iadd__(self, chunk: Any) -> Joined:
        self.extend(chunk)
        return self

    def find(self, wanted: Any, start: Any = 0, *_: Any) -> int:
        Joined.searched += len(self) - start
        return super().find(wanted, start)

    def split(self, wanted: Any = None, *_: Any) -> Any:
        Joined.searched += len(self)
        return [Joined(each) for each in super().split(wanted)]


class Chunk(bytes):
    def __radd__(self, before: bytes) -> Joined:
        return Joined(before + bytes(self))


def test_a_large_event_is_searched_once() -> None:
    """And not again with each chunk."""
    size, count = 100, 1000
    chunks = [Chunk(b"data: " + b"x" * size), *[Chunk(b"x" * size)] * count, Chunk(b'\n\n: {}\n\n: {"end":true}\n\n')]
    before = Joined.searched
    assert len(relayed(chunks, {JOURNAL: "1"})) > size * count
    assert 0 < Joined.searched - before < 3 * size * count
