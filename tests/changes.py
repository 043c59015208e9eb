"""What has changed since the branch began, or on the main branch since the commit before.

Of long tests of what has not changed, each commit runs a tenth, which follows its hash, and `make test-all` runs all.
Without a history, as in an archive of the sources, nothing has changed.
"""

from __future__ import annotations

import subprocess
import zlib
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import TypeVar, cast

import pytest

ROOT = Path(__file__).parents[1]
PARTS = 10
_BRANCHES = ("origin/main", "main")

Test = TypeVar("Test", bound=Callable[..., object])
Value = TypeVar("Value")


DEVICE = ("src/quire/engine/device/", "src/quire/kernels/", "src/quire/models/")
DRAFTS = (
    *("src/quire/speculative/", "src/quire/engine/speculation", "src/quire/spec/speculation", *DEVICE),
    *("tests/tiny_heads.py", "tests/engine/test_draft"),
)
HISPARSE = ("src/quire/sparse/", "src/quire/engine/hisparse", "src/quire/memory/", *DEVICE)
TIERS = (
    *("src/quire/offload/", "src/quire/tiers/", "src/quire/cache/", "src/quire/memory/"),
    *("src/quire/engine/tier", "src/quire/engine/host_memory", "tests/engine/tiered.py"),
)
TRANSFER = ("src/quire/transfer/", "src/quire/engine/transfer", "tests/engine/transfer_runs.py")
CORE = (
    *("src/quire/cache/", "src/quire/memory/", "src/quire/prefix/", "src/quire/scheduler/", "src/quire/testing/"),
    "tests/fuzz/",
)
KERNELS = ("src/quire/kernels/", "tests/kernels/")
STORES = ("src/quire/tiers/", "tests/tiers/stores/")
SPECS = ("src/quire/spec/", "src/quire/plan/", "tests/spec/", "tests/plan/")
CANARY = ("src/quire/canary/", "tests/canary/")
MODELS = ("src/quire/models/", "src/quire/kernels/", "src/quire/spec/", "tests/tiny_", "tests/models/")
SIMULATOR = ("src/quire/sim/", "src/quire/loop/", "src/quire/scheduler/", "tests/sim/replays.py")
"""Beginnings of the paths of what long tests are about."""


def unless_changed(module: str, *paths: str) -> list[pytest.MarkDecorator]:
    """For `pytestmark`: the tests of this module are slow, unless it has its turn, or it has changed, or a file whose
    path from the root of the repository begins with one of these."""
    chosen = has_changed(*paths, module.replace(".", "/") + ".py") or has_turn(module)
    return [] if chosen else [pytest.mark.slow]


def slow_unless_changed(*paths: str) -> Callable[[Test], Test]:
    """Mark a test, or a class of tests, slow, unless it has its turn, or its module has changed, or a file whose path
    from the root of the repository begins with one of these."""

    def mark(test: Test) -> Test:
        chosen = has_changed(*paths, test.__module__.replace(".", "/") + ".py")
        return test if chosen or has_turn(f"{test.__module__}.{test.__qualname__}") else pytest.mark.slow(test)

    return mark


def in_turns(values: Iterable[Value], parts: int, *paths: str) -> list[Value]:
    """Parameters of a test: one of so many parts has its turn, and the others are slow, unless a file has changed whose
    path begins with one of these. Parameters with marks keep these."""
    if has_changed(*paths):
        return list(values)
    turn = int(commit()[:8] or "0", 16) % parts
    return [
        value
        if at % parts == turn or hasattr(value, "marks")
        else cast(Value, pytest.param(value, marks=pytest.mark.slow))
        for at, value in enumerate(values)
    ]


def has_changed(*paths: str) -> bool:
    """Whether a file has changed whose path from the root of the repository begins with one of these."""
    return any(file.startswith(paths) for file in changed())


def has_turn(name: str) -> bool:
    """Whether what has this name is in the tenth that this commit runs."""
    return zlib.crc32(name.encode()) % PARTS == int(commit()[:8] or "0", 16) % PARTS


def commit() -> str:
    """The hash of the commit, or nothing."""
    return _git("rev-parse", "HEAD")


@cache
def changed() -> frozenset[str]:
    """Files that have changed, with those that are not committed."""
    if _git("rev-parse", "--show-toplevel") != str(ROOT):
        return frozenset()
    head = commit()
    bases = [_git("merge-base", "HEAD", branch) for branch in _BRANCHES]
    base = next((base for base in bases if base not in ("", head)), None) or _git("rev-parse", "HEAD~1")
    if not base:
        return frozenset()
    found = _git("diff", "--name-only", base) + "\n" + _git("ls-files", "--others", "--exclude-standard")
    return frozenset(found.split("\n"))


@cache
def _git(*arguments: str) -> str:
    """What git says, or nothing where it fails or is absent."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
