"""Stands in for what SGLang imports and its cache never uses: compiled kernels, vision, other people's models.

Only the import statements succeed; a stub computes nothing. Importing this module installs it, before anything of
SGLang is imported.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

STUBBED = ("torchvision", "sgl_kernel", "IPython", "cv2", "flashinfer", "vllm", "transformers")
STUBBED_MODULES = ("sglang.srt.utils.hf_transformers_patches",)


def _refuse_dunder(name: str) -> None:
    if name.startswith("__"):
        raise AttributeError(name)


class AbsentType(type):
    """A class that has every attribute, so that module level code of importers runs."""

    def __new__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any], **_: Any) -> AbsentType:
        return super().__new__(cls, name, bases, body)

    def __init__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any], **_: Any) -> None:
        super().__init__(name, bases, body)

    def __getattr__(cls, name: str) -> Any:
        _refuse_dunder(name)
        return _absent(name)

    def __or__(cls, other: object) -> Any:
        return cls

    def __ror__(cls, other: object) -> Any:
        return cls

    def __getitem__(cls, key: object) -> Any:
        return cls

    def __setitem__(cls, key: object, value: object) -> None:
        return

    def __iter__(cls) -> Iterator[Any]:
        return iter(())


class Absent(metaclass=AbsentType):
    """Can be subclassed, made, called and used as a decorator."""

    def __init_subclass__(cls, **_: Any) -> None:
        return

    def __init__(self, *_: Any, **__: Any) -> None:
        return

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        decorates = len(arguments) == 1 and callable(arguments[0]) and not options
        return arguments[0] if decorates else self

    def __getattr__(self, name: str) -> Any:
        _refuse_dunder(name)
        return self


def _absent(name: str) -> AbsentType:
    return AbsentType(name, (Absent,), {})


class AbsentModule(ModuleType):
    """A module that has every name."""

    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> Any:
        _refuse_dunder(name)
        return _absent(name)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds stubs for `STUBBED` packages, their modules and `STUBBED_MODULES`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] in STUBBED or fullname in STUBBED_MODULES:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return AbsentModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        return


sys.meta_path.insert(0, Finder())
