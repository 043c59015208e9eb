"""A cache with a host and a store below it, on a mover whose time is only counted. Bytes are real, and checked."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

from quire.cache import KVCache, RequestKV
from quire.offload import Offloads, offload_of
from quire.offload.deletion import Flushed
from quire.offload.tier_settings import TierSettings
from quire.settings.fields import PrefetchPolicy, WritePolicy
from quire.spec.events import CacheEvent, Namespace
from quire.spec.group import ReachSpec
from quire.spec.ids import Ids
from quire.spec.speculation import SpeculativeConfig
from quire.testing.plans import small_plan
from quire.tiers.break_even import BreakEven
from quire.tiers.tombstones import tombstone_scope
from quire.tiers.transfer import LANES, Lane
from quire.tiers.virtual_mover import VirtualMover
from tests.fuzz.choosing_mover import ChoosingMover
from tests.offload.cached_bytes import ALICE, FULL, PAGE, CachedBytes, Marks
from tests.tiers.array_copies import ArrayCopies
from tests.tiers.scripted_store import ScriptedStore

WIDTH = 8  # bytes of a frame


class TieredCache(CachedBytes):
    """What is computed in a namespace is marked with how often that was flushed, and the epoch. Moves take `seconds`
    each, on every link; `now` stands still unless it is moved."""

    def __init__(
        self,
        num_pages: int = 12,
        host: int = 24,
        *,
        hosts: Sequence[int] = (),
        reaches: Sequence[ReachSpec] = (FULL,),
        frames: Sequence[int] = (),
        context: int = 0,
        share: float = 0.5,
        seconds: float = 1.0,
        write: WritePolicy = WritePolicy.THROUGH,
        store: ScriptedStore | None = None,
        stores: bool = True,
        eviction: str = "lru",
        emit: bool = False,
        choose: object = None,
        always: bool = True,
        prefetch: PrefetchPolicy = PrefetchPolicy.WAIT_COMPLETE,
        most_bytes: Mapping[Lane, int] | None = None,
        speculation: SpeculativeConfig | None = None,
    ) -> None:
        super().__init__()
        self.now = 0.0
        plan = small_plan(
            num_pages,
            PAGE,
            context=context,
            groups=tuple(f"g{index}" for index in range(len(reaches))),
            reaches=tuple(reaches),
            frames=tuple(frames),
        )
        self.plan = replace(plan, speculation=speculation)
        self.store = store if store is not None else ScriptedStore()
        most = max(self.plan.frames_of(index) for index in range(len(reaches)))
        self.copies = ArrayCopies([1] * len(reaches), [WIDTH] * len(reaches), num_device=most, num_host=host)
        self.latency = dict.fromkeys(LANES, seconds)
        self.mover: VirtualMover = ChoosingMover(
            self.copies,
            self.store if stores else None,
            seconds=lambda: self.now,
            bandwidths={},
            latency=self.latency,
            choose=choose,  # type: ignore[arg-type]
            most_bytes=most_bytes,
        )
        settings = TierSettings(
            host_frames=tuple(hosts) or (host,) * len(reaches),
            record_bytes=tuple(self.copies.sizes),
            mover=self.mover,
            break_even=BreakEven(lambda: self.now),
            write=write,
            always=always,
            stores=stores,
            prefetch=prefetch,
        )
        self.events: list[CacheEvent] = []
        self.cache = KVCache(
            self.plan,
            offload=Offloads(settings, share),
            seconds=lambda: self.now,
            model_identity=b"0",
            eviction=eviction,
            checkpoint_interval=PAGE,
            emit=self.events.append if emit else None,
        )
        assert (self.tiers is not None and self.prefetcher is not None) or not stores
        self.last = Flushed(flushed_tokens=0, held_tokens=0, num_retentions=0)
        self.flushes: dict[Namespace, int] = {}

    # -- time

    def advance(self) -> bool:
        """Go on to the end of the next move; False where none is under way."""
        end = self.mover.next_end
        if end is None:
            return False
        self.now = max(self.now, end)
        self.ahead.settle_moves()
        return True

    def arrive(self, kv: RequestKV) -> None:
        for move in kv.loads:
            while not move.done:
                assert self.advance()

    # -- bytes

    def read_frame(self, group: int, frame: int) -> bytes:
        return self.copies.device[group][0, frame].tobytes()

    def write_frame(self, group: int, frame: int, data: bytes) -> None:
        self.copies.device[group][0, frame] = memoryview(data)

    def content(self, group: int, mark: bytes, tokens: Ids) -> bytes:
        return hashlib.blake2b(bytes([group]) + mark + b"|" + tokens.tobytes(), digest_size=WIDTH).digest()

    def marks(self, namespace: Namespace) -> Marks:
        return (f"{namespace.salt} {self.flushes.get(namespace, 0)} {self.epoch}".encode(),)

    def note_flush(self, namespace: Namespace) -> None:
        self.flushes[namespace] = self.flushes.get(namespace, 0) + 1

    def damage(self, tokens: Ids, *places: int, namespace: Namespace = ALICE) -> None:
        """A byte of the host records of these pages of a prompt is another one."""
        pages = self.cache.tree.match(namespace, tokens).pages
        for place in places:
            self.copies.host[0][self.tiers.hosts[0].table.frame[pages[place]], self.copies.sizes[0] - 1] ^= 1

    def demote(self) -> None:
        """All that no lease holds leaves the device."""
        self.drain()
        self.cache.parts.reclaim([group.num_free + group.num_evictable for group in self.cache.groups], "", ())
        self.cache.audit()

    # -- keeping and forgetting

    def flush(self, namespace: Namespace | None) -> Flushed:
        self.last = super().flush(namespace)
        return self.last

    def flushed(self, namespace: Namespace | None, *, waits: bool) -> Flushed | None:
        """What the last flush did, in storage too."""
        return offload_of(self.cache).flushed(self.last, namespace, waits=waits)

    def state(self, namespace: Namespace | None) -> tuple[str, bool]:
        """Of what was flushed, in storage."""
        return self.tiers.deletion.flushed(namespace)

    def stored(self, namespace: Namespace = ALICE) -> int:
        """Records of a namespace in the store."""
        scope = self.tiers.names.scope(namespace)
        return sum(key.scope == scope and tombstone_scope(key) is None for key in self.store.visible)

    def close(self) -> None:
        """Everything comes back."""
        for kv in list(self.computed_as):
            self.finish(kv)
        self.drain()
        self.flush(None)
        self.drain()
        self.check_rest()
        tiers = self.tiers
        assert tiers is not None and self.cache.pages.num_free_pages == self.cache.pages.num_pages
        assert not self.cache.tree.roots
        for host in tiers.hosts:
            assert host.num_free + len(host.quarantined) == host.num_frames
        for group in self.cache.groups:
            assert group.num_free == group.num_frames
