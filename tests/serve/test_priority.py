"""`priority` of requests over HTTP: lower goes first."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.routing.live_router import wait_until
from tests.serve.live_server import LiveServer

COMPLETIONS = "/v1/completions"


@pytest.mark.slow
def test_lower_goes_first(tiny_model: Path) -> None:
    ended: list[int] = []

    def ask(priority: int) -> None:
        body = {"prompt": "abc", "max_tokens": 8, "priority": priority}
        assert live.request(COMPLETIONS, body)[0] == 200
        ended.append(priority)

    one_by_one = ("--model", str(tiny_model), "--max-running", "1", "--kv-memory", "1MiB")
    with LiveServer.quire(*one_by_one) as live, ThreadPoolExecutor(3) as pool:
        with live.open_request(COMPLETIONS, {"prompt": "abc", "max_tokens": 500, "stream": True, "priority": -9}):
            wait_until(lambda: live.statistics()["running_requests"])
            asked = []
            for priority in (5, 0, -5):
                asked.append(pool.submit(ask, priority))
                wait_until(lambda: live.statistics()["waiting_requests"] == len(asked))
        for each in asked:  # the first has left
            each.result()
    assert ended == [-5, 0, 5]
