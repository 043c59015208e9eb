"""A cache with tiers whose frames hold bytes: whatever a request reads is what was computed for its tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from quire.cache import KVCache, RequestKV
from quire.cache.states import GroupCache, StatePieces
from quire.counters import plain
from quire.errors import OutOfPages
from quire.offload import offload_of
from quire.offload.deletion import Flushed
from quire.offload.prefetcher import Prefetcher
from quire.offload.retention import Retention
from quire.offload.tiering import Tiering
from quire.scheduler.prefetching import ReadAhead
from quire.spec.events import Namespace
from quire.spec.group import ReachSpec
from quire.spec.ids import Ids
from quire.tiers.mover import Mover

PAGE = 4
ALICE, BOB = Namespace(salt="alice"), Namespace(salt="bob")
FULL, WINDOW, STATE = ReachSpec(), ReachSpec("window", 6), ReachSpec("state")

Marks = tuple[bytes, ...]
"""What pages may be marked with. The first one marks what is computed now."""


def tokens_of(pages: Sequence[int]) -> Ids:
    return np.repeat(np.array(pages, dtype=np.int32), PAGE)


def asking(tokens: Ids) -> Ids:
    """The prompt that could reuse all of these."""
    return np.append(tokens, -1).astype(np.int32)


class CachedBytes(ABC):
    """Requests on `cache`, one step at a time. What is computed is marked with what a flush or new weights change, so
    that a page from before is known by its bytes. `hits` counts cached tokens that were read and found right."""

    cache: KVCache
    mover: Mover

    def __init__(self, namespaces: Sequence[Namespace] = (ALICE, BOB)) -> None:
        self.namespaces = tuple(namespaces)
        self.epoch = 0
        self.computed_as: dict[RequestKV, Marks] = {}
        self.hits = 0

    @abstractmethod
    def advance(self) -> bool:
        """Go on until something that is under way has changed; False where nothing is."""

    @abstractmethod
    def arrive(self, kv: RequestKV) -> None:
        """Wait for what a request that is ready is loaded from."""

    @abstractmethod
    def read_frame(self, group: int, frame: int) -> bytes:
        """What the device holds there."""

    @abstractmethod
    def write_frame(self, group: int, frame: int, data: bytes) -> None:
        """The device computes that."""

    @abstractmethod
    def content(self, group: int, mark: bytes, tokens: Ids) -> bytes:
        """What a frame of a group holds behind these tokens."""

    @abstractmethod
    def marks(self, namespace: Namespace) -> Marks:
        """Of what may be found of a namespace now."""

    @abstractmethod
    def note_flush(self, namespace: Namespace) -> None:
        """What is computed of a namespace from now on has another mark."""

    @property
    def ahead(self) -> ReadAhead[Any]:
        return offload_of(self.cache).ahead

    @property
    def tiers(self) -> Tiering:
        tiers = offload_of(self.cache).tiers
        assert tiers is not None
        return tiers

    @property
    def prefetcher(self) -> Prefetcher:
        prefetcher = offload_of(self.cache).prefetcher
        assert prefetcher is not None
        return prefetcher

    @property
    def kept(self) -> Retention:
        return offload_of(self.cache).retention

    def drain(self) -> None:
        """Until nothing is on its way any more."""
        self.ahead.settle_moves()
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
            while not kv.is_ready and not kv.has_failed:
                assert self.advance()
            if not kv.has_failed:
                break
            self.cache.finish(kv)
            self.ahead.settle_moves()
        self.arrive(kv)
        self.computed_as[kv] = self.marks(namespace)
        self.check(kv, tokens[: kv.num_cached])
        self.hits += kv.num_cached
        return kv

    def check(self, kv: RequestKV, tokens: Ids) -> None:
        """What a request reads of these tokens, which it has, is what was computed for them since the last flush."""
        num_pages = len(tokens) // PAGE
        pages = self.cache.rows.pages[kv.row, :num_pages]
        for group in self.cache.groups:
            if not group.reach.in_place:
                for at in group.reach.needed(num_pages):
                    self._check_frame(kv, group, int(group.table.frame[pages[at]]), tokens[: (at + 1) * PAGE])

    def grow(self, kv: RequestKV, tokens: Ids) -> None:
        """Compute the rest of `tokens`, as much at once as there are frames for. Raises OutOfPages."""
        while (start := self.cache.rows.allocated(kv)) < len(tokens):
            end = start + self.cache.admission.at_once(kv, len(tokens) - start)
            self._compute(kv, tokens[:end], start)
            if self.cache.admission.frees_early:
                self.cache.commit(kv, tokens[:end])

    def _compute(self, kv: RequestKV, tokens: Ids, start: int) -> None:
        while True:
            try:
                self.cache.extend([kv], len(tokens) - start)
                break
            except OutOfPages:
                if not self.advance():
                    raise
        self.check(kv, tokens[:start])
        fence = self.cache.open_fence()
        ends = np.array([len(tokens)], dtype=np.int64)
        pages, mark = self.cache.rows.pages[kv.row], self.computed_as[kv][0]
        for group in self.cache.groups:
            pieces = self.cache.launch(group.index, [kv], ends)
            if pieces is not None:
                self._carry(kv, group, pieces, tokens, start)
                continue
            for at in range(start // PAGE, len(tokens) // PAGE):
                data = self.content(group.index, mark, tokens[: (at + 1) * PAGE])
                self.write_frame(group.index, int(group.table.frame[pages[at]]), data)
        self.cache.close_fence(fence)

    def _carry(self, kv: RequestKV, group: GroupCache, pieces: StatePieces, tokens: Ids, start: int) -> None:
        """Each piece goes on from what the frame holds that it reads."""
        at = start
        for length, source, target in zip(pieces.lengths, pieces.sources, pieces.targets, strict=True):
            if at:
                self._check_frame(kv, group, int(source), tokens[:at])
            at += int(length)
            self.write_frame(group.index, int(target), self.content(group.index, self.computed_as[kv][0], tokens[:at]))
        assert at == len(tokens)

    def _check_frame(self, kv: RequestKV, group: GroupCache, frame: int, tokens: Ids) -> None:
        found = self.read_frame(group.index, frame)
        wanted = (self.content(group.index, mark, tokens) for mark in self.computed_as[kv])
        place = f"after {len(tokens)} tokens in group {group.index}"
        assert frame and found in wanted, f"frame {frame} is not what it should be {place}"

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
        prefetch = self.ahead.prefetch(asking(tokens), namespace)
        while prefetch is not None and self.ahead.is_awaited(prefetch):
            assert self.advance()
        found = self.cached(tokens, namespace)
        if prefetch is not None:
            self.ahead.stop_prefetch(prefetch)
        return found

    # -- forgetting

    def flush(self, namespace: Namespace | None) -> Flushed:
        for space in self.namespaces if namespace is None else (namespace,):
            self.note_flush(space)
        return offload_of(self.cache).flush(namespace)

    def set_epoch(self, epoch: int) -> Flushed:
        self.epoch = epoch
        return offload_of(self.cache).change_model(str(epoch).encode())

    # -- at the end

    def check_rest(self) -> None:
        """No request runs, no transfer is in flight, and nothing is held."""
        cache = self.cache
        cache.audit()
        tiers = offload_of(cache).tiers
        assert tiers is not None and not self.computed_as
        assert not tiers.moving and not tiers.archiver.moves and not tiers.damaged_paths and not cache.tree.hidden_roots
        assert offload_of(cache).prefetcher is None or not offload_of(cache).prefetcher.in_flight
        assert cache.tree.num_protected == 0
        idle = cache.tree.num_evictable + cache.tree.num_below
        assert cache.pages.num_free_pages + idle == cache.pages.num_pages
        for host in tiers.hosts:
            assert not host.still_read and host.table.num_pinned == 0
            frames = plain(host.counters())
            assert frames["moving"] == 0 and host.num_free + frames["cached"] + len(host.quarantined) == host.num_frames
        for name, frames in cache.statistics().frames.items():
            assert frames.private == frames.moving == 0, f"{name}: frames without a request"
