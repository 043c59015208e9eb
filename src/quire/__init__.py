"""Quire: the KV-cache memory system of an LLM serving engine, with a working engine on top.

    from quire import LLM, SamplingParams           an engine in this process
    from quire import KVCache, make_plan            the cache for an engine of your own, without torch

The names in `dir(quire)` are stable; `__init__.pyi` lists them. They load on first use: `import quire` loads nothing
else of Quire.
"""

from __future__ import annotations

import pkgutil
import re
from importlib import import_module
from typing import Any

__version__ = "0.6.0"

_LISTED = re.compile(r"^from (\S+) import (\w+) as", re.MULTILINE)
_WHERE = {
    name: module for module, name in _LISTED.findall((pkgutil.get_data(__name__, "__init__.pyi") or b"").decode())
}

__all__ = sorted([*_WHERE, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'quire' has no attribute '{name}'")
    value = globals()[name] = getattr(import_module(_WHERE[name]), name)
    return value


def __dir__() -> list[str]:
    return __all__
