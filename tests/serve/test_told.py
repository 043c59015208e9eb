"""What /health, /metrics and errors tell of an engine that stalls or stops: names of requests are the operator's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.routing.live_router import LiveRouter, wait_until
from tests.serve.live_server import LiveServer
from tests.serve.test_owners import ANN, OPERATOR, bearer


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveServer]:
    keys = tmp_path / "keys"
    keys.write_text(f"ann {ANN}\n")
    keys.chmod(0o600)
    with LiveServer.echo(api_keys=keys, admin_key=OPERATOR, stall_after_s=0.5, max_restarts=0) as server:
        yield server


def test_only_the_operator_is_told_which_requests_a_stalled_engine_has(live: LiveServer) -> None:
    with LiveRouter([live]) as router:
        connection = live.open_request("/v1/completions", {"prompt": "stall"}, headers=bearer(ANN))
        wait_until(lambda: live.request("/health")[0] == 503)
        wait_until(lambda: "cmpl-" in str(live.request("/health", headers=bearer(OPERATOR))[1]))
        for headers in ({}, bearer(ANN)):
            status, told = live.request("/health", headers=headers)
            assert status == 503 and "no progress" in told["reason"] and "cmpl-" not in str(told)
        wait_until(lambda: router.request("/health")[0] == 503)
        assert "cmpl-" not in str(router.request("/health"))
        assert "cmpl-" not in live.request("/metrics", headers=bearer(OPERATOR))[1]
        connection.close()


def test_only_the_operator_is_told_what_stopped_an_engine(live: LiveServer) -> None:
    """It may be about another client's request."""
    status, answer = live.request("/v1/completions", {"prompt": "crash"}, headers=bearer(ANN))
    assert status == 503 and "a crash in step" not in str(answer)
    for headers in ({}, bearer(ANN)):
        status, told = live.request("/health", headers=headers)
        assert status == 503 and "stopped after an error" in told["reason"] and "a crash in step" not in str(told)
    assert "a crash in step" in live.request("/health", headers=bearer(OPERATOR))[1]["reason"]
    assert "a crash in step" in live.log()
