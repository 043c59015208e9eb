"""Deadlines of a connection, with a server in this process."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from quire.errors import InvalidInput
from quire.serve import server
from quire.serve.config import ServerConfig
from quire.serve.connections import Limits, check_uvicorn, limited_to
from quire.serve.server import HttpServer, bind
from tests import waits

HEAD = b"POST / HTTP/1.1\r\nHost: x\r\n"

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Reads the body, and answers."""
    while (await receive()).get("more_body"):
        pass
    if scope["path"] == "/slow":
        await asyncio.sleep(0.3)
    body = b"x" * 50_000_000 if scope["path"] == "/large" else b"read"
    await PlainTextResponse(body)(scope, receive, send)


def serve(talk: Talk, *, read_timeout_s: float = 0.5) -> None:
    async def body() -> None:
        listener = bind("127.0.0.1", 0)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
        http = HttpServer(app, ServerConfig(read_timeout_s=read_timeout_s, drain_s=0), most_body_bytes=1000)
        serving = await http.begin(listener)
        client = socket.create_connection(listener.getsockname())
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        reader, writer = await asyncio.open_connection(sock=client)
        try:
            await talk(reader, writer)
        finally:
            writer.close()
            http.should_exit = http.force_exit = True
            await serving
            listener.close()

    asyncio.run(asyncio.wait_for(body(), 120))


def check_a_slow_body() -> None:
    """It ends at its deadline, whatever arrives meanwhile."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"Content-Length: 1000\r\n\r\n")
        answer = asyncio.create_task(reader.read())
        began = time.monotonic()
        while not answer.done():
            assert time.monotonic() - began < waits.SOON_S, "a byte now and then moves the deadline"
            writer.write(b" ")
            await asyncio.sleep(0.05)
        found = await asyncio.gather(answer, return_exceptions=True)  # it may be lost to a reset
        assert isinstance(found[0], OSError) or b" 408 " in found[0]

    serve(talk)


def test_a_slow_body_ends_at_its_deadline() -> None:
    check_a_slow_body()


def test_a_second_request_has_deadlines_of_its_own() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(3):
            writer.write(HEAD + b"Content-Length: 4\r\n\r\nbody")
            assert b"200 OK" in await reader.readuntil(b"read")
        writer.write(HEAD)
        assert b" 408 " in await reader.read()

    serve(talk)


def test_a_line_end_keeps_no_connection_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """No request follows it, and the server waits for none any more."""
    monkeypatch.setattr(server, "limited_to", lambda limits: limited_to(replace(limits, head_s=0.1)))

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"Content-Length: 4\r\n\r\nbody")
        assert b"200 OK" in await reader.readuntil(b"read")
        writer.write(b"\r\n")
        assert await asyncio.wait_for(reader.read(), waits.SOON_S) == b""

    serve(talk)


@pytest.mark.parametrize("part", [b"POST / HT", HEAD + b"Content-Length: 4\r\n\r\nb"])
def test_a_slow_request_does_not_end_the_answer_before_it(monkeypatch: pytest.MonkeyPatch, part: bytes) -> None:
    """Its own deadline comes after that answer."""
    short = {"head_s": 0.05, "body_s": 0.05}
    monkeypatch.setattr(server, "limited_to", lambda limits: limited_to(replace(limits, **short)))

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n" + part)
        assert b"200 OK" in await asyncio.wait_for(reader.readuntil(b"read"), waits.SOON_S)
        assert b" 408 " in await reader.read()

    serve(talk)


def test_an_answer_that_is_not_read_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is released, and its request ends."""
    real = server.limited_to
    monkeypatch.setattr(server, "limited_to", lambda limits: real(type(limits)(body_s=30.0, write_s=0.3)))

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        transport = writer.transport
        transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
        await asyncio.sleep(1.0)
        transport.resume_reading()  # type: ignore[attr-defined]
        found = await asyncio.gather(reader.read(), return_exceptions=True)
        assert isinstance(found[0], OSError) or len(found[0]) < 50_000_000

    serve(talk)


def test_a_uvicorn_without_what_connections_use_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a release renames what is overridden, nothing fails: disconnects go unseen."""
    check_uvicorn()
    with monkeypatch.context() as patch:
        patch.delattr(HttpToolsProtocol, "_start_asgi_task")
        with pytest.raises(InvalidInput, match="_start_asgi_task, which Quire needs"):
            limited_to(Limits())
    with monkeypatch.context() as patch:
        patch.setattr(HttpToolsProtocol, "_start_asgi_task", lambda self, cycle: None)
        with pytest.raises(InvalidInput, match="Quire needs to close"):
            limited_to(Limits())
    with monkeypatch.context() as patch:
        patch.setattr(RequestResponseCycle, "__init__", lambda self: None)
        patch.setattr(RequestResponseCycle, "run_asgi", lambda self: None)
        patch.setattr(RequestResponseCycle, "send", lambda self: None)
        patch.setattr(RequestResponseCycle, "receive", lambda self: None)
        with pytest.raises(InvalidInput, match=r"RequestResponseCycle\.disconnected"):
            check_uvicorn()
