"""The served OpenAPI document against the server: cases drawn from it, right and wrong, by schemathesis."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.changes import slow_unless_changed
from tests.serve.live_server import LiveServer

LEFT_OUT = "positive_data_acceptance"
"""A body by the schema may be refused: a prompt may be longer than the context, or two fields may not go together."""

TIMEOUT_S = 60
"""Of a request. The tool's own limit is 10 s, which a busy machine exceeds."""


@pytest.fixture(scope="module")
def live(tiny_model: Path) -> Iterator[LiveServer]:
    options = ("--model", str(tiny_model), "--kv-memory", "1MiB", "--max-model-len", "256")
    with LiveServer.quire(*options) as server:
        yield server


def check(
    live: LiveServer, folder: Path, num_examples: int, timeout_s: float, phases: str = "examples,coverage,fuzzing"
) -> int:
    """Run it; returns the number of cases."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli", "run", f"{live.summary['url']}/openapi.json"),
            *("--checks", "all", "--exclude-checks", LEFT_OUT, "--max-examples", str(num_examples)),
            *("--seed", "1", "--request-timeout", str(TIMEOUT_S), "--max-response-time", str(TIMEOUT_S)),
            *("--phases", phases),
            *("--generation-database", "none", "--no-color"),
        ],
        cwd=folder,
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]
    live.wait_idle()
    assert live.request("/health")[0] == 200
    assert "Traceback" not in live.log(), live.log()[-5_000:]
    return sum(int(count) for count in re.findall(r"(\d+) generated", done.stdout))


def test_answers_are_those_of_the_document(live: LiveServer, tmp_path: Path) -> None:
    assert check(live, tmp_path, 3, 250, "examples,fuzzing") > 20


@slow_unless_changed("src/quire/serve/", "tests/serve/test_schema.py")
def test_answers_to_all_limits_of_the_document_are_those_of_it(live: LiveServer, tmp_path: Path) -> None:
    assert check(live, tmp_path, 3, 250) > 20


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_answers_to_thousands_of_cases_are_those_of_the_document(live: LiveServer, tmp_path: Path) -> None:
    assert check(live, tmp_path, 500, 3500) >= 5_000
