"""Imports transformers without what takes most of the time of the import. Decisions 035 and 068 say why.

An engine on the CPU compiles nothing. Its process omits the compiler's decorators, and loads the compiler when
something else of it is used. The server's process only tokenises: it has no torch at all. Neither reads the source of
all models, in which transformers looks for the names that they define, before it is asked for such a name.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any

logger = logging.getLogger(__name__)

_COMPILER = "torch._dynamo"
_NEEDED = "torch._dynamo._trace_wrapped_higher_order_op"  # what transformers needs of the compiler
_MARKS = ("allow_in_graph", "assume_constant_result", "disable")
_SPINS = "5000"  # 80 us on a Zen 5. The default is 60 times as many: longer than another process has the core


def with_short_spins() -> None:
    """For a process that has not imported torch: threads that wait for each other soon sleep, and leave the core to
    others, such as the server's process. An environment that says how they wait stays as it is. Decision 095."""
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = _SPINS


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
    _import_unscanned()


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
        _import_unscanned()
        yield
    finally:
        del sys.modules["torch"]


def _import_unscanned() -> None:
    """Import transformers and its package of models with the names that they list themselves. Those that only the
    source of models has are found at the first use of one: then it is read. A transformers that is built in another way
    is not imported here: its own import follows, which takes longer."""
    spec, before = find_spec("transformers"), set(sys.modules)
    if "transformers" in before or spec is None:
        return
    try:
        _import_listed(spec)
    except Exception as error:
        logger.info("transformers is imported with the source of all models: %r", error)
        for name in sys.modules.keys() - before:
            if name.partition(".")[0] == "transformers":
                del sys.modules[name]


def _import_listed(spec: ModuleSpec) -> None:
    assert spec.loader is not None and spec.submodule_search_locations is not None
    package = sys.modules["transformers"] = module_from_spec(spec)
    package.__version__ = version("transformers")  # type: ignore[attr-defined]
    imports: Any = import_module("transformers.utils.import_utils")
    scan, models = imports.define_import_structure, os.path.join(spec.submodule_search_locations[0], "models")

    def listed(path: str, prefix: str | None = None) -> Any:
        is_all = str(path) in (models, os.path.join(models, "__init__.py"))
        return {frozenset(): {}} if is_all else scan(path, prefix)

    class Unscanned(imports._LazyModule):  # type: ignore[misc]
        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                if name.startswith("__"):
                    raise
            if find_spec(f"{self._name}.{name}") is not None:
                return import_module(f"{self._name}.{name}")
            own, found = self._import_structure, dict(scan(models, "models" if self._name == "transformers" else None))
            found[frozenset()] = {**found.get(frozenset(), {}), **own}
            self.__init__(self._name, self.__file__, found, self.__spec__, self._objects)  # type: ignore[misc]
            self.__class__ = imports._LazyModule
            return getattr(self, name)

    imports.define_import_structure = listed
    try:
        spec.loader.exec_module(package)
        import_module("transformers.models")
    finally:
        imports.define_import_structure = scan
    for name in ("transformers", "transformers.models"):
        sys.modules[name].__class__ = Unscanned
    # A part of transformers imports the package once more by itself, which would read all source again.
    again: Any = sys.modules["transformers.utils"]
    again.direct_transformers_import = lambda *_, **__: sys.modules["transformers"]
