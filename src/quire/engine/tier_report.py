"""The capacity of lower tiers, as the engine resolved its settings, and the counters of a store: for people, and for
machines. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from quire.counters import counter
from quire.engine.config import EngineConfig
from quire.plan.budget import MemoryPlan, format_bytes
from quire.prefix.reach import reach_of
from quire.settings.setting import without_secrets
from quire.tiers.stores.directory import DirectoryStore


def _records(state: str) -> int | None:
    text = "What became of records in a store that counts them, by this process."
    found: int | None = counter(text, start=None, name="store_records", state=state)
    return found


@dataclass(frozen=True, kw_only=True)
class StoreCounters:
    """Counters of a store since it was opened: `failures` between it and its medium, by kind, and the fate of records,
    which is None for stores that do not count them."""

    failures: dict[str, int] = counter(
        "What went wrong between this process and its store, by kind.", "kind", start=dict, name="store_failures"
    )
    hits: int | None = _records("hits")
    misses: int | None = _records("misses")
    stored: int | None = _records("stored")
    evicted: int | None = _records("evicted")
    lost: int | None = _records("lost")
    overtaken: int | None = _records("overtaken")
    reclaimed: int | None = _records("reclaimed")


def tiers_as_dict(
    config: EngineConfig, plan: MemoryPlan, frames: Sequence[int], record_bytes: Sequence[int], num_bytes: int
) -> dict[str, Any]:
    """The resolved tiers. `frames` of the host and `record_bytes` are by group; `num_bytes` is the host pool's size.

    Tokens are those that the tier has room for if every group had to store all of its pages. `notes` say what was
    chosen for the caller, and what will have little effect.
    """
    groups = {
        group.name: {"frames": count, "bytes": count * size, "whole": reach_of(group.reach, plan.page_size).whole}
        for group, count, size in zip(plan.groups, frames, record_bytes, strict=True)
    }
    whole = [
        found["frames"] for at, found in enumerate(groups.values()) if found["whole"] and at not in plan.groups_on_host
    ]
    tokens = int(max(whole or [found["frames"] for found in groups.values()])) * plan.page_size
    found: dict[str, Any] = {
        "host": {"bytes": num_bytes, "tokens": tokens, "groups": groups},
        "storage": None,
        "write_policy": config.write_policy,
        "load": "always" if config.why_loads else config.load,
        "prefetch": None,
    }
    if config.storage is not None:
        size = config.storage_size
        found["storage"] = {
            "where": without_secrets(config.storage),
            "bytes": size,
            "tokens": None if size is None else size // sum(record_bytes) * plan.page_size,
        }
        seconds = f" of {config.prefetch_seconds:g} s" if config.prefetch == "timeout" else ""
        found["prefetch"] = config.prefetch + seconds
    return found | {"notes": _notes(config, plan, found)}


_AS_MANY = 0.9
"""Part of the device's tokens from which host memory counts as large as the device: rounding is no news."""


def _notes(config: EngineConfig, plan: MemoryPlan, found: Mapping[str, Any]) -> list[str]:
    host, storage = found["host"], found["storage"]
    notes = []
    if config.host_memory in (None, "auto"):
        reached = "storage is" if config.storage is not None else "other engines are"
        why = f"{reached} reached through it" if config.host_memory is None else "as asked"
        notes.append(f"The size of host memory was chosen here: {why}.")
    if host["tokens"] < _AS_MANY * plan.num_tokens and config.write_policy != "write_back":
        notes.append(
            f"Host memory holds fewer tokens than the device ({host['tokens']:,} of {plan.num_tokens:,}): little of "
            "what leaves the device will be there."
        )
    if storage is not None and storage["tokens"] is not None and storage["tokens"] < host["tokens"]:
        notes.append(f"Storage holds fewer tokens than host memory ({storage['tokens']:,} of {host['tokens']:,}).")
    if storage is None:
        notes.append("Without storage nothing outlives the engine.")
    if found["load"] == "always":
        notes.append(f"Loads happen even where computing would be quicker: {config.why_loads}.")
    return notes


def tier_rows(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A name and a sentence for each tier, and for how they are used."""
    host, storage = found["host"], found["storage"]
    groups = ", ".join(
        f"{name} {group['frames']:,} frames, {format_bytes(group['bytes'])}" for name, group in host["groups"].items()
    )
    rows = [("Host memory", f"{format_bytes(host['bytes'])}: {host['tokens']:,} tokens ({groups})")]
    if storage is not None:
        size = "as large as it is"
        if storage["bytes"] is not None:
            size = f"at most {format_bytes(storage['bytes'])}: about {storage['tokens']:,} tokens"
        rows.append(("Storage", f"{storage['where']}, {size}"))
    prefetch = f"prefetch {found['prefetch']}" if storage is not None else "no prefetch"
    rows.append(("Tiers", f"{found['write_policy']}; load {found['load']}; {prefetch}"))
    return rows


def tiers_line(found: Mapping[str, Any]) -> str:
    """The tiers in one line, for logs."""
    return "; ".join(f"{name[0].lower()}{name[1:]} {text}" for name, text in tier_rows(found)) + "."


def store_counters(store: object) -> StoreCounters:
    """The counters of a store."""
    failures = dict(getattr(store, "failures", {}))
    if not isinstance(store, DirectoryStore):
        return StoreCounters(failures=failures)
    counted, states = store.statistics, [each.name for each in fields(StoreCounters)[1:]]
    return StoreCounters(failures=failures | {"retry": counted["retries"]}, **{name: counted[name] for name in states})
