"""The store and the sizes of an engine's tiers, before weights are read, which may take minutes.

The store is opened here, so that a bad URL, a server that does not answer, a directory that cannot be written or a
missing package ends a start at once. The same holds for sizes that are not available, or that hold no page of the
model. Nothing here loads torch.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from quire.engine.config import EngineConfig
from quire.engine.host_memory import host_memory
from quire.engine.planning import configured_plan, memory_plan
from quire.errors import PlanError, QuireError, StoreError
from quire.memory.record import HEADER_BYTES
from quire.plan.budget import MemoryPlan, format_bytes, round_up_bytes
from quire.plan.host import host_budget, host_frames
from quire.plan.source import model_folder, read_model_config
from quire.spec.group import GroupSpec
from quire.tiers.store import Store
from quire.tiers.stores.directory import DirectoryStore
from quire.tiers.stores.directory.slab_allocator import slot_size
from quire.tiers.stores.directory.store import holds_store
from quire.tiers.stores.registry import directory_of, open_store

_MOST_STORAGE = 32 * 2**30
_SOME_KV_BYTES = 2**40  # for layouts, which do not depend on it


class Storage(NamedTuple):
    """The opened store, None if there is none, and its capacity in bytes, None if a server determines it. The caller
    closes the store."""

    store: Store | None
    num_bytes: int | None


def open_tiers(config: EngineConfig) -> Storage:
    """Open the store, and check of host memory and sizes what can be checked without the weights.

    Raises HostMemoryError, StoreError, InvalidInput, or PlanError if a tier would hold no page.
    """
    if isinstance(config.host_memory, int):
        host_budget(config.host_memory, host_memory(), device_bytes=0)
    plan = _plan_of(config)
    size = storage_size(config)
    if plan is not None and isinstance(config.host_memory, int):
        host_frames(plan, config.host_memory)
    groups = plan.groups if plan is not None else ()
    check_storage_size(config, groups, size)
    store = open_store(config.storage, capacity=size) if config.storage else None
    if isinstance(store, DirectoryStore) and size is None:
        try:
            size = store.facts().capacity
            check_storage_size(config, groups, size)
        except BaseException:
            store.close()
            raise
    return Storage(store, size)


def storage_size(config: EngineConfig) -> int | None:
    """The capacity in bytes: as configured; for a new directory half of the free disk and at most 32 GiB; None if the
    store has its own."""
    path = directory_of(config.storage) if config.storage is not None else None
    try:
        if config.storage_size is not None or path is None or holds_store(Path(path)):
            return config.storage_size
        parent = next((folder for folder in (Path(path), *Path(path).absolute().parents) if folder.is_dir()), Path("/"))
        return min(_MOST_STORAGE, shutil.disk_usage(parent).free // 2)
    except OSError as error:
        raise StoreError(f"the store '{path}' cannot be used: {error}.", fix="give another directory.") from error


def check_storage_size(config: EngineConfig, groups: Sequence[GroupSpec], num_bytes: int | None) -> None:
    """Refuse a directory that would hold no page. Raises PlanError with the smallest size that works, and StoreError if
    no size was given and the disk is full."""
    path = directory_of(config.storage) if config.storage is not None else None
    if path is None or num_bytes is None:
        return
    least = sum(slot_size(HEADER_BYTES + group.layout.bytes_per_frame) for group in groups)
    if num_bytes >= least:
        return
    if config.storage_size is None and not holds_store(Path(path)):
        raise StoreError(
            f"the disk of '{path}' has no room for a store: half of what is free is "
            f"{format_bytes(num_bytes)}, and a page takes {format_bytes(least)}.",
            fix="free some of it, or give another directory.",
        )
    raise PlanError(
        f"{format_bytes(num_bytes)} of storage hold no page: one record of each group takes "
        f"{format_bytes(least)} in all.",
        fix=f"use --storage-size {round_up_bytes(least).replace(' ', '')} or more; some GiB are worth the trouble.",
    )


def _plan_of(config: EngineConfig) -> MemoryPlan | None:
    """A plan with the layouts that the engine will have, if the configuration is available and suffices; otherwise
    None."""
    if not config.has_tiers:
        return None
    with suppress(QuireError):
        if model_folder(config.model) is not None:
            plan = configured_plan(config, read_model_config(config.model)[0], _SOME_KV_BYTES)
            return memory_plan(config, plan)
    return None
