"""Quire: the KV-cache memory system of an LLM serving engine, with a working engine on top.

    from quire import LLM, SamplingParams           an engine in this process
    from quire import KVCache, make_plan            the cache for an engine of your own, without torch

The names in `dir(quire)` are stable. They load on first use: `import quire` loads nothing else.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.cache.kv_cache import KVCache
    from quire.cache.request_kv import PrefixHit, RequestKV
    from quire.cache.running import RunningBatch
    from quire.cache.statistics import CacheStatistics, FrameCounts
    from quire.client.async_engine import AsyncEngine
    from quire.client.llm import LLM
    from quire.client.output import CompletionOutput
    from quire.client.request_assembler import RequestOutput
    from quire.engine.config import EngineConfig, engine_config
    from quire.errors import (
        AuditFailure,
        ContextTooLong,
        EngineDead,
        HostMemoryError,
        InvalidFree,
        InvalidInput,
        LeaseError,
        MissingFrame,
        ModelLoadError,
        OutOfPages,
        PlanError,
        QuireError,
        RequestTooLarge,
        StepFailed,
        StoreError,
        UnsupportedModel,
    )
    from quire.loop.part import Part
    from quire.memory.pool import Pool
    from quire.memory.record import RecordFormat
    from quire.observe.events import EventLog
    from quire.observe.explain import Cause, Explanation, Reason
    from quire.plan.advice import options_to_fit
    from quire.plan.budget import MemoryPlan, format_bytes
    from quire.plan.devices import find_device
    from quire.plan.parallel import Parallelism
    from quire.plan.plan import Plan
    from quire.plan.planner import make_plan
    from quire.plan.settings import PlanSettings
    from quire.plan.source import read_model_config
    from quire.prefix.evict import register_eviction
    from quire.prefix.node import Node
    from quire.prefix.policy import EvictionPolicy
    from quire.scheduler.sampling_params import SamplingParams
    from quire.settings.setting import parse_bytes
    from quire.spec.events import AllCleared, Namespace, PagesRemoved, PagesStored
    from quire.spec.group import GroupSpec, ReachSpec
    from quire.spec.layout import DType, Field, PageLayout
    from quire.spec.model import ModelSpec
    from quire.tiers.store import Answer, Entry, Record, RecordViews, Store, StoreKey
    from quire.tiers.stores.registry import open_store, register_store

__version__ = "0.6.0"

__all__ = [
    "LLM",
    "AllCleared",
    "Answer",
    "AsyncEngine",
    "AuditFailure",
    "CacheStatistics",
    "Cause",
    "CompletionOutput",
    "ContextTooLong",
    "DType",
    "EngineConfig",
    "EngineDead",
    "Entry",
    "EventLog",
    "EvictionPolicy",
    "Explanation",
    "Field",
    "FrameCounts",
    "GroupSpec",
    "HostMemoryError",
    "InvalidFree",
    "InvalidInput",
    "KVCache",
    "LeaseError",
    "MemoryPlan",
    "MissingFrame",
    "ModelLoadError",
    "ModelSpec",
    "Namespace",
    "Node",
    "OutOfPages",
    "PageLayout",
    "PagesRemoved",
    "PagesStored",
    "Parallelism",
    "Part",
    "Plan",
    "PlanError",
    "PlanSettings",
    "Pool",
    "PrefixHit",
    "QuireError",
    "ReachSpec",
    "Reason",
    "Record",
    "RecordFormat",
    "RecordViews",
    "RequestKV",
    "RequestOutput",
    "RequestTooLarge",
    "RunningBatch",
    "SamplingParams",
    "StepFailed",
    "Store",
    "StoreError",
    "StoreKey",
    "UnsupportedModel",
    "__version__",
    "engine_config",
    "find_device",
    "format_bytes",
    "make_plan",
    "open_store",
    "options_to_fit",
    "parse_bytes",
    "read_model_config",
    "register_eviction",
    "register_store",
]

_NAMES = {
    "cache.kv_cache": ("KVCache",),
    "cache.request_kv": ("PrefixHit", "RequestKV"),
    "cache.running": ("RunningBatch",),
    "cache.statistics": ("CacheStatistics", "FrameCounts"),
    "client.async_engine": ("AsyncEngine",),
    "engine.config": ("EngineConfig", "engine_config"),
    "client.llm": ("LLM",),
    "client.output": ("CompletionOutput",),
    "client.request_assembler": ("RequestOutput",),
    "errors": (
        "AuditFailure",
        "ContextTooLong",
        "EngineDead",
        "HostMemoryError",
        "InvalidFree",
        "InvalidInput",
        "LeaseError",
        "MissingFrame",
        "ModelLoadError",
        "OutOfPages",
        "PlanError",
        "QuireError",
        "RequestTooLarge",
        "StepFailed",
        "StoreError",
        "UnsupportedModel",
    ),
    "loop.part": ("Part",),
    "memory.pool": ("Pool",),
    "memory.record": ("RecordFormat",),
    "observe.events": ("EventLog",),
    "observe.explain": ("Cause", "Explanation", "Reason"),
    "plan.advice": ("options_to_fit",),
    "plan.budget": ("MemoryPlan", "format_bytes"),
    "plan.devices": ("find_device",),
    "plan.parallel": ("Parallelism",),
    "plan.plan": ("Plan",),
    "plan.planner": ("make_plan",),
    "plan.settings": ("PlanSettings",),
    "plan.source": ("read_model_config",),
    "prefix.evict": ("register_eviction",),
    "prefix.node": ("Node",),
    "prefix.policy": ("EvictionPolicy",),
    "scheduler.sampling_params": ("SamplingParams",),
    "settings.setting": ("parse_bytes",),
    "spec.events": ("AllCleared", "Namespace", "PagesRemoved", "PagesStored"),
    "spec.group": ("GroupSpec", "ReachSpec"),
    "spec.layout": ("DType", "Field", "PageLayout"),
    "spec.model": ("ModelSpec",),
    "tiers.store": ("Answer", "Entry", "RecordViews", "Record", "Store", "StoreKey"),
    "tiers.stores.registry": ("open_store", "register_store"),
}
_WHERE = {name: f"quire.{module}" for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'quire' has no attribute '{name}'")
    value = globals()[name] = getattr(import_module(_WHERE[name]), name)
    return value


def __dir__() -> list[str]:
    return __all__
