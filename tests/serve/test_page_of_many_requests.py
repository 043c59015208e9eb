"""The page of a server that has answered many requests: its figures, its last requests, and what memory it takes."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.serve.live_server import LiveServer
from tests.serve.test_page import Viewer
from tests.serve.test_page_in_a_browser import browser, complete, figures_at_rest, opened

__all__ = ["browser", "opened"]
CLIENTS = 4
MIB = 1 << 20


def send(live: LiveServer, number: int) -> set[str]:
    """So many small requests, a few at a time. Returns their ids."""

    def talk(first: int) -> list[str]:
        connection = http.client.HTTPConnection("127.0.0.1", live.port, timeout=60)
        ids = []
        for each in range(first, number, CLIENTS):
            body = json.dumps({"prompt": f"{each % 97} is a small prompt", "max_tokens": 2})
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            told = json.loads(answer.read())
            assert answer.status == 200, told
            ids.append(told["id"])
        connection.close()
        return ids

    with ThreadPoolExecutor(CLIENTS) as clients:
        return {each for ids in clients.map(talk, range(CLIENTS)) for each in ids}


def sizes(live: LiveServer, page: Any) -> dict[str, int]:
    """Bytes of the page's objects and of its elements' number, of an event, and of both processes of the server."""
    session = page.context.new_cdp_session(page)
    for _ in range(3):
        session.send("HeapProfiler.collectGarbage")
    viewer = Viewer(live, "")
    event = viewer.events(2)[1]
    viewer.close()
    return {
        "heap": session.send("Runtime.getHeapUsage")["usedSize"],
        "elements": session.send("Memory.getDOMCounters")["nodes"],
        "event": len(json.dumps(event)),
        "server": psutil.Process(live.process.pid).memory_info().rss,
        "engine": live.engine().memory_info().rss,
    }


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("number", [400, pytest.param(10_000, marks=pytest.mark.slow)])
def test_the_last_requests_are_shown_and_memory_is_bounded(
    tiny_model: Path, opened: Callable[..., Any], number: int
) -> None:
    options = ("--kv-memory", "100KiB", "--host-memory", "40KiB", "--canary", "off")
    with LiveServer.quire("--model", str(tiny_model), *options) as live:
        page = opened(live)
        sent = send(live, number // 4)  # whatever is kept at all is full by then
        figures_at_rest(live, page, complete(live, "the first ones have ended"))
        before = sizes(live, page)
        sent |= send(live, number - number // 4)
        last = complete(live, "all have ended")
        figures_at_rest(live, page, last)
        after = sizes(live, page)
        shown = page.locator("#requests button").evaluate_all("all => all.map((each) => each.dataset.id)")
        assert len(shown) == 50 and shown[0] == last and set(shown[1:]) <= sent
        assert len(sent) == number and page.locator("[data-metric=quire_prompt_tokens_total]").inner_text() != "0"
        assert after["heap"] < before["heap"] + MIB, "the page keeps ten minutes, however much happens in them"
        assert after["elements"] < before["elements"] + 500
        assert after["event"] < before["event"] + 2000
        assert after["server"] < before["server"] + 2 * MIB
        assert after["engine"] < before["engine"] + 24 * MIB, "12 measured, for 300 requests as for 7,500"
