"""What has changed since the branch began, or on the main branch since the commit before.

Long tests of what has not changed are left to `make test-all`. Without a history, as in an archive of the sources,
nothing has changed.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TypeVar

import pytest

ROOT = Path(__file__).parents[1]
_BRANCHES = ("origin/main", "main")

Test = TypeVar("Test", bound=Callable[..., None])


def slow_unless_changed(*folders: str) -> Callable[[Test], Test]:
    """Mark a test slow, unless a file in one of these folders of the repository has changed."""
    return (lambda test: test) if has_changed(*folders) else pytest.mark.slow


def has_changed(*folders: str) -> bool:
    """Whether a file in one of these folders of the repository has changed."""
    return any(file.startswith(folders) for file in changed())


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
