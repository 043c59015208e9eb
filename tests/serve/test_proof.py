"""The audit, the history and a broken law over HTTP."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

from quire.client.async_engine import STALL_AFTER_S, AsyncEngine
from tests.serve.live_server import LiveServer


def test_an_audit_and_the_history(server: LiveServer) -> None:
    body = {"model": "tiny", "prompt": "an audit of this prompt " * 4, "max_tokens": 4}
    assert server.request("/v1/completions", body)[0] == 200
    status, found = server.request("/v1/cache/audit")
    assert status == 200 and found["ended"] and not found["faults"] and not found["violation"]
    assert (
        found["pages"] > 0
        and found["canary"]["share"] == 0.01
        and "PREFIX" not in found["canary"]
        and found["findings"] == []
    )
    status, history = server.request("/v1/cache/history")
    assert status == 200 and {"seconds", "minutes", "highest", "shortages", "num_shortages"} <= history.keys()
    assert any(each["state"] == "used" and each["frames"] > 0 for each in history["highest"])
    status, metrics = server.request("/metrics")
    assert "quire_invariant_broken" in metrics and "quire_frames_highest" in metrics


def test_the_command(server: LiveServer) -> None:
    command = [sys.executable, "-m", "quire", "audit", "--url", f"http://127.0.0.1:{server.port}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "edges audited" in done.stdout and "canary: " in done.stdout and " 0 damaged" in done.stdout


def test_health_fails_with_the_reason() -> None:
    engine: Any = object.__new__(AsyncEngine)
    engine._process = SimpleNamespace(process=multiprocessing.current_process())
    engine._death, engine._draining, engine._streams, engine._progress_s = None, False, {}, 0.0
    engine._has_work, engine._heard_s, engine._stall_after_s = False, time.monotonic(), STALL_AFTER_S
    engine.last_statistics = {"violation": ""}
    assert engine.health().healthy
    engine.last_statistics = {"violation": "an invariant of the cache is broken: page 3 is cached and free"}
    state = engine.health()
    assert not state.healthy and "invariant of the cache is broken" in state.reason
    assert "page 3" not in str(state.to_dict(for_operator=False))
    assert "page 3 is cached and free" in state.to_dict(for_operator=True)["reason"]
