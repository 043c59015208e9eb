"""Which mutants a commit runs: those whose patched module or whose check has changed, and a tenth of the others.

The tenth follows the commit's hash, so that each mutant has its turn. `make test-all` runs all of them. Without a
history, as in an archive of the sources, no change is known, and the tenth is all that `make test` runs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from tests import changes
from tests.changes import ROOT

KERNELS = ("native", "triton")


def is_chosen(name: str, files: Iterable[str]) -> bool:
    """Whether `make test` runs this mutant, which these files concern."""
    return not changes.changed().isdisjoint(files) or changes.has_turn(name)


def files_of(*runs: object) -> set[str]:
    """Files of what the code of these functions names: of what a mutant patches, or of what a check calls."""
    seen: set[int] = set()
    return {file for run in runs for file in _files(run, seen)}


def _files(found: Any, seen: set[int]) -> Iterator[str]:
    if id(found) in seen:
        return
    seen.add(id(found))
    if isinstance(found, partial):
        for each in (found.func, *found.args, *found.keywords.values()):
            yield from _files(each, seen)
    elif isinstance(found, str):
        yield from _kernel_sources().get(found, ())
    elif isinstance(found, ModuleType):
        yield from _file(found)
    elif isinstance(found, type | FunctionType):
        yield from _file(sys.modules.get(found.__module__))
        if isinstance(found, FunctionType) and found.__module__.startswith("tests.mutants"):
            names = {name for code in _codes(found.__code__) for name in code.co_names}
            inside = [found.__globals__[name] for name in names if name in found.__globals__]
            for package in names:
                modules = (ROOT / "src" / package.replace(".", "/") / f"{name}.py" for name in names if "." in package)
                yield from (path.relative_to(ROOT).as_posix() for path in modules if path.exists())
            for each in (*inside, *(cell.cell_contents for cell in found.__closure__ or ())):
                yield from _files(each, seen)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _codes(each)


def _file(module: ModuleType | None) -> Iterator[str]:
    path = getattr(module, "__file__", None)
    if path is not None and Path(path).is_relative_to(ROOT):
        yield Path(path).relative_to(ROOT).as_posix()


@cache
def _kernel_sources() -> dict[str, list[str]]:
    """Files of compiled kernels by the names under which mutants change them."""
    paths = (ROOT / "src/quire/kernels").glob("*/*.*")
    found = {(path.stem if path.suffix == ".py" else path.name): path for path in paths if path.parent.name in KERNELS}
    return {name: [path.relative_to(ROOT).as_posix()] for name, path in found.items()}
