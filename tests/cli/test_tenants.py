"""`--tenants` of `quire plan`, `quire replay` and `quire serve`: what is told, and how it refuses."""

from __future__ import annotations

import json
import re
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
        ({"a": {"floor": "512MiB", "ceiling": "25%"}}, "a floor of 512MiB (50.1%) and a ceiling of 25% (255.50 MiB)"),
        ({"a": {"floor": "4GiB"}}, "the floors need"),
        ({"a": {"weight": 0}}, "has the weight 0"),
        ({"a": {"weight": True}}, "has the weight True"),
        ({"a": {"floor": "101%"}}, "the floor of tenant 'a' is '101%', which is no part of the KV memory"),
        ({"b": {}, "a": {"ceiling": 0.5}}, "the ceiling of tenant 'a' is 0.5, which is no part"),
        ({"a": {"floor": "-10%"}}, "the floor of tenant 'a' is '-10%'"),
        ({"a": {"floor": "many"}}, "the floor of tenant 'a' is 'many'"),
        ({"a": {"floor": True}}, "the floor of tenant 'a' is True"),
        ({"a": {"floor": "nan%"}}, "the floor of tenant 'a' is 'nan%'"),
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


@pytest.mark.parametrize("options", [("llama-3.1-8b",), ("gemma-3-27b",), ("gemma-3-27b", "--arena")])
def test_floors_fit_in_the_memory_that_a_refusal_names(run: Run, tmp_path: Path, options: tuple[str, ...]) -> None:
    file = written(tmp_path / "t", {"a": {"floor": "10GiB"}, "b": {"floor": "15GiB"}, "c": {"floor": "10%"}})
    error = json.loads(run("plan", *options, "--kv-memory", "24GiB", "--tenants", file, "--json").stderr)["error"]
    assert "in 24.00 GiB of KV memory: 'a' 10GiB (" in error["message"] and "'c' 10% (2." in error["message"]
    need = re.findall(r"or have ([0-9]+MiB) or more of KV memory \(--kv-memory", error["fix"])[0]
    assert 27.7 < int(need.removesuffix("MiB")) / 1024 < 28.1
    assert run("plan", *options, "--kv-memory", need, "--tenants", file).exit_code == 0


def test_a_file_that_is_none_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "t").write_text("{")
    for path in (tmp_path / "t", tmp_path / "none"):
        done = run("replay", "noisy:9,quiet:1", "--tenants", path, "--json")
        error = json.loads(done.stderr)["error"]
        assert done.exit_code == 2 and "cannot be read" in error["message"] and str(path) in error["fix"]
