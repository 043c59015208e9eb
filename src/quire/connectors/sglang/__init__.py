"""SGLang: Quire's stores beneath its HiCache. SGLang imports this, in its process."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """`QuireHiCache`, imported when SGLang asks for it: its module needs SGLang."""
    if name == "QuireHiCache":
        from quire.connectors.sglang.hicache import QuireHiCache

        return QuireHiCache
    raise AttributeError(name)
