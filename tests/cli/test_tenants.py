"""`--tenants` of `quire plan`, `quire replay` and `quire serve`: what is told, and how it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run

GIB = 2**30


def written(path: Path, terms: object) -> Path:
    """A file of tenants."""
    path.write_text(json.dumps(terms))
    return path


def test_a_plan_tells_what_tenants_get(run: Run, tmp_path: Path) -> None:
    file = written(tmp_path / "t", {"quiet": {"floor": "25%", "weight": 2}, "noisy": {"ceiling": "2GiB"}})
    asked = ("plan", "llama-3.1-8b", "--kv-memory", "4GiB", "--tenants", file)
    found = {each["name"]: each for each in json.loads(run(*asked, "--json").stdout)["tenants"]}
    tokens = json.loads(run(*asked, "--json").stdout)["max_total_num_tokens"]
    assert found["quiet"]["floor"]["bytes"] == pytest.approx(GIB, rel=0.01)
    assert found["quiet"]["floor"]["tokens"] == pytest.approx(tokens / 4, rel=0.01)
    assert found["noisy"]["ceiling"]["bytes"] == pytest.approx(2 * GIB, rel=0.01)
    assert found["noisy"]["largest_request"] == pytest.approx(tokens / 2, rel=0.01)
    assert found["default"]["largest_request"] == pytest.approx(tokens * 3 / 4, rel=0.01)
    shown = run(*asked, env={"COLUMNS": "200"}).stdout
    assert "Tenant quiet" in shown and "floor 1023.50 MiB" in shown and "weight 2" in shown


def test_a_replay_tells_what_became_of_tenants(run: Run, tmp_path: Path) -> None:
    file = written(tmp_path / "t", {"quiet": {"floor": "40%"}, "noisy": {"ceiling": "60%"}})
    asked = ("replay", "noisy:9,quiet:1", "--limit", 60, "--pool-tokens", "16k", "--policy", "lru", "--tenants", file)
    (found,) = json.loads(run(*asked, "--json").stdout)
    use = found["tenants"]
    assert sum(each["prompt_tokens"] for each in use.values()) == found["prompt_tokens"]
    assert sum(each["hit_tokens"] for each in use.values()) == found["hit_tokens"] > 0
    assert use["noisy"]["cached_bytes"] <= use["noisy"]["ceiling_bytes"] == pytest.approx(0.6 * 16384, abs=1)
    assert use["quiet"]["lost_pages"] == 0 == use["default"]["prompt_tokens"]
    shown = run(*asked, env={"COLUMNS": "120"}).stdout
    assert "lost to others, pages" in shown and "quiet" in shown


def test_a_replay_says_that_a_trace_has_no_key_of_a_tenant(run: Run, tmp_path: Path) -> None:
    file = written(tmp_path / "t", {"quite": {"floor": "40%"}, "noisy": {}})
    asked = ("replay", "noisy:9,quiet:1", "--limit", 20, "--pool-tokens", "16k", "--policy", "lru", "--tenants", file)
    shown = " ".join(run(*asked, env={"COLUMNS": "120"}).stdout.split())
    assert (
        "No request of the trace has a key of 'quite': a key's name is what its salt has before the first /." in shown
    )


@pytest.mark.parametrize(
    ("terms", "told"),
    [
        ({"a": {"floor": "70%"}, "b": {"floor": "60%"}}, "the floors need 130.0%"),
        ({"a": {"floor": "70%", "ceiling": "60%"}}, "a floor of 70% and a ceiling of 60%"),
        ({"a": {"floor": "4GiB"}}, "the floors need"),
        ({"a": {"weight": 0}}, "has the weight 0"),
        ({"a": {"weight": True}}, "has the weight True"),
        ({"a": {"floor": "101%"}}, "'101%' is no part of the KV memory"),
        ({"a": {"floor": 0.5}}, "0.5 is no part of the KV memory"),
        ({"a": {"roof": "1%"}}, "has no 'roof'"),
        ({"a": {"keys": "x"}}, "no list of names"),
        ({"a": {"keys": ["x"]}, "b": {"keys": ["x"]}}, "the key 'x' has two tenants"),
        ({f"t{number}": {} for number in range(1025)}, "there are 1025 tenants"),
        (["a"], "a name, and its terms"),
        ({"a": 3}, "a name, and its terms"),
    ],
)
def test_terms_that_cannot_be_are_refused(run: Run, tmp_path: Path, terms: Any, told: str) -> None:
    file = written(tmp_path / "t", terms)
    done = run("plan", "llama-3.1-8b", "--kv-memory", "1GiB", "--tenants", file, "--json")
    error = json.loads(done.stderr)["error"]
    assert done.exit_code == 2 and told in error["message"] and error["fix"], done.stderr


def test_a_file_that_is_none_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "t").write_text("{")
    for path in (tmp_path / "t", tmp_path / "none"):
        done = run("replay", "noisy:9,quiet:1", "--tenants", path, "--json")
        assert done.exit_code == 2 and "cannot be read" in done.stderr
