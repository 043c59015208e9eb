"""Quire: the KV-cache memory system of an LLM serving engine, with a real engine on top.

    from quire import LLM, SamplingParams

The names below load on first use, so that planning and command lines start without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.cache.kv_cache import KVCache
    from quire.engine.async_engine import AsyncEngine
    from quire.engine.config import EngineConfig
    from quire.engine.llm import LLM
    from quire.engine.output import CompletionOutput, RequestOutput
    from quire.scheduler.sampling_params import SamplingParams

__version__ = "0.6.0"

_WHERE = {
    "LLM": "quire.engine.llm",
    "AsyncEngine": "quire.engine.async_engine",
    "CompletionOutput": "quire.engine.output",
    "EngineConfig": "quire.engine.config",
    "KVCache": "quire.cache.kv_cache",
    "RequestOutput": "quire.engine.output",
    "SamplingParams": "quire.scheduler.sampling_params",
}

__all__ = [
    "LLM",
    "AsyncEngine",
    "CompletionOutput",
    "EngineConfig",
    "KVCache",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'quire' has no attribute '{name}'")
    return getattr(import_module(_WHERE[name]), name)
