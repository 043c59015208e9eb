"""The soak run: clients that come and go on a pool too small for them. Short by default."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.changes import has_changed
from tests.programs import run_program

SOAK = Path(__file__).parents[2] / "bench" / "serving" / "soak.py"


LEAST = ("--least-answers", "100")
QUICK = () if has_changed("src/quire/engine/", "src/quire/serve/", "src/quire/loop/") else pytest.mark.slow
TIERS = ("--tiers", "--flush-every", "50", "--sessions", "--session-ttl", "2")


@pytest.mark.parametrize(
    ("clients", "seconds", "max_tokens", "kv_memory", "more"),
    [
        pytest.param(24, 1, 12, "1536KiB", LEAST, marks=pytest.mark.slow),
        pytest.param(12, 1, 12, "3MiB", (*TIERS, *LEAST), marks=QUICK),
        pytest.param(200, 60, 40, "4MiB", (), marks=pytest.mark.slow),
        pytest.param(
            40,
            1800,
            40,
            "8MiB",
            ("--tiers", "--flush-every", "200", "--sessions"),
            marks=[pytest.mark.slow, pytest.mark.timeout(3600)],
        ),
    ],
)
def test_soak(clients: int, seconds: int, max_tokens: int, kv_memory: str, more: Sequence[str]) -> None:
    """Every answer equals its solo run, aborts happened, pages were evicted, and none is left behind."""
    options = {"--clients": clients, "--seconds": seconds, "--max-tokens": max_tokens, "--kv-memory": kv_memory}
    done = run_program(SOAK, "--json", *more, *(str(part) for option in options.items() for part in option))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["answers"] > 0
    assert report["aborted"] > 0
    assert report["evicted_pages"] > 0
    assert report["hit_tokens"] > 0
    assert report["wrong"] == report["errors"] == report["private_pages_at_idle"] == 0
    assert report["moving_pages_at_the_end"] == 0
    assert not report["audit"]
    tiers, sessions = "--tiers" in more, "--sessions" in more
    assert (report["flushes"] > 0) == tiers
    assert report["from_lower_tiers"] > 0 or not tiers
    assert report["sessions_at_the_end"] == 0
    counts = [report[f"session{name}"] for name in ("s_continued", "_resumed_tokens", "s_expired")]
    assert all(counts) if sessions else not any(counts), report["turns"]
