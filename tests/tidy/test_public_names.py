"""The names of `quire`: what `dir` lists, type checkers see and users load is the same, and importing is cheap."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
import typing
from pathlib import Path

import numpy as np
import pytest

import quire
from quire.testing import small_plan
from tests.covering import each_of

ROOT = Path(__file__).parents[2]
NAMES = [name for name in quire.__all__ if name != "__version__"]


def checked_names() -> dict[str, str]:
    """By name, the module from which type checkers take it."""
    module = ast.parse((ROOT / "src" / "quire" / "__init__.pyi").read_text(encoding="utf-8"))
    imports = [node for node in module.body if isinstance(node, ast.ImportFrom)]
    return {alias.asname or "": node.module or "" for node in imports for alias in node.names}


def test_what_is_listed_checked_and_loaded_is_the_same() -> None:
    assert dir(quire) == sorted(quire.__all__), "dir sorts"
    assert sorted(NAMES) == sorted(checked_names())
    assert checked_names() == quire._WHERE
    with pytest.raises(AttributeError, match="no attribute 'KVCash'"):
        _ = quire.KVCash


@each_of("name", NAMES)
def test_a_public_name_has_a_docstring_and_types(name: str) -> None:
    """Of classes, every public method of their own too."""
    found = getattr(quire, name)
    assert found is getattr(quire, name)
    assert inspect.getdoc(found)
    own = vars(found).values() if inspect.isclass(found) and not issubclass(found, Exception) else ()
    for function in (each for each in (found, *own) if inspect.isfunction(each) and not each.__name__.startswith("_")):
        parameters = [
            each for each in inspect.signature(function).parameters.values() if each.name not in ("self", "cls")
        ]
        assert all(each.annotation is not inspect.Parameter.empty for each in parameters), function
        assert "return" in function.__annotations__, function


def test_the_example_of_the_cache_runs() -> None:
    """The indented lines of the docstring of KVCache."""
    lines = inspect.getdoc(quire.KVCache).splitlines()  # type: ignore[union-attr]
    code = [line.strip() for line in lines if line.startswith("    ")]
    names = {"KVCache": quire.KVCache, "plan": small_plan(8, 4), "tokens": np.arange(10, dtype=np.int32)}
    exec("\n".join(code), names)
    assert (len(names["slots"]), names["frames"].shape) == (10, (1, 3))  # type: ignore[arg-type, attr-defined]
    exec("\n".join(code[1:]), names)
    assert names["kv"].num_cached == 8 and len(names["slots"]) == 2  # type: ignore[arg-type, attr-defined]


def test_importing_the_package_loads_nothing() -> None:
    code = "import sys; before = set(sys.modules); import quire; print(sorted(set(sys.modules) - before))"
    found = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(ROOT / "src")}, capture_output=True, text=True, check=True
    )
    loaded = [name for name in ast.literal_eval(found.stdout) if name.split(".")[0] not in sys.stdlib_module_names]
    assert loaded == ["quire"]


def test_types_are_distributed() -> None:
    assert (ROOT / "src" / "quire" / "py.typed").exists()
    assert typing.get_type_hints(quire.PlanSettings)
