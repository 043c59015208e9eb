"""The page and its events, without a browser: who gets which, and what viewers cost."""

from __future__ import annotations

import http.client
import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from typer.testing import CliRunner

import quire
from quire.cli.app import app
from quire.observe.metrics import ServerCounters
from quire.serve.live import Live
from quire.serve.page import prefers_page
from tests.routing.live_router import LiveRouter
from tests.serve.live_server import LiveServer

FILES = Path(quire.__file__).parent / "serve/static"
BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"


@pytest.fixture(scope="module")
def echo() -> Iterator[LiveServer]:
    with LiveServer.echo(api_key="client", admin_key="operator") as live:
        yield live


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    ("accept", "page"),
    [
        ("", False),
        ("*/*", False),
        ("application/json", False),
        ("application/json, text/html", False),
        ("text/html;q=0.5, application/json", False),
        ("text/html;q=0", False),
        ("text/html;q=no", True),
        ("Text/HTML; charset=utf-8", True),
        ("application/json;q=0.5, text/html", True),
        (BROWSER, True),
    ],
)
def test_a_page_is_for_those_who_ask_for_one(accept: str, page: bool) -> None:
    assert prefers_page(accept) is page


def test_the_root_is_json_for_programs_and_a_page_for_browsers(echo: LiveServer) -> None:
    for headers in ({}, {"Accept": "*/*"}, {"Accept": "application/json"}):
        status, got, answer = echo.exchange("/", headers=headers)
        assert status == 200 and answer["name"] == "quire" and got["Vary"] == "Accept"
    status, got, answer = echo.exchange("/", headers={"Accept": BROWSER})
    assert status == 200 and "<title>Quire</title>" in answer
    assert (
        got["Content-Security-Policy"].startswith("default-src 'self'") and got["X-Content-Type-Options"] == "nosniff"
    )


def test_files_of_the_page_are_served_and_no_others(echo: LiveServer) -> None:
    own = [path for path in FILES.iterdir() if path.suffix in (".html", ".css", ".js", ".svg")]
    for path in own:
        status, got, answer = echo.exchange(f"/static/{path.name}")
        assert (
            status == 200 and answer == path.read_text() and got.get_content_type().split("/")[0] in ("text", "image")
        )
    named = {name for path in own for name in re.findall(r'"(?:/static|\.)/([\w.]+)"', path.read_text())}
    assert named >= {"uplot.js", "page.js", "dom.js", "style.css"} and named <= {path.name for path in own}
    for name in ("uplot.LICENSE", "nothing.js", "..%2fpage.py", "%2e%2e/page.py", ""):
        assert echo.request(f"/static/{name}")[0] == 404, name


def test_the_page_loads_nothing_from_elsewhere_and_writes_no_markup() -> None:
    for path in FILES.iterdir():
        if path.suffix in (".html", ".css", ".js") and not path.name.startswith("uplot"):
            found = re.findall(
                r"https?:|innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(|style=", path.read_text()
            )
            assert not found, (path.name, found)


def test_no_other_page_loads_scripts_from_elsewhere(echo: LiveServer) -> None:
    for path in ("/docs", "/redoc"):
        status, _, answer = echo.exchange(path, headers={"Accept": BROWSER})
        assert (status, answer["error"]["code"]) == (404, "QUIRE-SERVE-05")
    assert echo.exchange("/openapi.json")[2]["paths"]


class Viewer:
    """A client of the events, which reads when it is told."""

    def __init__(self, live: LiveServer, key: str = "operator") -> None:
        self._socket = socket.create_connection(("127.0.0.1", live.port), timeout=30)
        self._socket.sendall(f"GET /v1/cache/live HTTP/1.1\r\nHost: x\r\nX-Api-Key: {key}\r\n\r\n".encode())
        self.text = ""

    def events(self, count: int) -> list[dict[str, Any]]:
        """The first so many, the one at the beginning counted in."""
        while self.text.count("\r\n\n") + self.text.count("\n\n") <= count:
            read = self._socket.recv(1 << 16).decode()
            assert read, "the server has closed it"
            self.text += read
        return [json.loads(each) for each in re.findall(r"^data: (.*)$", self.text, re.MULTILINE)[:count]]

    def first(self) -> str:
        """What comes at once, the head apart."""
        while "\r\n\r\n" not in self.text or self.text.endswith("\r\n\r\n"):
            self.text += self._socket.recv(1 << 16).decode()
        return self.text

    def rest(self) -> str:
        """Everything until the server closes."""
        while read := self._socket.recv(1 << 16).decode():
            self.text += read
        return self.text

    def close(self) -> None:
        self._socket.close()


def test_only_the_operator_sees_the_events(echo: LiveServer) -> None:
    assert echo.request("/v1/cache/live")[0] == 401
    assert echo.request("/v1/cache/live", headers=bearer("wrong"))[0] == 401
    assert echo.request("/v1/cache/live", headers=bearer("client"))[0] == 403
    status, answer = echo.request("/v1/completions", {"prompt": "xyz", "max_tokens": 4}, headers=bearer("client"))
    assert status == 200
    viewer = Viewer(echo)
    begin, now = viewer.events(2)
    viewer.close()
    assert begin["model"] == "echo" and begin["facts"] == {}
    assert now["health"] == {"status": "ok"} and now["counters"]["running_requests"] == 0
    [told] = now["requests"]
    assert told["id"] == answer["id"] and told["usage"]["prompt_tokens"] == 3 and told["ends"] == "length"
    assert "xyz" not in json.dumps(now), "no text of a prompt is told"


def test_the_head_of_events_ends(echo: LiveServer) -> None:
    """Also through a router. The connection can be used again, and no viewer is left."""
    with LiveRouter([echo]) as router:
        for live in (echo, router):
            connection = http.client.HTTPConnection("127.0.0.1", live.port, timeout=5)
            with closing(connection):
                for path in ("/v1/cache/live", "/health") * 70:
                    connection.request("HEAD", path, headers=bearer("operator"))
                    response = connection.getresponse()
                    assert (response.status, response.read()) == (200, b"")


def test_who_comes_later_sees_how_long_requests_took(echo: LiveServer) -> None:
    headers = bearer("client")
    assert echo.request("/v1/completions", {"prompt": "xyz", "max_tokens": 200}, headers=headers)[0] == 200
    deadline = time.monotonic() + 30
    while True:
        viewer = Viewer(echo)
        points = viewer.events(1)[0]["points"]
        viewer.close()
        if points and all(None not in each for each in points[-1]["latencies"].values()):
            break
        assert time.monotonic() < deadline, points
        time.sleep(0.2)
    latencies = points[-1]["latencies"]
    assert latencies.keys() == {"first", "next", "whole"}
    for half, most in latencies.values():
        assert 0 < half <= most <= 300


def test_events_are_made_once_for_all(echo: LiveServer) -> None:
    viewers = [Viewer(echo) for _ in range(10)]
    began = time.monotonic()
    made = {each["at"] for viewer in viewers for each in viewer.events(4)[1:]}
    seconds = time.monotonic() - began
    for viewer in viewers:
        viewer.close()
    assert len(made) <= 2 * (seconds + 1), "at most one in half a second"


def test_pages_are_so_many_at_most_and_one_that_leaves_makes_room() -> None:
    with LiveServer.echo() as live:
        viewers = [Viewer(live) for _ in range(64)]
        for viewer in viewers:
            viewer.events(1)
        status, answer = live.request("/v1/cache/live")
        assert status == 429 and answer["error"]["message"].startswith("64 pages look at this server.")
        assert live.request("/health")[0] == 200
        viewers[0].close()
        deadline = time.monotonic() + 30
        while True:
            viewers[0] = Viewer(live)
            if "event: begin" in viewers[0].first():
                break
            viewers[0].close()
            assert time.monotonic() < deadline
            time.sleep(0.2)
        for viewer in viewers:
            viewer.close()


def test_viewers_that_read_nothing_hold_neither_the_engine_nor_its_end() -> None:
    with LiveServer.echo() as live:
        viewers = [Viewer(live, "") for _ in range(20)]
        body = {"prompt": "abc", "max_tokens": 200}
        assert live.request("/v1/completions", body)[1]["usage"]["completion_tokens"] == 200
        assert viewers[0].events(2)
        live.terminate()
        assert live.wait(10) == 0
        for viewer in viewers:
            assert viewer.rest().count("event: begin") == 1
            viewer.close()


def test_a_router_passes_the_page_on_and_viewers_are_no_load(echo: LiveServer) -> None:
    with LiveRouter([echo]) as router:
        assert "<title>Quire</title>" in router.request("/", headers={"Accept": BROWSER})[1]
        assert router.request("/static/page.js")[0] == 200
        viewers = [Viewer(router) for _ in range(3)]
        for viewer in viewers:
            begin, now = viewer.events(2)
            assert begin["model"] == "echo" and now["health"] == {"status": "ok"}
        assert router.request("/load") == (200, {"server_load": 0})
        for viewer in viewers:
            viewer.close()
        assert router.upstreams[0].in_flight == 0


def test_a_server_of_many_requests_tells_of_the_last_ones() -> None:
    engine = SimpleNamespace(
        last_statistics={},
        facts={},
        num_restarts=0,
        is_draining=False,
        health=lambda: SimpleNamespace(to_dict=lambda **_: {}),
    )
    live = Live(cast(Any, engine), ServerCounters(), model_name="m")
    for number in range(10_000):
        live.ended({"id": f"r{number}"})
        live.beat()
    assert len(live._points) < 100, "at most a point a second"
    now = live._now()
    assert len(now) < 20_000 and b"r9999" in now and b"r9000" not in now


def test_points_are_of_ten_minutes_and_latencies_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr("quire.serve.live.time", SimpleNamespace(monotonic=lambda: clock.now, time=lambda: clock.now))
    engine, counters = SimpleNamespace(last_statistics={}), ServerCounters()
    live = Live(cast(Any, engine), counters, model_name="m")
    seen = []
    for second in range(700):
        counters.first_token_s.observe(100.0 if second < 5 else 0.01)
        live.beat()
        seen.append(live._points[-1]["latencies"]["first"][1])
        clock.now += 1
    assert len(live._points) == 600 and live._points[0]["at"] == 1100.0
    assert seen[30] > 50 and max(seen[70:]) < 0.1, "slow requests are told of for a minute"


def test_another_plan_is_that_of_quire_plan(tiny_model: Path) -> None:
    with LiveServer.quire("--model", str(tiny_model), "--kv-memory", "100KiB", "--dtype", "float32") as live:
        same = live.request("/v1/cache/plan")[1]
        assert same == live.summary["plan"]
        status, found = live.request("/v1/cache/plan?kv_memory=400KiB&page_size=32&max_model_len=128")
        options = ("--kv-memory", "400KiB", "--page-size", "32", "--context", "128", "--dtype", "float32", "--json")
        told = CliRunner().invoke(app, ["plan", str(tiny_model), *options])
        expected = json.loads(told.stdout)
        for name in ("kv_bytes", "page_size", "context", "max_total_num_tokens", "largest_request", "fits"):
            assert found[name] == expected[name], name
        assert found["max_total_num_tokens"] > 3 * same["max_total_num_tokens"]
        for wrong in ("kv_memory=lots", "page_size=0", "kv_memory=1", "max_model_len=99m"):
            status, answer = live.request(f"/v1/cache/plan?{wrong}")
            assert status == 400 and answer["error"]["message"], (wrong, answer)
        assert live.request("/v1/cache/plan")[1] == same
