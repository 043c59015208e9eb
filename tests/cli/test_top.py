"""`quire top`: of one server, of a router, and in a terminal."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
import unicodedata
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from rich.console import Console

from quire.cli.report import Report, plain_table
from quire.cli.top import Seen, rows_of, shown
from quire.counters import Histogram, plain
from quire.loop.tenants import TenantCounters
from tests.cli.conftest import Run
from tests.routing.live_router import LiveRouter
from tests.serve.live_server import LiveServer

HOSTILE = "[/b] \x1b[2J[bold]x"


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[LiveServer]:
    options = ("--kv-memory", "100KiB", "--host-memory", "40KiB", "--canary", "off")
    with LiveServer.quire("--model", str(tiny_model), *options) as live:
        for number in range(6):
            prompt = f"{number % 2} is the beginning of a prompt of several pages"
            assert live.request("/v1/completions", {"prompt": prompt, "max_tokens": 4})[0] == 200
        live.wait_idle()
        yield live


def once(run: Run, live: LiveServer, *options: str) -> Any:
    done = run("top", "--url", live.summary["url"], "--once", "--every", "0.1", *options)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_figures_of_one_server_are_its_statistics(run: Run, server: LiveServer) -> None:
    [row] = json.loads(once(run, server, "--json"))["processes"]
    found = server.statistics()
    for name in ("running_requests", "prompt_tokens", "hit_tokens", "output_tokens", "evicted_pages", "usage"):
        assert row[name] == found[name], name
    assert row["causes"] == found["explained_tokens"] and row["prompt_tokens_a_second"] == 0
    for tier, frames in (("device", found["frames"]["full"]), ("host", found["tiers"]["host"]["full"])):
        assert sum(row["frames"][tier]["full"].values()) == frames["total"]
    text = once(run, server)
    assert "device" in text and "▓" in text and "evicted/s" in text and "hit" in text


def test_a_router_is_all_its_servers(run: Run, server: LiveServer) -> None:
    with LiveRouter([server, server]) as router:
        rows = json.loads(once(run, router, "--json"))["processes"]
        assert [row["name"] for row in rows] == ["decode-0", "decode-1"]
        assert rows[0]["prompt_tokens"] == rows[1]["prompt_tokens"] > 0
        assert rows[1]["url"] == server.summary["url"] != router.summary["url"]
        text = once(run, router)
        assert "decode-1" in text and server.summary["url"] in text


def test_other_commands_ask_all_servers_of_a_router(run: Run, server: LiveServer) -> None:
    with LiveRouter([server, server]) as router:
        asked = ("--url", router.summary["url"])
        for command in ("audit", "memory"):
            done = run(command, *asked)
            assert done.exit_code == 0 and "decode-0: " in done.output and "decode-1: " in done.output, done.output
        router.upstreams[1].url = "http://127.0.0.1:9"
        for command in ("audit", "memory"):
            done = run(command, *asked)
            assert done.exit_code == 2 and "decode-1 answered 503" in done.output, done.output
        assert run("explain", *asked).exit_code == 0


def test_rates_are_those_between_two_looks() -> None:
    def seen(at_s: float, tokens: int, status: int = 200) -> Seen:
        return Seen(at_s, [{"name": "a", "role": "", "status": status, "answer": {"output_tokens": tokens}}])

    [row] = rows_of(seen(4.0, 30), seen(2.0, 10))
    assert row["output_tokens_a_second"] == 10
    [row] = rows_of(seen(4.0, 3), seen(2.0, 10))
    assert row["output_tokens_a_second"] is None, "the engine was started again"
    [row] = rows_of(seen(4.0, 3, status=503), seen(2.0, 10))
    assert row == {"name": "a", "role": "", "url": "", "answers": False}


def test_latencies_are_of_what_came_between_two_looks() -> None:
    first, own = Histogram(), Histogram()

    def seen(at_s: float) -> Seen:
        server = {"first_token_s": first.to_dict(), "inter_token_s": own.to_dict()}
        return Seen(at_s, [{"name": "a", "role": "", "status": 200, "answer": {"server": server}}])

    for _ in range(100):
        first.observe(100.0)  # before the first look: it counts no more
    before = seen(2.0)
    for value in [0.02] * 98 + [0.4, 4.0]:
        first.observe(value)
    [row] = rows_of(seen(4.0), before)
    assert 0.01 < row["first_token_s"]["median"] <= 0.025 and 0.25 < row["first_token_s"]["p99"] <= 0.5
    assert row["inter_token_s"] == {"median": None, "p99": None}, "nothing came"
    [row] = rows_of(before, seen(4.0))
    assert row["first_token_s"] == {"median": None, "p99": None}, "the server was started again"
    [row] = rows_of(seen(4.0), Seen(2.0, []))
    assert row["first_token_s"] == {"median": None, "p99": None}, "it was not there before"


def test_latencies_of_a_server_that_works_are_told(run: Run, server: LiveServer) -> None:
    seen = Event()

    def talk() -> None:
        while not seen.is_set():
            assert server.request("/v1/completions", {"prompt": "a", "max_tokens": 20, "ignore_eos": True})[0] == 200

    with ThreadPoolExecutor(1) as client:
        talking = client.submit(talk)
        try:
            [row] = json.loads(once(run, server, "--json", "--every", "2"))["processes"]
        finally:
            seen.set()
        talking.result()
    for name in ("first_token_s", "inter_token_s"):
        assert 0 < row[name]["median"] <= row[name]["p99"], row
    assert row["url"] == server.summary["url"] and "between tokens" in once(run, server)


def test_without_a_terminal_or_a_server_it_says_what_to_do(run: Run, server: LiveServer) -> None:
    done = run("top", "--url", server.summary["url"])
    assert done.exit_code == 2 and "--once" in done.output
    done = run("top", "--url", "http://127.0.0.1:9", "--once")
    assert done.exit_code == 2 and "does not answer" in done.output


class _Other(BaseHTTPRequestHandler):
    """A server of another kind. Its address has what it answers."""

    def do_GET(self) -> None:
        self.wfile.write(bytes.fromhex(self.path.split("/")[1]))


@pytest.mark.parametrize("said", ["[]", "3", "null", "{}", "<p>", "[" * 20_000])
def test_a_server_of_another_kind_is_named(run: Run, said: str) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Other) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        answers = [f"HTTP/1.0 200 OK\r\n\r\n{said}", f"HTTP/1.0 200 OK\r\ncontent-length: 999999\r\n\r\n{said}"]
        for answer in (*answers, f"220 {said}\r\n"):
            done = run("top", "--url", f"http://127.0.0.1:{server.server_port}/{answer.encode().hex()}", "--once")
            assert done.exit_code == 2 and "defect" not in done.output, done.output
        server.shutdown()


@pytest.mark.parametrize("url", ["http://127.0.0.1:port", "http://127.0.0.1:9/a b", "http://127.0.0.1:99999"])
def test_an_address_that_is_none_is_named(run: Run, url: str) -> None:
    done = run("top", "--url", url, "--once")
    assert done.exit_code == 2 and "defect" not in done.output


def test_where_there_is_no_room_a_number_is_marked_as_cut() -> None:
    console = Console(width=24, record=True, file=StringIO())
    console.print(plain_table(("server", "prompt tokens", "used"), [("engine-422fxnpc", 123_456_789, "97%")]))
    text = console.export_text()
    assert "123,4" in text and "123,456,7" not in text.replace("123,456,789", "") and text.count("…") >= 2


def test_in_a_terminal_it_goes_on_until_it_is_interrupted(server: LiveServer) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "quire", "top", "--url", server.summary["url"], "--every", "0.1"]
    hears = partial(signal.signal, signal.SIGINT, signal.default_int_handler)  # what a shell starts with & does not
    env = os.environ | {"TERM": "xterm", "COLUMNS": "150"}
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=env, preexec_fn=hears) as process:
        os.close(theirs)
        text, until = b"", time.monotonic() + 60
        while text.count(b"evicted/s") < 2:
            assert time.monotonic() < until, text
            text += os.read(ours, 1 << 16)
        process.send_signal(signal.SIGINT)
        while process.poll() is None:
            assert time.monotonic() < until
            try:
                os.read(ours, 1 << 16)
            except OSError:  # its end is closed
                break
        assert process.wait(30) == 0
    os.close(ours)


def test_what_is_shown_fits_80_columns_with_tenants_and_frames_that_were_given_back() -> None:
    frames = {"private": 1234, "cached": 1234, "moving": 0, "quarantined": 0, "free": 1234, "released": 0}
    answer = {
        "prompt_tokens": 100_000, "hit_tokens": 90_000, "running_requests": 8, "frames": {"full": frames},
        "server": {name: Histogram().to_dict() for name in ("first_token_s", "inter_token_s")},
        "tenants": {name: plain(TenantCounters(floor_bytes=3 << 20)) for name in ("default", "a-quiet-one")},
    }  # fmt: skip
    for released in (0, 1234):
        frames["released"] = released
        row = {"name": "engine-0", "role": "engine", "url": "http://127.0.0.1:40000", "status": 200, "answer": answer}
        rows = rows_of(Seen(2.0, [row]), Seen(1.0, [row]))
        console = Console(width=200, record=True, file=StringIO())
        console.print(shown("http://127.0.0.1:8000", rows))
        text = console.export_text()
        assert max(map(len, (line.rstrip() for line in text.splitlines()))) <= 80, text
        assert ("gone" in text) == bool(released) and "a-quiet-one" in text and "3.00 MiB" in text


def test_names_are_no_markup_and_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    frames = {HOSTILE: {"private": 1, "cached": 2, "free": 1}}
    answer = {
        "prompt_tokens": 9, "hit_tokens": 3, "frames": frames, "waiting_reason": HOSTILE,
        "explained_tokens": {HOSTILE: 3}, "tenants": {HOSTILE: plain(TenantCounters())},
    }  # fmt: skip
    row = {"name": HOSTILE, "role": "engine", "url": HOSTILE, "status": 200, "answer": answer}
    rows = rows_of(Seen(2.0, [row]), Seen(1.0, [row]))
    Report(rows, lambda: [shown("http://127.0.0.1:8000", rows)]).print(as_json=False)
    text = capsys.readouterr().out
    assert not {each for each in text if unicodedata.category(each) == "Cc"} - {"\n"}
    assert text.count("[/b] [2J[bold]x") >= 6
