"""`python -m tests.fuzz`: what it says, to people and to machines, and how it ends."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tests.changes import slow_unless_changed
from tests.fuzz.__main__ import app
from tests.mutants import MUTANTS, injected


def run(*arguments: object, **options: Any) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], **options)


def read(output: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(output)
    return found


@slow_unless_changed("tests/fuzz/")
def test_nothing_is_found() -> None:
    done = run("--operations", 1200, "--seed", 7, "--jobs", 1, "--json")
    assert done.exit_code == 0, done.output
    found = read(done.stdout)
    assert found["passed"] and found["violation"] is None and found["inject"] is None
    assert (found["seed"], found["jobs"], found["level"]) == (7, 1, "both")
    assert found["operations"] == sum(level["operations"] for level in found["levels"].values()) >= 1200
    assert found["operations_per_cpu_second"] > 100
    again = read(run("--operations", 1200, "--seed", 7, "--jobs", 1, "--json").stdout)
    assert again["digest"] == found["digest"]


def test_for_people() -> None:
    done = run("--operations", 700, "--level", "cache", "--jobs", 1, env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert "operations/s" in done.stdout and "Nothing found. Seed" in done.stdout


def test_an_injected_mistake_is_caught() -> None:
    done = run("--inject", "free-before-fence", "--seed", 0, "--jobs", 1, env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert "Caught free-before-fence after" in done.stdout


def test_an_injected_mistake_that_is_not_met() -> None:
    done = run("--inject", "preempt-the-first", "--level", "cache", "--operations", 600, "--jobs", 1, "--json")
    assert done.exit_code == 1
    assert not read(done.stdout)["passed"]


@slow_unless_changed("tests/fuzz/")
def test_a_violation_says_how_to_see_it_again() -> None:
    with injected("duplicates-leak"):
        done = run("--seed", 4, "--operations", 3000, "--jobs", 1, "--json")
        violation = read(done.stdout)["violation"]
        assert done.exit_code == 1
        assert "no owner" in violation["message"]
        again = run(*violation["command"].split()[3:], env={"COLUMNS": "200"})
    assert again.exit_code == 1
    assert f"Operation {violation['operation']} of seed {violation['seed']}" in again.stdout
    assert "A short sequence" in again.stdout


def test_the_list() -> None:
    listed = read(run("--list", "--json").stdout)["mutants"]
    assert [entry["name"] for entry in listed] == list(MUTANTS)
    text = run("--list", env={"COLUMNS": "240"}).stdout
    assert "free-before-fence" in text and "vLLM #45357" in text


@pytest.mark.parametrize(
    ("arguments", "text"), [(("--inject", "no-such-thing"), "no-such-thing"), (("--level", "engine"), "engine")]
)
def test_bad_input(arguments: tuple[str, ...], text: str) -> None:
    done = run(*arguments, "--operations", 10, "--jobs", 1)
    assert done.exit_code == 2
    assert text in done.stderr
