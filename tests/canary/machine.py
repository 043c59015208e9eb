"""CanaryMachine: a cache whose pool has real bytes, random damage to it, and plain sets of what must be found.

The model knows what the test has damaged and which pages are cached. It shares no code with the canary: no ticket, no
chain, no digest."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from quire.cache import KVCache
from quire.cache.request_kv import RequestKV
from quire.canary import Canary
from quire.canary.containment import Containment
from quire.canary.digest import Digests, FrameDigests, Reading
from quire.canary.finding import Finding, Kind
from quire.errors import OutOfPages
from quire.memory.pool import Pool
from quire.offload import Offloads, offload_of
from quire.spec.dtype import DType
from quire.spec.events import Namespace
from quire.spec.group import ReachSpec
from quire.spec.ids import Ids
from quire.spec.layout import Field, PageLayout
from quire.testing import small_plan
from quire.testing.choices import Choices

OPERATIONS = (
    *("begin", "begin", "compute", "compute", "compute", "compute", "finish", "retain", "evict", "flush"),
    *("together", "together", "flip", "neighbour", "skip", "misplace", "reuse", "look", "look"),
)
NAMESPACES = (Namespace(), Namespace(salt="a"), Namespace(salt="b"))


class _Request(NamedTuple):
    kv: RequestKV
    tokens: Ids
    name: str


class _Batch(NamedTuple):
    slots: Ids


class _Name(NamedTuple):
    request_id: str


@dataclass(frozen=True)
class _Late:
    """A reading that arrives some looks later, as from a device that is busy."""

    reading: Reading
    arrives: int
    machine: CanaryMachine
    seconds: float = 0.0

    @property
    def ready(self) -> bool:
        return self.machine.num_looks >= self.arrives

    def numpy(self) -> tuple[Digests, Digests]:
        return self.reading.numpy()


class CanaryMachine:
    """Requests compute pages; a second group has windows. With `everything`, each look sees the whole cache. With
    `late`, digests arrive up to so many looks later."""

    def __init__(self, choices: Choices, *, everything: bool = True, late: int = 0) -> None:
        assert not (everything and late)
        self.size = choices.one_of((1, 2, 4))
        self.everything = everything
        reaches = (
            (ReachSpec(), ReachSpec(kind="window", tokens=2 * self.size)) if choices.chance(50) else (ReachSpec(),)
        )
        num_pages, context, groups = choices.between(8, 20), 6 * self.size, ("full", "window")[: len(reaches)]
        plan = small_plan(num_pages, self.size, context=context, groups=groups, reaches=reaches)
        layout = PageLayout(self.size, (Field(name="k", shape=(8,), dtype=DType.UINT8, layers=(0, 1)),))
        self.now = 0.0
        self.plan = replace(plan, groups=tuple(replace(group, layout=layout) for group in plan.groups))
        self.cache = KVCache(self.plan, seconds=lambda: self.now, offload=Offloads(retain_share=0.4))
        self.pools = [Pool(layout, self.plan.frames_of(at)) for at in range(len(reaches))]
        share = math.inf if everything else 0.01
        self.canary = Canary(self.cache.parts, self.pools, share=share, seconds=lambda: self.now)
        self.num_looks = 0
        self.late = late
        for group in self.canary._groups if late else ():
            self._delay(group.digests, choices)
        self.containment = Containment(self.cache.parts)
        self.requests: list[_Request] = []
        self.written = 0
        self.num_named = 0
        self.damaged: dict[tuple[int, int], Kind] = {}  # (group, page): the canary has to find these
        self.sought = 0  # calls of `look` since the oldest of them
        self.happened: Counter[str] = Counter()

    def _delay(self, digests: FrameDigests, choices: Choices) -> None:
        real = digests.read
        digests.read = lambda frames: _Late(real(frames), self.num_looks + choices.between(0, self.late), self)  # type: ignore[method-assign,assignment,return-value]

    def step(self, choices: Choices) -> None:
        operation = choices.one_of(OPERATIONS)
        getattr(self, operation)(choices)
        self.happened[operation] += 1
        self.cache.audit()

    # -- requests

    def begin(self, choices: Choices) -> None:
        if len(self.requests) >= 4:
            return
        first = choices.below(3)
        tokens = np.array(
            [first, *(choices.below(2) for _ in range(choices.between(self.size, 5 * self.size)))], np.int32
        )
        kv = self.cache.begin(tokens, choices.one_of(NAMESPACES))
        self.num_named += 1
        self.requests.append(_Request(kv, tokens, f"r{self.num_named}"))
        self.canary.admitted(kv, tokens)

    def compute(self, choices: Choices, *, skip: int = -1, misplace: int = -1) -> Ids | None:
        """One request computes its next tokens. `skip` of the new slots is not written, `misplace` is planned to
        another slot of the request's own pages. Returns the pages that became cached with this."""
        found = [each for each in self.requests if self.cache.rows.committed(each.kv) < len(each.tokens)]
        if not found:
            return None
        kv, tokens, name = choices.one_of(found)
        start = self.cache.rows.committed(kv)
        end = min(len(tokens), start + choices.between(1, 2 * self.size))
        try:
            self.cache.extend([kv], [end - self.cache.rows.allocated(kv)])
        except OutOfPages:
            return None
        self._forget()
        batches = []
        for group in range(len(self.pools)):
            slots = self.cache.rows.slots([kv], [start], [end], group).copy()
            if misplace >= 0 and group == 0:
                slots[misplace % len(slots)] = 0  # the padding slot
            batches.append(_Batch(slots))
        self.canary.launched(
            np.arange(start, end), self.cache.rows.serials[[kv.row]], np.array([end - start]), [_Name(name)], batches
        )
        for pool, batch in zip(self.pools, batches, strict=True):
            for at, slot in enumerate(batch.slots.tolist()):
                if skip < 0 or at != skip % len(batch.slots) or pool is not self.pools[0]:
                    self._write(pool, slot)
        had = kv.lease.num_pages
        self.cache.commit(kv, tokens[:end])
        return self.cache.rows.page_ids(kv)[had : kv.lease.num_pages]

    def together(self, choices: Choices) -> None:
        """All requests compute up to the end of their page, in one step that settles as one."""
        going = [each for each in self.requests if self.cache.rows.committed(each.kv) < len(each.tokens)]
        kvs = [each.kv for each in going]
        starts = [self.cache.rows.committed(kv) for kv in kvs]
        ends = [
            min(len(each.tokens), (at // self.size + 1) * self.size) for each, at in zip(going, starts, strict=True)
        ]
        counts = [end - self.cache.rows.allocated(kv) for kv, end in zip(kvs, ends, strict=True)]
        if not going or min(counts) < 0:
            return
        try:
            self.cache.extend(kvs, counts)
        except OutOfPages:
            return
        self._forget()
        batches = [_Batch(self.cache.rows.slots(kvs, starts, ends, group).copy()) for group in range(len(self.pools))]
        self.canary.launched(
            np.concatenate([np.arange(start, end) for start, end in zip(starts, ends, strict=True)]),
            self.cache.rows.serials[[kv.row for kv in kvs]],
            np.array(ends) - np.array(starts),
            [_Name(each.name) for each in going],
            batches,
        )
        for pool, batch in zip(self.pools, batches, strict=True):
            for slot in batch.slots.tolist():
                self._write(pool, slot)
        self.happened["whole pages together"] += (
            sum(end % self.size == 0 < start for start, end in zip(starts, ends, strict=True)) > 1
        )
        self.cache.commit(kvs, [each.tokens[:end] for each, end in zip(going, ends, strict=True)])

    def _write(self, pool: Pool, slot: int) -> None:
        self.written += 1
        _entries(pool, slot)[:] = torch.tensor(list(self.written.to_bytes(8, "little")), dtype=torch.uint8)

    def finish(self, choices: Choices) -> None:
        if self.requests:
            kv, tokens, _ = self.requests.pop(choices.below(len(self.requests)))
            self.cache.finish(kv, tokens[: self.cache.rows.committed(kv)])
            self._forget()

    def retain(self, choices: Choices) -> None:
        """A caller retains the cached part of a prompt, for longer than the machine lives."""
        if self.requests:
            kv, tokens, _ = choices.one_of(self.requests)
            granted = offload_of(self.cache).retention.retain(
                tokens, kv.namespace, ttl_seconds=80_000.0, pin=choices.chance(50)
            )
            self.happened["retained"] += granted.granted_tokens > 0
            self.happened["pinned"] += granted.pinned

    def evict(self, choices: Choices) -> None:
        self.cache.evict(choices.between(1, 3))
        self._forget()

    def flush(self, choices: Choices) -> None:
        if choices.chance(20):
            pages, _ = self.cache.tree.flush(choices.one_of(NAMESPACES))
            self.cache.parts.free(pages)
            self._forget()

    # -- damage

    def flip(self, choices: Choices) -> None:
        self._damage(
            choices,
            lambda pool, slot: _entries(pool, slot)[choices.below(2), choices.below(8)].bitwise_xor_(
                1 << choices.below(8)
            ),
        )

    def neighbour(self, choices: Choices) -> None:
        self._damage(choices, self._write)

    def _damage(self, choices: Choices, change: Any) -> None:
        """Change the bytes of one slot of a page that the canary has had the time to stamp."""
        if not self.everything and self.damaged:
            return  # one at a time: its bound is measured
        self._rest(choices)
        group = choices.below(len(self.pools))
        frames = self.cache.groups[group].table.frame
        cached = [page for page in self._cached() if frames[page]]
        if cached:
            page = choices.one_of(cached)
            slot = int(frames[page]) * self.size + choices.below(self.size)
            change(self.pools[group], slot)
            self._add(group, page, Kind.BYTES)

    def skip(self, choices: Choices) -> None:
        """The device leaves out a write."""
        if self.everything or not self.damaged:
            self._compute_badly(choices, "skip")

    def misplace(self, choices: Choices) -> None:
        """A step is planned with a wrong slot."""
        if self.everything or not self.damaged:
            self._compute_badly(choices, "misplace")

    def _compute_badly(self, choices: Choices, how: str) -> None:
        self.look(choices)
        page_of: list[tuple[RequestKV, int]] = []
        for each in self.requests:  # only where the next token ends a page: then the page is cached with this step
            committed = self.cache.rows.committed(each.kv)
            if committed < len(each.tokens) and (committed + 1) % self.size == 0:
                page_of.append((each.kv, committed))
        if not page_of:
            return
        kv, committed = choices.one_of(page_of)
        before = self.requests
        self.requests = [each for each in before if each.kv is kv]
        one = Choices(lambda n: 0)  # one token
        pages = self.compute(one, **{how: 0})
        self.requests = before
        if pages is not None and len(pages):
            frame = self.cache.groups[0].table.frame
            duplicates = self._duplicates(kv, committed)
            if not duplicates:
                assert frame[pages[-1]]
                self._add(0, int(pages[-1]), Kind.UNWRITTEN if how == "skip" else Kind.WRONG_SLOT)

    def _duplicates(self, kv: RequestKV, committed: int) -> bool:
        """Whether the page that became cached is that of another request, which computed it before."""
        counters = self.cache.counters
        was, self._last_duplicates = getattr(self, "_last_duplicates", 0), counters.duplicate_pages
        return counters.duplicate_pages > was

    def reuse(self, choices: Choices) -> None:
        """A step is planned to write to a page that is cached."""
        if not self.everything and self.damaged:
            return
        self._rest(choices)
        frames = self.cache.groups[0].table.frame
        cached = self._cached()
        if not cached:
            return
        page = choices.one_of(cached)
        slot = np.array([int(frames[page]) * self.size], dtype=np.int32)
        batches = [_Batch(slot if at == 0 else np.zeros(1, np.int32)) for at in range(len(self.pools))]
        self.canary.launched(np.array([0]), np.array([10**6]), np.array([1]), [_Name("a stranger")], batches)
        self._write(self.pools[0], int(slot[0]))
        self._add(0, page, Kind.OVERWRITTEN)

    # -- what must be found

    def look(self, choices: Choices) -> None:
        """Findings are damage that was done; with everything looked at, all of it."""
        self._last_duplicates = self.cache.counters.duplicate_pages
        self.now += 1.0
        self.num_looks += 1
        found = self.canary.look()
        self.check(found)
        for finding in found:
            self.damaged.pop((finding.index, finding.page), None)
        self.contain(found)
        if self.everything:
            assert not self.damaged, f"not found: {self.damaged}"
        elif self.damaged:
            self.sought += 1
            assert self.sought <= self._bound(), f"not found after {self.sought} looks: {self.damaged}"

    def _bound(self) -> int:
        """Looks within which damage has to be found: a sweep, after what was begun of another one."""
        return (2 + 2 * self.plan.num_pages) * (1 + self.late)  # a sweep takes an edge at least each time

    def _rest(self, choices: Choices) -> None:
        """Until all cached pages must have a stamp."""
        for _ in range(1 if self.everything else self._bound()):
            self.look(choices)

    def check(self, found: list[Finding]) -> None:
        """Nothing is found that was not damaged."""
        wrong = {(each.index, each.page) for each in found} - self.damaged.keys()
        assert not wrong, f"found and not damaged: {wrong} of {[str(each) for each in found]}"
        for each in found:
            expected = self.damaged[each.index, each.page]
            kinds = {Kind.WRONG_SLOT: {Kind.WRONG_SLOT, Kind.UNWRITTEN}}.get(expected, {expected})
            assert each.kind in kinds, f"{each} is {expected}"
            assert each.good_step <= each.step

    def contain(self, found: list[Finding]) -> None:
        """As the engine does: requests that read damaged pages end, the pages leave the cache."""
        if not found:
            return
        pages = [each.page for each in found]
        self.containment.add(found)
        readers = self.containment.readers(pages)
        below = {page for each in self.requests for page in self._path(each.kv)} & set(pages)
        assert {id(kv) for kv in readers} == {id(each.kv) for each in self.requests if below & set(self._path(each.kv))}
        for each in [each for each in self.requests if each.kv in readers]:
            self.requests.remove(each)
            self.cache.finish(each.kv, None)
        self.containment.go_on()
        assert not set(pages) & set(self._cached()), "a damaged page is still cached"
        for group in self.cache.groups:
            frames = {each.frame for each in found if each.index == group.index}
            assert not frames or frames & set(group.quarantined), "damaged frames are used again at once"
        assert not self.containment.is_waiting
        self._forget()

    def _path(self, kv: RequestKV) -> list[int]:
        return self.cache.rows.page_ids(kv)[: kv.lease.num_pages].tolist()

    def _cached(self) -> list[int]:
        return sorted(page for node in self.cache.tree.nodes() for page in node.pages.tolist())

    def _add(self, group: int, page: int, kind: Kind) -> None:
        self.damaged[group, page] = kind
        self.sought = 0

    def _forget(self) -> None:
        """Damaged pages that have left the cache, or whose frames were freed, are not found any more."""
        cached = set(self._cached())
        self.damaged = {
            (group, page): kind
            for (group, page), kind in self.damaged.items()
            if page in cached and self.cache.groups[group].table.frame[page]
        }


def _entries(pool: Pool, slot: int) -> torch.Tensor:
    """What the layers keep of a token, `[layers, 8]`."""
    frame, offset = divmod(slot, pool.layout.page_size)
    return pool.tensors[0][1][:, frame, offset]


def run_canary(seed: int, num_steps: int, *, everything: bool = True, late: int = 0) -> Counter[str]:
    """Random operations; what happened. Raises AssertionError if the canary finds too much or too little."""
    choices = Choices.seeded(seed)
    machine = CanaryMachine(choices, everything=everything, late=late)
    for _ in range(num_steps):
        machine.step(choices)
    return machine.happened
