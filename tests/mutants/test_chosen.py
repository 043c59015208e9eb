"""Mutants are chosen by the files of what they patch and of their checks."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests import changes
from tests import mutants as shipped
from tests.changes import ROOT
from tests.covering import covering
from tests.mutants import native_mutants
from tests.mutants.chosen import files_of, is_chosen
from tests.mutants.mutants import MUTANTS
from tests.mutants.test_mutants import concerned


class Recorder:
    """A patch that sets attributes, and keeps where."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        self.modules: list[Any] = []

    def setattr(self, target: Any, name: str, value: Any, raising: bool = True) -> None:
        self.modules.append(sys.modules.get(getattr(target, "__module__", None) or getattr(target, "__name__", "")))
        self._patch.setattr(target, name, value, raising=raising)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._patch, name)


@contextmanager
def applied(mutant: Any) -> Iterator[Recorder]:
    with pytest.MonkeyPatch.context() as patch:
        recorder = Recorder(patch)
        mutant.apply(recorder)
        yield recorder


class NotCompiled(Exception):
    """A changed source would be compiled, which takes long."""


def test_files_of_what_each_mutant_patches_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what it changes is there. Native kernels are not compiled; their files are found by name."""

    def build(texts: dict[str, str], folder: Path) -> Path:
        raise NotCompiled

    monkeypatch.setattr(native_mutants, "build", build)
    for mutant in [*MUTANTS, *shipped.MUTANTS.values()]:
        files = files_of(mutant.apply)
        assert any(not file.startswith("tests/mutants/") for file in concerned(mutant)), mutant.name
        try:
            with applied(mutant) as recorder:
                paths = [Path(module.__file__) for module in recorder.modules if module is not None]
        except NotCompiled:
            assert any(file.endswith((".cpp", ".h")) for file in files), mutant.name
            continue
        patched = {path.relative_to(ROOT).as_posix() for path in paths if path.is_relative_to(ROOT)}
        assert patched <= files, mutant.name


def test_a_change_of_the_patched_module_or_of_the_check_chooses_a_mutant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "_git", lambda *arguments: "0" * 40)
    mutant = next(each for each in MUTANTS if each.name == "a_frame_moves_and_stays")
    assert "src/quire/memory/residency.py" in concerned(mutant) and "tests/memory/swa_machine.py" in concerned(mutant)
    for file in ("src/quire/memory/residency.py", "tests/memory/swa_machine.py"):
        monkeypatch.setattr(changes, "changed", lambda file=file: frozenset([file]))
        assert is_chosen(mutant.name, concerned(mutant))
        others = [each for each in MUTANTS if not {file} & concerned(each)]
        found = [is_chosen(each.name, concerned(each)) for each in others]
        assert 0 < sum(found) < len(found) / 4, "a tenth of the others"


def test_each_mutant_has_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = []
    for part in range(changes.PARTS):
        monkeypatch.setattr(changes, "_git", lambda *arguments, part=part: f"{part:08x}")
        turns.append({mutant.name for mutant in MUTANTS if is_chosen(mutant.name, ())})
    assert sum(map(len, turns)) == len(set().union(*turns)) == len(MUTANTS)


def test_without_a_history_a_tenth_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    changes.changed.cache_clear()
    monkeypatch.setattr(changes, "_git", lambda *arguments: "")
    try:
        assert changes.changed() == frozenset()
        assert 0 < sum(is_chosen(mutant.name, concerned(mutant)) for mutant in MUTANTS) < len(MUTANTS) / 4
    finally:
        changes.changed.cache_clear()


def marks(test: Any) -> list[str]:
    return [mark.name for mark in getattr(test, "marks", getattr(test, "pytestmark", ()))]


def test_long_tests_are_quick_where_something_changed_and_in_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = "src/quire/kernels/"

    def marked(*paths: str) -> list[str]:
        def test_something() -> None: ...

        return marks(changes.slow_unless_changed(*paths)(test_something))

    monkeypatch.setattr(changes, "changed", lambda: frozenset([f"{kernels}triton/moves.py"]))
    tests, modules, values = [], [], []
    for part in range(changes.PARTS):
        monkeypatch.setattr(changes, "commit", lambda part=part: f"{part:08x}")
        tests.append(marked(f"{kernels}native/"))
        modules.append([mark.name for mark in changes.unless_changed("tests.test_something", f"{kernels}native/")])
        values.append([value for value in changes.in_turns(range(5), 5, f"{kernels}native/") if not marks(value)])
        assert marked(f"{kernels}native/", f"{kernels}triton/") == changes.unless_changed("x", f"{kernels}tri") == []
        assert changes.in_turns(range(5), 5, kernels) == [*range(5)]
    assert sorted(tests) == sorted(modules) == [[], *[["slow"]] * (changes.PARTS - 1)]
    assert values == [[part % 5] for part in range(changes.PARTS)]
    monkeypatch.setattr(changes, "changed", lambda: frozenset(["tests/mutants/test_chosen.py"]))
    assert marked() == [], "its own module has changed"


def test_a_product_has_the_marks_of_its_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "changed", frozenset)
    monkeypatch.setattr(changes, "commit", lambda: "00000001")
    _, cases = covering(name=changes.in_turns("abc", 3), size=[1, 2]).args
    assert [case.values for case in cases if not marks(case)] == [("b", 2)]
    assert len(cases) == 6


def test_paths_that_long_tests_are_about_exist() -> None:
    """A path that moved would leave them to `make test-all` unnoticed."""
    found = set()
    for file in sorted((ROOT / "tests").rglob("*.py")):
        text = file.read_text()
        calls = re.findall(r"(?:unless_changed|in_turns)\(.*\n", text) if file != Path(changes.__file__) else [text]
        found |= {path for call in calls for path in re.findall(r'"((?:src/quire|bench|examples|tests)/[^"]*)"', call)}
    assert len(found) > 50
    assert [path for path in sorted(found) if not any(ROOT.glob(f"{path}*"))] == []
