"""Imports transformers without torch's compiler, which takes most of the time of the import. Decision 035 says why.

An engine on the CPU compiles nothing. Its process omits the compiler's decorators, and loads the compiler when
something else of it is used. The server's process only tokenises: it has no torch at all.
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


def without_compiler(device: str) -> None:
    """For a process with one engine on this device: on the CPU, transformers loads neither torch's compiler nor its
    collective operations. Does nothing for another device, or if transformers is loaded already."""
    import torch

    if "transformers" in sys.modules or not (device == "cpu" or (device == "auto" and not torch.cuda.is_available())):
        return
    torch.distributed.is_available = lambda: False
    spec = find_spec(_COMPILER)
    if _COMPILER in sys.modules or spec is None:
        return
    module = sys.modules[_COMPILER] = module_from_spec(spec)
    module.__class__ = _Unloaded
    import_module(_NEEDED)
    del module.__path__


class _Unloaded(ModuleType):
    """A stand-in for torch's compiler, until something other than its decorators is used."""

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
    """For the process of `quire serve`: transformers finds no torch, unless torch is imported already. Parts of
    transformers that are loaded meanwhile stay without torch."""
    if "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that it found none
    try:
        yield
    finally:
        del sys.modules["torch"]
