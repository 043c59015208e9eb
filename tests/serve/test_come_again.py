"""429 and 503 of the server and of the router: each says when to come again."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from http.client import HTTPMessage
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, HTTPException
from starlette.responses import JSONResponse, Response

from quire.engine.messages import WireError
from quire.errors import EngineDead, Overloaded, QuireError
from quire.serve import errors
from quire.serve.gate import add_gate
from quire.serve.keys import Keys
from tests.routing.live_router import LiveRouter, wait_until
from tests.serve.live_server import LiveServer
from tests.serve.test_owners import ROUTES, filled

AGAIN = (429, 503)
OTHERS = {"request": "cmpl-x", "session": "s", "retention": "r"}


def kinds(of: type[QuireError] = QuireError) -> Iterator[type[QuireError]]:
    yield of
    for kind in of.__subclasses__():
        yield from kinds(kind)


def test_each_error_says_when_to_come_again() -> None:
    app = FastAPI()
    raised: list[Exception] = [
        WireError(kind=kind.__name__, message="it failed.").rebuild() for kind in kinds() if kind.status in AGAIN
    ]
    with_time = EngineDead("it starts.")
    with_time.retry_after_s = 7.2
    raised += [Overloaded("too many.", retry_after_s=90.0), with_time, HTTPException(503), HTTPException(429)]
    assert len(raised) == 12

    @app.get("/raised/{at}")
    async def fail(at: int) -> None:
        raise raised[at]

    @app.get("/answered")
    async def answer() -> Response:
        return JSONResponse({}, status_code=503)

    errors.install(app)
    add_gate(app, Counter(), keys=Keys(), cors_origins=["https://a.example"])

    async def found() -> list[httpx.Response]:
        paths = ["/answered", *(f"/raised/{at}" for at in range(len(raised)))]
        headers = {"Origin": "https://a.example"}
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://t", headers=headers
        ) as client:
            return [await client.get(path) for path in paths]

    answers = asyncio.run(found())
    assert {answer.status_code for answer in answers} == set(AGAIN)
    times = [int(answer.headers["Retry-After"]) for answer in answers]
    assert min(times) >= 1 and times[-4:-2] == [90, 8]
    shown = answers[0].headers["Access-Control-Expose-Headers"]
    assert "retry-after" in shown.lower(), "a page may not read it otherwise"


def walk(server: LiveServer) -> Iterator[tuple[str, int, HTTPMessage, Any]]:
    for (method, template), case in ROUTES.items():
        path, body = filled(case.path or template, OTHERS), filled(case.body, OTHERS)
        yield f"{method} {template}", *server.exchange(path, body, method=method)


def check_all_say_when(server: LiveServer, num_expected: int) -> None:
    found = {name: headers["Retry-After"] for name, status, headers, _ in walk(server) if status in AGAIN}
    assert len(found) >= num_expected, found
    assert all(each and int(each) >= 1 for each in found.values()), found


@pytest.fixture(scope="module")
def dead() -> Iterator[LiveServer]:
    """A server whose engine has ended, and does not come again."""
    with LiveServer.echo(max_restarts=0) as server:
        server.engine().kill()
        wait_until(lambda: "SIGKILL" in str(server.request("/health")))
        yield server


def test_all_routes_of_a_server_without_an_engine_say_when(dead: LiveServer) -> None:
    check_all_say_when(dead, 13)


def test_all_routes_of_a_router_without_a_server_say_when() -> None:
    with LiveServer.echo(max_restarts=0) as server, LiveRouter([server]) as router:
        server.engine().kill()
        wait_until(lambda: router.upstreams[0].is_broken)
        check_all_say_when(router, 13)
        server.close()
        wait_until(lambda: "does not answer" in router.upstreams[0].reason)
        check_all_say_when(router, 13)
