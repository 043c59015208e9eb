"""A cache over a host pool and a store, with a real mover: pools of torch, records, threads."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from quire.cache import KVCache, RequestKV
from quire.memory.frame_copies import FrameCopies
from quire.memory.host_pool import HostPool
from quire.memory.pool import Pool
from quire.offload import Offloads
from quire.offload.tier_settings import TierSettings
from quire.plan.budget import MemoryPlan
from quire.settings.fields import PrefetchPolicy, WritePolicy
from quire.spec.events import Namespace
from quire.spec.group import GroupSpec, ReachSpec
from quire.spec.ids import Ids
from quire.spec.layout import PER_PAGE, DType, Field, PageLayout
from quire.tiers.break_even import BreakEven
from quire.tiers.mover import ThreadMover
from quire.tiers.store import Store, StoreKey
from quire.tiers.transfer import Endpoint
from tests.offload.cached_bytes import ALICE, BOB, FULL, PAGE, STATE, WINDOW, CachedBytes, Marks

NAMESPACES = (ALICE, BOB, Namespace(adapter="alice"))
MODELS = ((FULL,), (FULL, WINDOW), (FULL, STATE), (WINDOW,), (FULL, WINDOW, STATE))
HANGS_S = 30.0
"""Nothing here takes so long, a server that does not answer included."""

_FIELDS = {
    "full": (
        Field(name="k", shape=(3, 300), dtype=DType.UINT8, layers=(0, 2)),
        Field(name="k_scale", shape=(2,), dtype=DType.FLOAT32, layers=(0, 2)),
    ),
    "window": (Field(name="k", shape=(640,), dtype=DType.UINT8, layers=(1,)),),
    "state": (Field(name="s", shape=(5001,), dtype=DType.UINT8, layers=(3, 4), per=PER_PAGE),),
}


@dataclass(slots=True)
class Generations:
    """How often a namespace was flushed, in each epoch: what was marked before `oldest` is nowhere any more, and what
    is computed now is marked with `newest`."""

    oldest: dict[str, int] = field(default_factory=dict)
    newest: dict[str, int] = field(default_factory=dict)

    def marks(self, name: str) -> Marks:
        """Of what may be found, the newest first."""
        newest = self.newest.get(name, 0)
        return tuple(f"{name} {at}".encode() for at in range(newest, self.oldest.get(name, 0) - 1, -1))


def name_of(epoch: int, namespace: Namespace) -> str:
    """What generations are counted of."""
    return f"{epoch}/{namespace.adapter}/{namespace.salt}"


def plan_of(reaches: Sequence[ReachSpec], num_pages: int = 14) -> MemoryPlan:
    """Pools of so many pages, and of few frames where groups are read in part."""
    return MemoryPlan(
        page_size=PAGE,
        groups=tuple(
            GroupSpec(name=f"{reach.kind}{at}", layout=PageLayout(PAGE, _FIELDS[reach.kind]), reach=reach)
            for at, reach in enumerate(reaches)
        ),
        frames=tuple(num_pages if reach.kind != "state" else 9 for reach in reaches),
        num_pages=num_pages,
        context=num_pages * PAGE,
        max_requests=4,
    )


class ThreadedCache(CachedBytes):
    """Owns all of it, the store too, until `close`."""

    def __init__(
        self,
        store: Store,
        reaches: Sequence[ReachSpec],
        *,
        write: WritePolicy = WritePolicy.THROUGH,
        prefetch: PrefetchPolicy = PrefetchPolicy.WAIT_COMPLETE,
        epoch: int = 0,
        generations: Generations | None = None,
        host: int = 24,
        threads: int = 2,
    ) -> None:
        super().__init__(NAMESPACES)
        self.store = store
        self.plan = plan_of(reaches)
        self.epoch = epoch
        self.generations = generations or Generations()
        self.pools = [Pool(g.layout, self.plan.frames_of(at)) for at, g in enumerate(self.plan.groups)]
        self.host = HostPool(self.plan.groups, [host] * len(reaches), threads=1)
        self.copies = FrameCopies(self.pools, self.host)
        self.mover: ThreadMover = ThreadMover(self.copies, store, threads={Endpoint.STORE: threads}, piece_bytes=20_000)
        settings = TierSettings(
            host_frames=self.host.frames,
            record_bytes=tuple(self.host.format(at).num_bytes for at in range(len(reaches))),
            mover=self.mover,
            break_even=BreakEven(lambda: 0.0),
            write=write,
            always=True,
            stores=True,
            prefetch=prefetch,
            prefetch_seconds=0.02,
        )
        self.cache = KVCache(
            self.plan,
            offload=Offloads(settings),
            model_identity=str(epoch).encode(),
            checkpoint_interval=PAGE,
            eviction="lru",
        )

    def advance(self) -> bool:
        if self.mover.idle:
            return self.ahead.settle_moves()
        assert self.mover.wait(HANGS_S), "something is under way and does not end"
        self.ahead.settle_moves()
        return True

    def arrive(self, kv: RequestKV) -> None:
        """As a step waits."""
        for move in kv.loads:
            move.wait()

    def read_frame(self, group: int, frame: int) -> bytes:
        parts = [tensor[:, frame].contiguous().view(torch.uint8) for _, tensor in self.pools[group].tensors]
        return b"".join(part.numpy().tobytes() for part in parts)

    def write_frame(self, group: int, frame: int, data: bytes) -> None:
        at = 0
        for _, tensor in self.pools[group].tensors:
            part = tensor[:, frame]
            size = part.numel() * part.element_size()
            values = np.frombuffer(data, dtype=np.uint8, count=size, offset=at).copy()
            part.copy_(torch.from_numpy(values).view(tensor.dtype).view(part.shape))
            at += size
        assert at == len(data)

    def content(self, group: int, mark: bytes, tokens: Ids) -> bytes:
        return content_of(self.plan, group, mark, tokens)

    def marks(self, namespace: Namespace) -> Marks:
        return self.generations.marks(name_of(self.epoch, namespace))

    def note_flush(self, namespace: Namespace) -> None:
        """From now on this cache itself may serve nothing from before, though the store may have it still."""
        name, found = name_of(self.epoch, namespace), self.generations
        found.newest[name] = found.oldest[name] = found.newest.get(name, 0) + 1

    def close(self) -> None:
        """Requests end, what is under way arrives, and nothing is held: then the threads end."""
        for kv in list(self.computed_as):
            self.finish(kv)
        self.drain()
        self.check_rest()
        self.mover.close()
        self.store.close()
        self.host.close()


def content_of(plan: MemoryPlan, group: int, mark: bytes, tokens: Ids) -> bytes:
    """What a frame holds behind these tokens: all of its bytes depend on all of them."""
    named = bytes([group]) + mark + b"|" + tokens.tobytes()
    return hashlib.shake_128(named).digest(plan.groups[group].layout.bytes_per_frame)


def random_prompts(seed: int, count: int = 10) -> list[Ids]:
    """Prompts of one to nine pages and a little more, many of which begin alike."""
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        pages = [2 * depth + (rng.random() < 0.3) for depth in range(rng.randrange(3, 10))]
        tokens = np.repeat(np.array(pages, dtype=np.int32), PAGE)
        found.append(np.append(tokens, np.full(rng.randrange(1, PAGE), 99, dtype=np.int32)).astype(np.int32))
    return found


def known_records(
    plan: MemoryPlan, prompts: Sequence[Ids], epochs: Sequence[int]
) -> Mapping[StoreKey, tuple[str, Ids]]:
    """All records that may be stored of these prompts: of which namespace and epoch, and the tokens up to there."""
    from quire.prefix.hashing import chain_pages, layout_identity, namespace_seed, scope_of

    found = {}
    for epoch in epochs:
        identity = layout_identity(str(epoch).encode(), [group.layout.fingerprint() for group in plan.groups])
        for namespace in NAMESPACES:
            for tokens in prompts:
                keys = chain_pages(namespace_seed(namespace, identity), tokens.tobytes(), 4 * PAGE)
                for at, key in enumerate(keys):
                    for part in range(len(plan.groups)):
                        named = StoreKey(scope_of(namespace, identity), key, part)
                        found[named] = name_of(epoch, namespace), tokens[: (at + 1) * PAGE]
    return found
