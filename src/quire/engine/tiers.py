"""EngineTiers: host memory, a store and the mover between them, as an engine's settings ask for them."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from quire.cache.tier_settings import PrefetchPolicy, TierSettings, WritePolicy
from quire.engine.config import STORE_DRAIN_S, EngineConfig
from quire.engine.host_memory import host_memory
from quire.engine.tier_report import tiers_as_dict
from quire.memory.frame_copies import FrameCopies
from quire.memory.host_pool import HostPool
from quire.memory.mapping import Progress
from quire.memory.pool import Pool
from quire.plan.budget import MemoryPlan
from quire.plan.host import host_budget, host_frames
from quire.tiers.break_even import BreakEven
from quire.tiers.mover import ThreadMover
from quire.tiers.moves import Link
from quire.tiers.store import Store
from quire.tiers.stores.registry import directory_of, open_store

logger = logging.getLogger(__name__)

_MOST_STORAGE = 32 * 2**30


class EngineTiers:
    """Owns the host pool, the mover's threads and the store, until `close`.

    `progress` hears of host memory that has been touched, in bytes, and of how much it will be. Raises HostMemoryError
    where the host has no room, and StoreError where the store cannot be opened.
    """

    def __init__(
        self,
        config: EngineConfig,
        plan: MemoryPlan,
        pools: Sequence[Pool],
        *,
        seconds: Callable[[], float] = time.monotonic,
        progress: Progress | None = None,
    ) -> None:
        memory = host_memory()
        asked = config.host_memory if config.host_memory is not None else "auto"
        self.num_bytes = host_budget(
            asked,
            available=memory.available,
            limit=memory.limit,
            total=memory.total,
            device_bytes=plan.pool_bytes,
            to_come=plan.pool_bytes if pools[0].device.type == "cpu" else 0,  # asked for, and not touched yet
        )
        frames = host_frames(plan, self.num_bytes)
        self.storage_size = storage_size(config)
        with ExitStack() as undo:
            self.store: Store | None = None
            if config.storage:
                self.store = open_store(config.storage, capacity=self.storage_size)
                undo.callback(self.store.close)
            pinned = pools[0].device.type == "cuda"
            self._host = HostPool(plan.groups, frames, pinned=pinned, progress=progress)
            undo.callback(self._host.close)
            record_bytes = tuple(self._host.format(group).num_bytes for group in range(len(frames)))
            sized = config.model_copy(update={"storage_size": self.storage_size})
            self.resolved = tiers_as_dict(sized, plan, frames, record_bytes, self._host.num_bytes)
            self.mover = ThreadMover(FrameCopies(pools, self._host), self.store)
            undo.pop_all()
        self.break_even = BreakEven(seconds, on_change=_say)
        self.settings = TierSettings(
            host_frames=frames,
            record_bytes=record_bytes,
            mover=self.mover,
            break_even=self.break_even,
            write=WritePolicy(config.write_policy),
            always=config.load == "always",
            stores=self.store is not None,
            prefetch=PrefetchPolicy(config.prefetch),
            prefetch_seconds=config.prefetch_seconds,
        )

    def statistics(self) -> dict[str, Any]:
        """Bandwidths in bytes per second where they are known, and why links that are off are."""
        return {
            "resolved": self.resolved,
            "host_bytes": self._host.num_bytes,
            "bandwidth": {link.value: self.mover.bandwidth(link) for link in Link if link is not Link.FORGET},
            "latency": {link.value: self.mover.latency(link) for link in Link if link is not Link.FORGET},
            "off": {link.value: why for link in Link if (why := self.break_even.why_off(link))},
            "turned_off": self.break_even.turned_off_count,
        }

    def close(self, settle: Callable[[], bool]) -> None:
        """Let what is on its way to the store arrive, for a while, and stop. `settle` takes note of what has."""
        until = time.monotonic() + STORE_DRAIN_S
        while (settle() or not self.mover.idle) and time.monotonic() < until:
            self.mover.wait(0.1)
        self.mover.close()
        settle()
        if self.store is not None:
            self.store.close()
        self._host.close()


def storage_size(config: EngineConfig) -> int | None:
    """Bytes that may be kept: as configured; of a new directory, where nothing is, half of what its disk has free and
    32 GiB at most; None where the store has a size of its own."""
    path = directory_of(config.storage) if config.storage is not None else None
    if config.storage_size is not None or path is None or (Path(path).is_dir() and any(Path(path).iterdir())):
        return config.storage_size
    parent = next((folder for folder in (Path(path), *Path(path).absolute().parents) if folder.is_dir()), Path("/"))
    return min(_MOST_STORAGE, shutil.disk_usage(parent).free // 2)


def _say(link: Link, why: str) -> None:
    if why:
        logger.warning("%s turned itself off: %s", link.value, why)
    else:
        logger.warning("%s is on again", link.value)
