"""A cache with a host and a store below it, on a mover whose time is only counted. Bytes are real, and checked."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from quire.cache import KVCache, RequestKV
from quire.cache.flush import Flushed, change_model, flush, flushed
from quire.cache.tier_settings import PrefetchPolicy, TierSettings, WritePolicy
from quire.errors import OutOfPages
from quire.spec.events import CacheEvent, Namespace
from quire.spec.group import ReachSpec
from quire.spec.ids import Ids
from quire.testing.plans import small_plan
from quire.tiers.break_even import BreakEven
from quire.tiers.forgotten import marked_by
from quire.tiers.moves import Link
from quire.tiers.virtual_mover import VirtualMover
from tests.tiers.array_copies import ArrayCopies
from tests.tiers.dict_store import DictStore

PAGE = 4
WIDTH = 8  # bytes of a frame
ALICE, BOB = Namespace(salt="alice"), Namespace(salt="bob")
FULL, WINDOW, STATE = ReachSpec(), ReachSpec("window", 6), ReachSpec("state")


def tokens_of(pages: Sequence[int]) -> Ids:
    return np.repeat(np.array(pages, dtype=np.int32), PAGE)


def asking(tokens: Ids) -> Ids:
    """The prompt that could reuse all of these."""
    return np.append(tokens, -1).astype(np.int32)


class TieredCache:
    """What is computed in a namespace is marked with how often that was flushed, and the epoch, so that a page from
    before is known by its bytes. Moves take `seconds` each, on every link; `now` stands still unless it is moved."""

    def __init__(
        self,
        num_pages: int = 12,
        host: int = 24,
        *,
        reaches: Sequence[ReachSpec] = (FULL,),
        frames: Sequence[int] = (),
        context: int = 0,
        share: float = 0.5,
        seconds: float = 1.0,
        write: WritePolicy = WritePolicy.THROUGH,
        store: DictStore | None = None,
        stores: bool = True,
        eviction: str = "lru",
        emit: bool = False,
        choose: object = None,
    ) -> None:
        self.now = 0.0
        self.plan = small_plan(
            num_pages,
            PAGE,
            context=context,
            groups=tuple(f"g{index}" for index in range(len(reaches))),
            reaches=tuple(reaches),
            frames=tuple(frames),
        )
        self.store = store if store is not None else DictStore()
        most = max(self.plan.frames_of(index) for index in range(len(reaches)))
        owned = [(0,)] * len(reaches)
        self.copies = ArrayCopies(owned, [WIDTH] * len(reaches), num_device=most, num_host=host)
        self.mover = VirtualMover(
            self.copies,
            self.store if stores else None,
            seconds=lambda: self.now,
            bandwidths={},
            latency=dict.fromkeys(Link, seconds),
            choose=choose,  # type: ignore[arg-type]
        )
        settings = TierSettings(
            host_frames=(host,) * len(reaches),
            record_bytes=tuple(self.copies.sizes),
            mover=self.mover,
            break_even=BreakEven(lambda: self.now),
            write=write,
            always=True,
            stores=stores,
            prefetch=PrefetchPolicy.WAIT_COMPLETE,
        )
        self.events: list[CacheEvent] = []
        self.cache = KVCache(
            self.plan,
            tiers=settings,
            retain_share=share,
            seconds=lambda: self.now,
            model_identity=b"0",
            eviction=eviction,
            checkpoint_interval=PAGE,
            emit=self.events.append if emit else None,
        )
        assert (self.cache.tiers is not None and self.cache.prefetcher is not None) or not stores
        self.epoch = 0
        self.last = Flushed(flushed_tokens=0, held_tokens=0, num_retentions=0)
        self.flushes: dict[Namespace, int] = {}
        self.computed_as: dict[RequestKV, bytes] = {}
        self.hits = 0

    # -- time

    def advance(self) -> bool:
        """Go on to the end of the next move; False where none is under way."""
        end = self.mover.next_end
        if end is None:
            return False
        self.now = max(self.now, end)
        self.cache.settle_moves()
        return True

    def drain(self) -> None:
        """Until nothing is on its way any more."""
        self.cache.settle_moves()
        while self.advance():
            pass
        assert self.mover.idle

    # -- requests

    def begin(self, tokens: Ids, namespace: Namespace = ALICE) -> RequestKV:
        """Open a request whose prefix is there: what it begins on is checked, byte by byte. Raises OutOfPages."""
        while True:
            try:
                kv = self.cache.begin(tokens, namespace)
            except OutOfPages:
                if not self.advance():
                    raise
                continue
            while not self.cache.is_ready(kv) and not self.cache.has_failed(kv):
                assert self.advance()
            if not self.cache.has_failed(kv):
                break
            self.cache.finish(kv)
        for move in kv.loads:
            while not move.done:
                assert self.advance()
        self.computed_as[kv] = self.mark(namespace)
        self.check(kv, tokens)
        self.hits += kv.num_cached
        return kv

    def check(self, kv: RequestKV, tokens: Ids) -> None:
        """What it reads of its prefix is what was computed for it, since the last flush."""
        num_pages = kv.num_cached // PAGE
        pages = self.cache._rows[kv.row, :num_pages]
        for group in self.cache.groups:
            if not group.reach.carried:
                for at in group.reach.needed(num_pages):
                    frame = int(group.frames.column[pages[at]])
                    found = self.copies.device[group.index][0, frame].tobytes()
                    wanted = content(group.index, self.computed_as[kv], tokens[: (at + 1) * PAGE])
                    assert frame and found == wanted, f"page {at} of group {group.index} is not what it should be"

    def grow(self, kv: RequestKV, tokens: Ids) -> None:
        """Compute the rest of `tokens`, as much at once as there are frames for. Raises OutOfPages."""
        while (start := self.cache.allocated(kv)) < len(tokens):
            end = start + self.cache.at_once(kv, len(tokens) - start)
            self._compute(kv, tokens[:end], start)
            if self.cache.gives_back_early:
                self.cache.commit(kv, tokens[:end])

    def _compute(self, kv: RequestKV, tokens: Ids, start: int) -> None:
        while True:
            try:
                self.cache.extend([kv], len(tokens) - start)
                break
            except OutOfPages:
                if not self.advance():
                    raise
        fence = self.cache.open_fence()
        ends = np.array([len(tokens)], dtype=np.int64)
        for group in self.cache.groups:
            self.cache.launch(group.index, [kv], ends)
        self.cache.close_fence(fence)
        pages = self.cache._rows[kv.row]
        for group in self.cache.groups:
            if not group.reach.carried:
                for at in range(start // PAGE, len(tokens) // PAGE):
                    frame = group.frames.column[pages[at]]
                    data = content(group.index, self.computed_as[kv], tokens[: (at + 1) * PAGE])
                    self.copies.device[group.index][0, frame] = np.frombuffer(data, dtype=np.uint8)

    def finish(self, kv: RequestKV, tokens: Ids | None = None) -> None:
        self.cache.finish(kv, tokens)
        del self.computed_as[kv]

    def compute(self, tokens: Ids, namespace: Namespace = ALICE) -> int:
        """Run a prompt to its end; returns how many of its tokens were cached. Raises OutOfPages."""
        kv = self.begin(tokens, namespace)
        found = kv.num_cached
        try:
            self.grow(kv, tokens)
        except OutOfPages:
            self.finish(kv)
            raise
        self.finish(kv, tokens)
        return found

    def cached(self, tokens: Ids, namespace: Namespace = ALICE) -> int:
        """How many of its tokens a request could begin on, in any tier but the store."""
        return self.cache.match(asking(tokens), namespace).num_tokens

    def fetch(self, tokens: Ids, namespace: Namespace = ALICE) -> int:
        """Read what is stored of a prompt ahead, to the end; returns how much of it can be had then."""
        prefetch = self.cache.prefetch(asking(tokens), namespace)
        while prefetch is not None and self.cache.is_awaited(prefetch):
            assert self.advance()
        return self.cached(tokens, namespace)

    # -- keeping and forgetting

    def flush(self, namespace: Namespace | None) -> Flushed:
        for space in (ALICE, BOB) if namespace is None else (namespace,):
            self.flushes[space] = self.flushes.get(space, 0) + 1
        self.last = flush(self.cache, namespace)
        return self.last

    def flushed(self, namespace: Namespace | None, *, waits: bool) -> Flushed | None:
        """What the last flush did, in storage too."""
        return flushed(self.cache, self.last, namespace, waits=waits)

    def state(self, namespace: Namespace | None) -> tuple[str, bool]:
        """Of what was flushed, in storage."""
        assert self.cache.tiers is not None
        return self.cache.tiers.stored_state(namespace)

    def set_epoch(self, epoch: int) -> Flushed:
        self.epoch = epoch
        return change_model(self.cache, str(epoch).encode())

    def mark(self, namespace: Namespace) -> bytes:
        """What tells pages that are computed now from those that were flushed."""
        return f"{namespace.salt} {self.flushes.get(namespace, 0)} {self.epoch}".encode()

    def stored(self, namespace: Namespace = ALICE) -> int:
        """Records of a namespace in the store."""
        assert self.cache.tiers is not None
        scope = self.cache.tiers.scope(namespace)
        return sum(key.scope == scope and marked_by(key) is None for key in self.store.visible)

    def close(self) -> None:
        """Everything comes back."""
        for kv in list(self.computed_as):
            self.finish(kv)
        self.drain()
        self.flush(None)
        self.drain()
        self.cache.audit()
        tiers = self.cache.tiers
        assert tiers is not None and self.cache.num_free_pages == self.cache.pages.num_pages
        assert not self.cache.tree.orphans and not self.cache.tree.roots() and not tiers.condemned
        for host in tiers.hosts:
            assert host.num_free + host.num_quarantined == host.num_frames
        for group in self.cache.groups:
            assert group.num_free == group.num_frames


def content(group: int, mark: bytes, tokens: Ids) -> bytes:
    """What a page's frame holds in a group."""
    return hashlib.blake2b(bytes([group]) + mark + b"|" + tokens.tobytes(), digest_size=WIDTH).digest()
