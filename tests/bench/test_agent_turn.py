"""An agent's two turns on the bundled model for agents, so that the measurement cannot rot."""

from __future__ import annotations

import json
from pathlib import Path

from tests.changes import slow_unless_changed
from tests.programs import run_program

BENCH = Path(__file__).parents[2] / "bench" / "serving" / "agent_turn.py"


@slow_unless_changed("bench/serving/agent_turn.py")
def test_the_second_turn_finds_all_whole_pages_of_the_first_prompt(tmp_path: Path) -> None:
    written = tmp_path / "result.json"
    done = run_program(BENCH, "--toy", "--json", written)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(written.read_text())["median"]
    assert found["prompt_tokens"] > 4096  # beyond the other editions
    assert found["second_cached_tokens"] > found["prompt_tokens"] - 64  # no page has more tokens
    assert found["second_prompt_tokens"] > found["second_cached_tokens"]
