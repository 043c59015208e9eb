"""How large the cache and what is below it may be, and that their packages have no import circles."""

from __future__ import annotations

import ast
import graphlib
import inspect
from pathlib import Path

import pytest

from quire.cache import KVCache
from quire.cache.offload import Offload
from quire.testing import small_plan

SOURCE = Path(__file__).parents[2] / "src" / "quire"
PACKAGES = ("memory", "prefix", "cache", "offload", "tiers")

MOST_METHODS = 12
MOST_METHODS_OF_THE_PORT = 8
MOST_ATTRIBUTES = 20
# With what was canary's (audits, 370), observe's (counters, 120), sim's (a mover, 230), what connectors need (140), and
# the arena (500), sizes that change (520, of an arena 30), endings and forecasts (80), tenants (1,025), and
# worth of copies (50), decodes of windows and states together (78), and ceilings that are too small (8).
MOST_LINES = 17_909


def methods(cls: type) -> list[str]:
    return [name for name, _ in inspect.getmembers(cls, inspect.isfunction) if not name.startswith("_")]


def test_the_cache_has_few_verbs_and_inherits_nothing() -> None:
    assert len(methods(KVCache)) <= MOST_METHODS, methods(KVCache)
    assert len(vars(KVCache(small_plan(8, 2)))) <= MOST_ATTRIBUTES
    assert KVCache.__bases__ == (object,)


def test_the_port_below_the_device_is_narrow() -> None:
    assert len(methods(Offload)) <= MOST_METHODS_OF_THE_PORT, methods(Offload)


def test_the_packages_of_the_cache_are_short() -> None:
    lines = {name: sum(len(f.read_text().splitlines()) for f in (SOURCE / name).rglob("*.py")) for name in PACKAGES}
    assert sum(lines.values()) <= MOST_LINES, lines


@pytest.mark.parametrize("package", PACKAGES)
def test_no_import_goes_round_in_a_circle(package: str) -> None:
    """Imports for type checkers count too."""
    files = {_module(path): path for path in (SOURCE / package).rglob("*.py")}
    graph = {module: _imported(path) & files.keys() - {module} for module, path in files.items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def _module(path: Path) -> str:
    return ".".join(("quire", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")


def _imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found
