"""The house rules that a program can check. Each test lists every place that breaks its rule."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "quire"
FILES = sorted(SOURCE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

MOST_FILE_LINES = 600
MOST_FUNCTION_LINES = 100
VAGUE_NAMES = {"utils", "util", "common", "misc", "helpers", "helper"}
KINDS = re.compile(
    r"swa(?!p)|mamba|sliding|\bmla\b|\bgqa\b|recurrent|indexer|\breach\.(kind|tokens)\b|[\"']window[\"']", re.IGNORECASE
)
KNOWS_NO_KIND = ("prefix/", "cache/", "scheduler/", "engine/", "serve/", "observe/", "testing/")
KNOWS_NO_KIND += ("memory/residency.py", "memory/pool.py")
MAY_NAME_KINDS = ("prefix/reach.py", "engine/config.py")
"""Reach is where kinds are; the engine passes the names of settings on to planning."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def name(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@pytest.fixture(autouse=True, scope="module")
def trees_end() -> Iterator[None]:
    """Trees of all files take memory, which the collector of other tests would walk."""
    yield
    tree_of.cache_clear()
    _classes.cache_clear()


def functions(path: Path) -> Iterator[Function]:
    return (node for node in ast.walk(tree_of(path)) if isinstance(node, Function))


def test_the_rules_have_something_to_check() -> None:
    assert len(FILES) > 40
    assert {"cache/kv_cache.py", "prefix/reach.py", "memory/residency.py"} <= {name(path) for path in FILES}


def test_no_module_has_a_vague_name() -> None:
    paths = [path.relative_to(ROOT) for path in (*FILES, *TESTS)]
    assert [str(path) for path in paths if VAGUE_NAMES & {path.stem, *path.parts[:-1]}] == []


def test_files_are_short() -> None:
    lengths = {name(path): len(path.read_text().splitlines()) for path in FILES}
    assert {path: length for path, length in lengths.items() if length > MOST_FILE_LINES} == {}


def test_functions_are_short() -> None:
    lengths = {
        f"{name(path)}:{function.name}": (function.end_lineno or 0) - function.lineno + 1
        for path in FILES
        for function in functions(path)
    }
    assert {function: length for function, length in lengths.items() if length > MOST_FUNCTION_LINES} == {}


def test_only_the_command_line_prints() -> None:
    calls = [
        f"{name(path)}:{node.lineno}"
        for path in FILES
        if not name(path).startswith("cli/")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert calls == []


@pytest.mark.parametrize(
    ("rule", "pattern"),
    [
        ("type: ignore without a code", r"#\s*type:\s*ignore(?!\[)"),
        ("noqa without a code", r"#\s*noqa(?!:\s*[A-Z]+[0-9]+)"),
        ("unfinished business", r"\b(TODO|FIXME|XXX|HACK)\b"),
    ],
)
def test_comments(rule: str, pattern: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in (*FILES, *TESTS)
        if path != Path(__file__)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(pattern, line)
    ]
    assert found == [], rule


def test_no_kind_of_attention_is_named_where_none_is_known() -> None:
    """Kinds live in reach, layouts, models and kernels; the tree, the cache and the scheduler see groups."""
    found = [
        f"{name(path)}:{number}: {line.strip()}"
        for path in FILES
        if name(path).startswith(KNOWS_NO_KIND) and name(path) not in MAY_NAME_KINDS
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if KINDS.search(line)
    ]
    assert found == []


def test_no_exception_is_swallowed_unnamed() -> None:
    bare = [
        f"{name(path)}:{node.lineno}"
        for path in FILES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ExceptHandler) and node.type is None
    ]
    assert bare == []


# -- docstrings


def undocumented(path: Path) -> Iterator[str]:
    """Public modules, classes, functions and methods without a docstring. Private scopes are not entered."""
    module = tree_of(path)
    if ast.get_docstring(module) is None:
        yield name(path)
    yield from _undocumented(module, name(path))


def _undocumented(scope: ast.Module | ast.ClassDef, where: str) -> Iterator[str]:
    for node in scope.body:
        if not isinstance(node, Function | ast.ClassDef) or node.name.startswith("_"):
            continue
        if ast.get_docstring(node) is None and not _is_told_by_its_class(scope, node):
            yield f"{where}:{node.name}"
        if isinstance(node, ast.ClassDef):
            yield from _undocumented(node, f"{where}:{node.name}")


def _is_told_by_its_class(scope: ast.Module | ast.ClassDef, node: ast.AST) -> bool:
    """A member of a documented protocol, the only method of a documented class, such as a policy, or a method that a
    base class documents."""
    if not isinstance(scope, ast.ClassDef) or ast.get_docstring(scope) is None:
        return False
    if any(isinstance(base, ast.Name) and base.id == "Protocol" for base in scope.bases):
        return True
    if isinstance(node, Function) and node.name in _documented_by_bases(scope):
        return True
    return [item for item in scope.body if isinstance(item, Function | ast.ClassDef)] == [node]


@cache
def _classes() -> dict[str, list[ast.ClassDef]]:
    found: dict[str, list[ast.ClassDef]] = {}
    for node in (node for path in FILES for node in ast.walk(tree_of(path)) if isinstance(node, ast.ClassDef)):
        found.setdefault(node.name, []).append(node)
    return found


def _documented_by_bases(scope: ast.ClassDef) -> set[str]:
    """Names of methods with a docstring in a base class of `scope`, in one of its bases, or in the class whose methods
    it says that it has."""
    plain = [base.value if isinstance(base, ast.Subscript) else base for base in scope.bases]
    names = [base.id for base in plain if isinstance(base, ast.Name)]
    names += re.findall(r"[Mm]ethods are those of `(\w+)`", ast.get_docstring(scope) or "")
    bases = [base for name in names for base in _classes().get(name, ())]
    own = {item.name for base in bases for item in base.body if isinstance(item, Function) and ast.get_docstring(item)}
    return own.union(*map(_documented_by_bases, bases))


def test_everything_public_says_what_it_is() -> None:
    assert [place for path in FILES for place in undocumented(path)] == []
