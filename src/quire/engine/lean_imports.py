"""Importing transformers without what a process of ours never uses, which takes most of the time of the import.

The engine's process compiles nothing and has one device for each model: marks for torch's compiler are left out, and
the compiler loads when something asks for more of it. The server's process only tokenises: it has no torch at all.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any

_COMPILER = "torch._dynamo"
_NEEDED = "torch._dynamo._trace_wrapped_higher_order_op"  # by transformers, of the compiler
_MARKS = ("allow_in_graph", "assume_constant_result", "disable")


def without_compiler() -> None:
    """For a process of the engine's own: transformers, not imported yet, loads neither torch's compiler nor what
    several devices need."""
    import torch

    torch.distributed.is_available = lambda: False
    spec = find_spec(_COMPILER)
    if _COMPILER in sys.modules or spec is None:
        return
    module = sys.modules[_COMPILER] = module_from_spec(spec)
    module.__class__ = _Unloaded
    import_module(_NEEDED)
    del module.__path__


class _Unloaded(ModuleType):
    """Torch's compiler, until something but its marks is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name in _MARKS:
            return _unmarked
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        self.__class__ = ModuleType  # type: ignore[assignment]
        assert self.__spec__ is not None and self.__spec__.loader is not None
        self.__path__ = self.__spec__.submodule_search_locations or []
        self.__spec__.loader.exec_module(self)
        return getattr(self, name)


def _unmarked(function: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Any:
    return _unmarked if function is None else function


@contextmanager
def without_torch() -> Iterator[None]:
    """For the server's process, while it runs: transformers finds no torch, unless it is imported already."""
    if "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that it found none
    try:
        yield
    finally:
        del sys.modules["torch"]
