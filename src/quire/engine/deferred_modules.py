"""Modules that a package imports at its start and few processes use: they are executed when one of them is used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from threading import RLock
from types import ModuleType
from typing import Any

StandIns = Mapping[str, Callable[[str, str], Any]]


class DeferredModules(MetaPathFinder):
    """The deferred modules of one package, by their full names, each with what stands in for names that the package
    imports from it at once: what a function makes of the module's name and the name.

    They are executed together, in the order in which they were first imported, since they import each other in
    circles: at the first use of another name of one, of a stand-in of `later`, or before a module of the package is
    imported that was not at its start (`watch`). Threads wait for the one that executes them.
    """

    def __init__(self, names: Mapping[str, StandIns]) -> None:
        self._names = names
        self._waiting: dict[str, ModuleType] = {}
        self._loading = False
        self._lock = RLock()
        self._watched, self._light = "", frozenset[str]()
        sys.meta_path.insert(0, self)

    def watch(self, package: str, *, light: Collection[str]) -> None:
        """From now on, execute the modules before another module of `package` is imported, but for `light` ones."""
        self._watched, self._light = f"{package}.", frozenset(light)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The spec of a module that is deferred; None for others."""
        if self._loading:
            return None
        if name not in self._names:
            if self._watched and name.startswith(self._watched) and name not in self._light:
                self.load()
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Later(self, spec.loader)
        return spec

    def keep(self, module: ModuleType) -> None:
        """Execute this module later."""
        module.__class__ = _Deferred
        self._waiting[module.__name__] = module

    def load(self) -> None:
        """Execute all of them now."""
        with self._lock:
            if self._loading:
                return
            self._loading = True
            sys.meta_path.remove(self)
            for module in list(self._waiting.values()):
                self._execute(module)

    def found(self, module: ModuleType, name: str) -> Any:
        """What a deferred module has under this name. Raises AttributeError."""
        owner = module.__name__
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module '{owner}' has no attribute '{name}'")
        if not self._loading and (make := self._names[owner].get(name)) is not None:
            return make(owner, name)
        with self._lock:
            self.load()
            self._execute(module)
            if type(module) is _Deferred:  # its code is running
                raise AttributeError(f"module '{owner}' has no attribute '{name}' yet")
        return getattr(module, name)

    def _execute(self, module: ModuleType) -> None:
        if self._waiting.pop(module.__name__, None) is None:
            return
        spec = module.__spec__
        assert spec is not None and isinstance(spec.loader, _Later)
        spec.loader = module.__loader__ = spec.loader.real
        spec.loader.exec_module(module)
        if type(module) is _Deferred:
            module.__class__ = ModuleType  # type: ignore[assignment]


class _Later(Loader):
    """Leaves a module unexecuted."""

    def __init__(self, modules: DeferredModules, real: Loader) -> None:
        self.modules, self.real = modules, real

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the real loader."""
        return self.real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Keep it for later."""
        module.modules_of_quire = self.modules  # type: ignore[attr-defined]
        self.modules.keep(module)


class _Deferred(ModuleType):
    """A module that is not executed yet."""

    def __getattr__(self, name: str) -> Any:
        modules: DeferredModules = self.__dict__["modules_of_quire"]
        return modules.found(self, name)


class _StandIn(type):
    """The class of stand-ins of functions and classes."""

    module: str

    def __call__(cls, *arguments: Any, **more: Any) -> Any:
        found = sys.modules[cls.module]
        if isinstance(found, _Deferred):
            found.__dict__["modules_of_quire"].load()
        return getattr(found, cls.__name__)(*arguments, **more)

    def __instancecheck__(cls, value: Any) -> bool:
        found = sys.modules[cls.module]
        return not isinstance(found, _Deferred) and isinstance(value, getattr(found, cls.__name__))


def later(module: str, name: str) -> type:
    """A stand-in for a function or class: to call it is to call the real one, for which the module is executed. Nothing
    is an instance of it before."""
    return _StandIn(name, (), {"module": module})


def submodule(module: str, name: str) -> ModuleType:
    """Stands in for a module of a package that is deferred, and is deferred too."""
    return import_module(f"{module}.{name}")
