"""What is kept, where pages may be below the device and groups are read in part; and a long life of all of it."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from quire.cache import RequestKV
from quire.cache.admission import Claim
from quire.errors import OutOfPages
from quire.offload.retention import Granted
from quire.settings.fields import WritePolicy
from quire.spec.events import Namespace
from quire.spec.group import ReachSpec
from quire.spec.ids import Ids, Tier
from tests.changes import TIERS, slow_unless_changed
from tests.clear import clear
from tests.offload.cached_bytes import ALICE, BOB, FULL, PAGE, STATE, WINDOW, asking, tokens_of
from tests.offload.tiered_cache import TieredCache

KEPT = tokens_of([1, 2, 3, 4])


def keep(tiered: TieredCache, tokens: Ids, namespace: Namespace = ALICE, **options: object) -> Granted:
    options = {"ttl_seconds": 1000.0} | options
    return tiered.kept.retain(tokens, namespace, **options)  # type: ignore[arg-type]


def flood(tiered: TieredCache, count: int = 12, num_pages: int = 6) -> None:
    for first in range(100, 100 + count * num_pages, num_pages):
        tiered.compute(tokens_of(range(first, first + num_pages)), BOB)
        tiered.drain()
    tiered.cache.audit()


def test_what_is_below_the_device_is_kept_there() -> None:
    tiered = TieredCache(num_pages=12, host=48)
    tiered.compute(KEPT)
    tiered.drain()
    tiered.compute(tokens_of(range(50, 60)), BOB)
    tiered.drain()
    granted = keep(tiered, KEPT)
    assert (granted.granted_tokens, granted.host_tokens, granted.reason) == (16, 8, "")
    assert tiered.kept.num_soft() == 2, "only what is on the device could be had there"
    flood(tiered, 2, 12)
    assert keep(tiered, KEPT).host_tokens == 16, "it gave way to running requests, and is on the host"
    assert tiered.compute(asking(KEPT)) == 16, "and comes from there"
    assert keep(tiered, KEPT).host_tokens == 0
    tiered.close()


@pytest.mark.parametrize("pin", [False, True])
def test_copies_on_the_host_of_what_is_kept_are_not_evicted(pin: bool) -> None:
    tiered = TieredCache(num_pages=12, host=20, context=6 * PAGE, stores=False)
    tiered.compute(KEPT)
    tiered.drain()
    flood(tiered, 2, 6)
    granted = keep(tiered, KEPT, pin=pin)
    assert (granted.granted_tokens, granted.host_tokens, granted.pinned) == (16, 16, pin)
    flood(tiered, 20, 6)
    assert keep(tiered, KEPT).host_tokens == 16
    assert tiered.compute(asking(KEPT)) == 16
    tiered.close()


def test_soft_retentions_give_way_before_a_request_waits_for_transfers() -> None:
    tiered = TieredCache(num_pages=12, host=24, seconds=5.0)
    tiered.compute(KEPT)
    tiered.drain()
    keep(tiered, KEPT)
    before = tiered.now
    kv = tiered.begin(tokens_of(range(50, 60)), BOB)
    hit = tiered.cache.match(tokens_of(range(70, 80)), BOB)
    assert tiered.cache.admission.why_not(Claim(hit, 12)) == "", "what is kept softly counts as available"
    assert "callers have pinned" not in str(tiered.cache.admission.why_not(Claim(hit, 13)))
    tiered.grow(kv, tokens_of(range(50, 60)))
    assert tiered.now == before and tiered.kept.totals.retentions_given_up == 1
    [left] = tiered.kept.listing().retentions
    assert left.tokens == 2 * PAGE, "the end of it went, as much as was missing"
    tiered.finish(kv)
    tiered.close()


def test_what_one_holds_itself_is_not_available_to_it() -> None:
    tiered = TieredCache(num_pages=12, host=24)
    tiered.compute(KEPT)
    tiered.drain()
    keep(tiered, KEPT)
    hit = tiered.cache.match(asking(KEPT), ALICE)
    assert hit.num_pages == 4
    assert tiered.cache.admission.why_not(Claim(hit, 12)) == ""
    assert tiered.cache.admission.why_not(Claim(hit, 13)) != ""
    tiered.close()


@pytest.mark.parametrize("other", [WINDOW, STATE, ReachSpec("chunk", 8)])
@pytest.mark.parametrize("pin", [False, True])
def test_what_a_request_needs_to_resume_is_kept_too(other: ReachSpec, pin: bool) -> None:
    """A group with few frames, which others need again and again: only those that are kept stay."""
    tiered = TieredCache(24, 2, reaches=(FULL, other), frames=(24, 6), context=12 * PAGE, stores=False)
    tiered.compute(KEPT)
    tiered.drain()
    granted = keep(tiered, KEPT, pin=pin)
    assert (granted.granted_tokens, granted.pinned) == (16, pin), granted
    assert len(tiered.cache.parts.holds.readers(1, Tier.DEVICE)) == len(tiered.cache.groups[1].reach.needed(4))
    tiered.cache.audit()
    for first in range(100, 160, 4):
        tiered.compute(tokens_of(range(first, first + 4)), BOB)
        tiered.drain()
        tiered.cache.audit()
    assert tiered.compute(asking(KEPT)) == 16
    tiered.drain()
    tiered.close()


@pytest.mark.parametrize("other", [WINDOW, STATE])
def test_single_frames_give_way_too(other: ReachSpec) -> None:
    tiered = TieredCache(24, 24, reaches=(FULL, other), frames=(24, 3), context=12 * PAGE, share=0.9, stores=False)
    for number in range(4):
        tiered.compute(tokens_of([number, 7]))
        tiered.drain()
        keep(tiered, tokens_of([number, 7]), priority=number)
        tiered.cache.audit()
    kvs = [tiered.begin(tokens_of([90 + number, 91]), BOB) for number in range(3 if other is STATE else 1)]
    for number, kv in enumerate(kvs):
        tiered.grow(kv, tokens_of([90 + number, 91]))
        tiered.cache.audit()
    for kv in kvs:
        tiered.finish(kv)
    assert tiered.kept.totals.retentions_given_up > 0
    tiered.close()


def test_a_request_takes_over_the_state_that_it_begins_on_though_it_is_kept() -> None:
    tiered = TieredCache(24, 1, reaches=(FULL, STATE), frames=(24, 1), context=12 * PAGE, stores=False, share=0.9)
    tiered.compute(KEPT)
    tiered.drain()
    assert keep(tiered, KEPT).granted_tokens == 16
    assert keep(tiered, KEPT, pin=True).reason.startswith("kept, but not pinned: what the longest request needs")
    hit = tiered.cache.match(asking(KEPT), ALICE)
    assert hit.num_pages == 4 and tiered.cache.admission.why_not(Claim(hit, 6)) == ""
    assert tiered.compute(asking(KEPT)) == 16
    assert tiered.kept.totals.retentions_given_up == 1
    tiered.close()


@pytest.mark.parametrize("other", [WINDOW, STATE])
def test_no_more_is_granted_than_every_group_can_resume_behind(other: ReachSpec) -> None:
    tiered = TieredCache(24, 1, reaches=(FULL, other), frames=(24, 4), context=12 * PAGE, stores=False)
    tiered.compute(KEPT[: 2 * PAGE])
    tiered.compute(KEPT)
    last = tiered.cache.tree.match(ALICE, KEPT).pages[3:]
    tiered.cache.groups[1].frames.drop(last)
    granted = keep(tiered, KEPT)
    assert granted.granted_tokens < 16 and "group 'g1' can resume no further" in granted.reason, granted
    assert tiered.cached(KEPT[: granted.granted_tokens]) == granted.granted_tokens
    tiered.drain()
    tiered.close()


def test_frames_that_are_on_the_host_only_are_kept_there() -> None:
    tiered = TieredCache(24, 24, reaches=(FULL, WINDOW), frames=(24, 4), context=12 * PAGE, stores=False)
    tiered.compute(KEPT)
    tiered.drain()
    flood(tiered, 3, 4)
    assert not tiered.cache.groups[1].table.present(tiered.cache.tree.match(ALICE, KEPT).pages[2:]).any()
    assert keep(tiered, KEPT).granted_tokens == 16
    assert len(tiered.cache.parts.holds.readers(1, Tier.HOST)) == 2
    tiered.cache.audit()
    flood(tiered, 10, 4)
    assert tiered.compute(asking(KEPT)) == 16
    tiered.close()


def test_what_turns_out_to_be_damaged_is_kept_no_longer() -> None:
    tiered = TieredCache(num_pages=12, host=24, stores=False)
    tiered.compute(KEPT)
    tiered.drain()
    tiered.compute(tokens_of(range(50, 62)), BOB)
    tiered.drain()
    assert keep(tiered, KEPT).host_tokens == 16
    tiers = tiered.tiers
    assert tiers is not None
    page = tiered.cache.tree.match(ALICE, KEPT).pages[1]
    tiered.copies.host[0][tiers.hosts[0].table.frame[page], -8] ^= 255
    assert tiered.compute(asking(KEPT)) < 16
    tiered.drain()
    assert tiered.kept.totals.retentions_lost == 1 and not tiers.damaged_paths
    assert tiered.compute(KEPT) < 16
    tiered.drain()
    assert tiered.cached(KEPT) == 16, "and can be computed anew"
    tiered.close()


# -- all of it, for long


class Life:
    """Random operations on a small cache with tiers. What is right is known from a plain account of it: what each
    retention was granted, and (by their bytes) which pages are from before a flush."""

    def __init__(self, seed: int) -> None:
        self.choices = choices = random.Random(seed)
        reaches = choices.choice([(FULL,), (FULL, WINDOW), (FULL, STATE), (FULL, WINDOW, STATE)])
        frames = (14, *[choices.choice([8, 14]) for _ in reaches[1:]])
        self.tiered = TieredCache(
            14,
            choices.choice([6, 16, 40]),
            reaches=reaches,
            frames=frames,
            context=6 * PAGE,
            share=choices.choice([0.3, 0.9]),
            seconds=choices.choice([0.0, 1.0]),
            write=choices.choice([WritePolicy.THROUGH, WritePolicy.SELECTIVE]),
            stores=choices.random() < 0.7,
            eviction=choices.choice(["lru", "density", "s3fifo"]),
            emit=choices.random() < 0.5,
            choose=choices.randrange if choices.random() < 0.3 else None,
        )
        self.kept: dict[str, tuple[Namespace, Ids, float, bool]] = {}
        self.running: list[tuple[RequestKV, Ids]] = []
        self.happened: Counter[str] = Counter()

    def prompt(self) -> Ids:
        return tokens_of([self.choices.randrange(3) for _ in range(self.choices.randint(1, 5))])

    def space(self) -> Namespace:
        return self.choices.choice([ALICE, ALICE, BOB])

    def act(self) -> None:
        actions = [self.compute, self.begin, self.end, self.keep, self.release, self.flush, self.epoch, self.wait]
        self.choices.choices([*actions, self.read_ahead, self.clear], [9, 3, 3, 8, 1, 0.6, 0.4, 5, 2, 0.2])[0]()

    def compute(self) -> None:
        try:
            found = self.tiered.compute(self.prompt(), self.space())
            self.happened["hit"] += found > 0
        except OutOfPages:
            assert self.running, "pins leave room for one request"

    def begin(self) -> None:
        if len(self.running) < 2:
            tokens = asking(self.prompt())
            try:
                self.running.append((self.tiered.begin(tokens, self.space()), tokens))
            except OutOfPages:
                assert self.running or self.kept

    def end(self) -> None:
        if self.running:
            kv, tokens = self.running.pop(0)
            try:
                self.tiered.grow(kv, tokens)
            except OutOfPages:
                self.tiered.finish(kv)
                return
            self.happened["ended after a flush"] += not kv.shares
            self.tiered.finish(kv, tokens)

    def keep(self) -> None:
        tokens, space, pin = self.prompt(), self.space(), self.choices.random() < 0.3
        found = self.tiered.cache.tree.match(space, tokens).num_pages * PAGE
        granted = keep(self.tiered, tokens, space, ttl_seconds=self.choices.choice([3.0, 900.0]), pin=pin)
        assert granted.granted_tokens <= found and granted.host_tokens <= granted.granted_tokens
        assert bool(granted.reason) == (granted.granted_tokens < len(tokens) or (pin and not granted.pinned))
        self.happened["kept"] += granted.granted_tokens > 0
        self.happened["kept below the device"] += granted.host_tokens > 0
        self.happened["pinned"] += granted.pinned
        if granted.retention_id:
            until = self.tiered.now + granted.expires_in_seconds
            self.kept[granted.retention_id] = (space, tokens[: granted.granted_tokens], until, granted.pinned)

    def release(self) -> None:
        if self.kept:
            name = self.choices.choice(list(self.kept))
            del self.kept[name]
            self.tiered.kept.release(name)

    def flush(self) -> None:
        space = self.choices.choice([ALICE, BOB, None])
        self.tiered.flush(space)
        self.kept = {key: kept for key, kept in self.kept.items() if space not in (None, kept[0])}
        self.check_flushed([ALICE, BOB] if space is None else [space])

    def epoch(self) -> None:
        self.tiered.set_epoch(self.tiered.epoch + 1)
        self.kept.clear()
        self.check_flushed([ALICE, BOB])

    def check_flushed(self, spaces: list[Namespace]) -> None:
        self.happened["flushed"] += 1
        self.happened["flushed what was held"] += bool(self.tiered.cache.tree.hidden_roots)
        self.happened["flushed while bytes moved"] += not self.tiered.mover.idle
        for space in spaces:
            for page in range(2):
                assert self.tiered.cached(tokens_of([page]), space) == 0

    def wait(self) -> None:
        if self.choices.random() < 0.5:
            self.tiered.advance()
        else:
            self.tiered.now += self.choices.choice([0.5, 2.0, 20.0])
            self.tiered.ahead.settle_moves()

    def read_ahead(self) -> None:
        self.happened["read ahead"] += self.tiered.fetch(self.prompt(), self.space()) > 0

    def clear(self) -> None:
        clear(self.tiered.cache)

    def check(self) -> None:
        """What is kept is there and can be begun on; nothing is kept that was not asked for."""
        tiered, retention = self.tiered, self.tiered.kept
        retention.expire()
        tiered.cache.audit()
        assert set(retention._by_id) <= set(self.kept)
        for name, (space, tokens, until, pinned) in list(self.kept.items()):
            kept = retention._by_id.get(name)
            length = kept.hold.path.num_pages * PAGE if kept is not None else 0
            if length < len(tokens):
                assert not pinned or until <= tiered.now, "a pin went before its time"
                self.happened["gave way"] += 1
            if not length:
                del self.kept[name]
                continue
            assert length <= len(tokens)
            self.kept[name] = (space, tokens[:length], until, pinned)
            assert tiered.cached(tokens[:length], space) == length
        assert retention.num_pages <= retention.budget

    def live(self, operations: int) -> None:
        for _ in range(operations):
            self.act()
            self.check()
        self.happened["loaded"] += self.tiered.tiers.counters.loaded_frames > 0  # type: ignore[union-attr]
        self.tiered.close()


@slow_unless_changed(*TIERS)
def test_long_lives() -> None:
    happened: Counter[str] = Counter()
    for seed in range(100):
        life = Life(seed)
        try:
            life.live(60)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        happened += life.happened
    assert len(happened) == 11 and min(happened.values()) >= 5, happened
    assert np.all([happened["flushed what was held"] > 20, happened["flushed while bytes moved"] > 20])
