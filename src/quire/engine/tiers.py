"""EngineTiers: host memory, a store and the mover between them, from an engine's settings."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch

from quire.cache.statistics import CacheCounters
from quire.counters import counter, gauge, labelled, plain
from quire.engine.config import STORE_DRAIN_S, EngineConfig
from quire.engine.device.cuda_memory import cuda_backing
from quire.engine.device.frame_staging import ComputeStream, FrameStaging
from quire.engine.device.runner import build_pools
from quire.engine.hisparse import HostedLatents, check_loss, hosted_latents
from quire.engine.host_memory import alone_on_this_host, host_memory
from quire.engine.planning import memory_plan
from quire.engine.tier_report import StoreCounters, store_counters, tiers_as_dict
from quire.engine.tier_storage import Storage, check_storage_size
from quire.engine.watchdog import LaneWatch
from quire.kernels.native.copies import native_copy_rows
from quire.loop import Part
from quire.memory.backing import backing_of
from quire.memory.frame_copies import CpuFrames, FrameCopies
from quire.memory.host_pool import HostPool, Progress
from quire.memory.pool import Pool
from quire.models.hf import LoadedModel
from quire.observe.history import Occupancy
from quire.offload import Offloads
from quire.offload.deletion import Flushed, Stored
from quire.offload.offloading import Tiered
from quire.offload.parts import TiersPart
from quire.offload.tier_settings import StoreHealth, TierCounters, TierSettings, hits_on
from quire.plan.budget import MemoryPlan
from quire.plan.host import host_budget, host_frames
from quire.plan.plan import Plan
from quire.prefix.hashing import layout_identity, scope_of
from quire.spec.events import Namespace
from quire.tiers.break_even import BreakEven
from quire.tiers.mover import ThreadMover
from quire.tiers.scope_facts import Facts, write_facts
from quire.tiers.store import Store, check_records
from quire.tiers.transfer import LANES, Lane
from quire.transfer.handshake import Identity

if TYPE_CHECKING:
    from quire.engine.core import EngineCore

logger = logging.getLogger(__name__)

_DELETE_S = 2.0  # for deletions while the engine closes; tombstones in the store name what is left


def build_memory(
    config: EngineConfig, plan: Plan, model: LoadedModel, progress: Progress | None = None
) -> tuple[tuple[Pool, ...], HostedLatents | None, HostPool | None]:
    """The pools of an engine; what is in host memory beside hot buffers, if the plan has any; and the host memory of
    tiers, if there are some, which has that too. `progress` is called with the touched bytes of host memory and the
    total. Raises what `build_pools` and `HostedLatents` raise, and HostMemoryError if the host has no room."""
    memory, device = memory_plan(config, plan), model.device
    check_loss(plan, model)
    with ExitStack() as undo:
        # Pools that need nothing of the host come first: they are refused before its memory is touched.
        shrinks = config.kv_memory_least is not None
        backs = cuda_backing if config.elastic_gpu else partial(backing_of, touched=False, shrinks=shrinks)
        pools = () if memory.groups_on_host else build_pools(memory, device, backs=backs)
        host = _tier_memory(config, memory, device, progress) if config.has_tiers else None
        if host is not None:
            undo.callback(host.close)
        latents = hosted_latents(memory, model, progress, host)
        for each in latents:
            undo.callback(each.close)
        if not pools:
            pools = build_pools(memory, device, {each.group: each.pool for each in latents}, backs=backs)
        undo.pop_all()
    return pools, next(iter(latents), None), host


def _tier_memory(config: EngineConfig, plan: MemoryPlan, device: torch.device, progress: Progress | None) -> HostPool:
    asked, pinned = config.host_memory if config.host_memory is not None else "auto", device.type == "cuda"
    with alone_on_this_host():
        memory = host_memory()
        untouched = 0 if pinned else plan.pool_bytes  # pools on a CPU, which allocate their memory later
        memory = replace(memory, available=max(0, memory.available - untouched))
        num_bytes = host_budget(asked, memory, device_bytes=plan.pool_bytes + plan.host_bytes)
        return HostPool(plan.groups, host_frames(plan, num_bytes), pinned=pinned, progress=progress)


def open_tiers_of(engine: EngineCore, storage: Storage, host: HostPool | None) -> EngineTiers | None:
    """The lower tiers of an engine that has host memory for them, else None."""
    if host is None:
        return None
    return EngineTiers(engine.config, engine.plan, engine.pools, storage, host, engine.compute)


def tier_parts(engine: EngineCore) -> Iterator[Part]:
    """The part for lower tiers; none for the device alone."""
    if engine.tiers is not None and isinstance(engine.offload, Tiered):
        below, cache = engine.offload.tiers.counters, engine.cache.counters
        yield TiersPart(engine.offload, engine.tiers.close, partial(engine.tiers.counters, cache, below))


def describe_in_store(engine: EngineCore, identity: Identity) -> None:
    """Say in the store what the pages of this engine are of. On a thread, because a store may be slow."""
    if engine.tiers is None or engine.tiers.store is None:
        return
    layouts = list(identity.layouts.values())
    scope = scope_of(Namespace(), layout_identity(bytes.fromhex(identity.model), layouts))
    facts = {
        "engine": "quire",
        "model": engine.config.model,
        "weights": identity.model[:32],
        "weights_epoch": identity.weights_epoch,
        "dtype": identity.kv_format,
        "page_size": identity.page_size,
        "rank": f"0/{identity.tensor_parallel}",
        "layout": sha256("".join(layouts).encode()).hexdigest()[:32],
    }
    Thread(target=_write_facts, args=(engine.tiers.store, scope, facts), name="quire-facts", daemon=True).start()


def _write_facts(store: Store, scope: bytes, facts: Facts) -> None:
    try:
        write_facts(store, scope, facts)
    except Exception as error:  # a store of the user's may raise; pages are found without facts
        logger.warning("the store was not told what its pages are of: %s", error)


def flushed_in_store(engine: EngineCore, done: Flushed, namespace: Namespace | None, *, waits: bool) -> Flushed | None:
    """`Offloading.flushed`. What the store knew of this engine's pages has gone with all of them, and is said again."""
    found = engine.offload.flushed(done, namespace, waits=waits)
    if namespace is None and found is not None and found.storage is Stored.GONE:
        describe_in_store(engine, engine.identity(engine.weights_epoch))
    return found


def offloads_of(engine: EngineCore) -> Offloads:
    """What the engine's cache has below the device."""
    settings = replace(engine.tiers.settings, peers=engine.transfer) if engine.tiers is not None else None
    return Offloads(settings, engine.config.retain_share)


def lower_frames(engine: EngineCore) -> Occupancy:
    """The frames of lower tiers, by tier."""
    tiers = engine.offload.tiers
    return {"host": {host.name: plain(host.counters()) for host in tiers.hosts}} if tiers is not None else {}


@dataclass(frozen=True, kw_only=True)
class LinkStates:
    """The tiers as they were resolved, and their links: bytes per second and seconds to the first byte, if known, why
    links are off, and for how many seconds lanes have been stuck."""

    resolved: dict[str, Any]
    device_hit_tokens: int = hits_on("device")
    host_bytes: int = gauge("Bytes of host memory.", name="tier_host_bytes")
    latency: dict[str, float | None]
    stuck: dict[str, float]
    bandwidth: dict[str, float | None] = gauge(
        "Measured bandwidth of a link, without the time to the first byte; absent while nothing was measured.",
        "link",
        start=dict,
        name="tier_bandwidth_bytes_per_second",
    )
    off: dict[str, str] = gauge(
        "1 while a link has turned itself off, because to compute is quicker.",
        "link",
        start=dict,
        name="tier_link_off",
        known=[link.name for link in LANES if link is not Lane.DELETE],
    )
    compute_rate: float | None = gauge(
        "Prompt tokens that steps compute a second, with which links are compared; absent while nothing was measured.",
        start=None,
        name="tier_compute_tokens_per_second",
    )
    turned_off: int = counter(
        "Times that a link turned itself off, trials that failed counted in.", name="tier_turned_off"
    )
    store: StoreCounters = labelled("", StoreCounters, start=StoreCounters)


class EngineTiers:
    """Owns `host`, the mover's threads and the store, until `close`. If it raises, the caller still owns the store.
    Copies run beside the steps on `compute`, if the device has streams."""

    def __init__(
        self,
        config: EngineConfig,
        plan: MemoryPlan,
        pools: Sequence[Pool],
        storage: Storage,
        host: HostPool,
        compute: ComputeStream | None = None,
    ) -> None:
        self.store, self.host, frames = storage.store, host, host.frames
        with ExitStack() as undo:
            undo.callback(self.host.close)
            check_storage_size(config, plan.groups, storage.num_bytes)
            record_bytes = tuple(self.host.format(group).num_bytes for group in range(len(frames)))
            if self.store is not None:
                check_records(self.store, max(record_bytes))
            sized = config.changed(storage_size=storage.num_bytes)
            self.resolved = tiers_as_dict(sized, plan, frames, record_bytes, self.host.num_bytes)
            of_frames = partial(CpuFrames, copy=native_copy_rows()) if compute is None else FrameStaging(compute).frames
            copies = FrameCopies(pools, self.host, of_frames, queues=compute is not None)
            self.mover = ThreadMover(copies, self.store)
            undo.pop_all()
        self._watch = LaneWatch([lane for lane in LANES if lane.carries], self._mark)
        self.break_even = BreakEven(time.monotonic, on_change=_log_link)
        self.settings = TierSettings(
            host_frames=frames,
            record_bytes=record_bytes,
            mover=self.mover,
            break_even=self.break_even,
            write=config.write_policy,
            always=bool(config.why_loads),
            stores=self.store is not None,
            prefetch=config.prefetch,
            prefetch_seconds=config.prefetch_seconds,
            health=StoreHealth(_log_store),
        )

    def _mark(self, lane: Lane) -> object | None:
        """Changes with each transfer that is submitted or ends; None while none is in flight."""
        num_bytes = self.mover.in_flight(lane)
        return (num_bytes, self.mover.rates[lane].mean) if num_bytes else None

    def counters(self, cache: CacheCounters, tiers: TierCounters) -> LinkStates:
        """Counters and gauges now, beside those of the cache and of its tiers."""
        rates = {link.name: self.mover.rates[link] for link in LANES if link is not Lane.DELETE}
        return LinkStates(
            resolved=self.resolved,
            device_hit_tokens=cache.hit_tokens - tiers.num_hits,
            host_bytes=self.host.num_bytes,
            bandwidth={name: rate.per_second for name, rate in rates.items()},
            latency={name: rate.start for name, rate in rates.items()},
            off={link.name: why for link in LANES if (why := self.break_even.why_off(link))},
            stuck={lane.name: seconds for lane, seconds in self._watch.stuck().items()},
            compute_rate=self.break_even.compute_rate,
            turned_off=self.break_even.turned_off_count,
            store=store_counters(self.store),
        )

    def close(
        self, settle: Callable[[], object] = lambda: False, end_deletions: Callable[[], None] = lambda: None
    ) -> None:
        """Wait for a while for transfers to the store, and stop. `settle` processes ended transfers, and
        `end_deletions` stops deletions, which may be long. If the store hangs in a call, it and the host memory that
        the call may write to stay until the process ends."""
        began = time.monotonic()
        while (settle() or not self.mover.idle) and time.monotonic() < began + STORE_DRAIN_S:
            if time.monotonic() > began + _DELETE_S:
                end_deletions()
            self.mover.wait(0.1)
        left = self.mover.close()
        settle()
        if left:
            logger.warning(
                "storage did not come back from %d calls (%s) while the engine closed, which waits no longer: what "
                "they would have stored is not. Look at the disk, the mount or the server",
                len(left),
                ", ".join(sorted({move.lane.name for move in left})),
            )
            return
        if self.store is not None:
            self.store.close()
        self.host.close()


def _log_store(kind: str, is_lost: bool) -> None:
    if not is_lost:
        logger.warning("storage %s again", "answers" if kind == "read" else "takes what is stored")
        return
    what, where, again = (
        ("does not answer: nothing is fetched, and prompts are computed", "server, disk or network", "asked")
        if kind == "read"
        else ("takes nothing: what is on the host waits for it", "room, server, disk or network", "tried")
    )
    logger.warning(
        "storage %s. quire_store_failures_total says what failed; look at its %s. It is %s again by itself",
        *(what, where, again),
    )


def _log_link(link: Lane, why: str) -> None:
    logger.warning("%s %s", link.name, f"turned itself off: {why}" if why else "is on again")
