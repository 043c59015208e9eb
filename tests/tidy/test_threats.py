"""The threat model names a test for each of its lines, and the tests exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def rows() -> list[str]:
    lines = (ROOT / "docs" / "guides" / "security.md").read_text().splitlines()
    return [line for line in lines if line.startswith("| ") and not line.startswith(("| threat", "| started with"))]


def test_each_threat_has_a_test() -> None:
    found = rows()
    assert len(found) > 20
    for row in found:
        assert NAMED.search(row), f"no test: {row}"


def test_each_test_exists() -> None:
    for row in rows():
        for path, name in NAMED.findall(row):
            tree = ast.parse((ROOT / path).read_text())
            names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
            assert name in names, f"{path} has no {name}"


def test_nothing_is_unpickled() -> None:
    """Neither messages nor records nor files are read by anything that could run code."""
    readers = re.compile(
        r"import (pickle|marshal|shelve|dill)|torch\.load|allow_pickle=True|yaml\.load\(|\beval\(|\bexec\("
    )
    for path in (ROOT / "src").rglob("*.py"):
        found = [line for line in path.read_text().splitlines() if readers.search(line) and ".eval(" not in line]
        assert not found, f"{path}: {found}"


def test_sockets_between_processes_have_no_name() -> None:
    """A socket in a folder would be open to whoever may read the folder."""
    for path in (ROOT / "src").rglob("*.py"):
        assert "AF_UNIX" not in path.read_text() and "ipc://" not in path.read_text(), path
