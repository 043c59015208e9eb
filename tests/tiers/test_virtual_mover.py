"""VirtualMover: time that is counted, ends in order, and bytes that come as late as they may."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from quire.errors import MoveFailed
from quire.tiers.mover import CLOSED
from quire.tiers.transfer import LANES, Endpoint, Lane, Transfer, Units
from quire.tiers.virtual_mover import VirtualMover
from tests.fuzz.choosing_mover import ChoosingMover
from tests.tiers.array_copies import HEADER, ArrayCopies, ids, units
from tests.tiers.scripted_store import WatchedStore

SCOPE = b"s" * 16
BANDWIDTHS = {Lane.SAVE: 1000.0, Lane.LOAD: 2000.0, Lane.ARCHIVE: 100.0, Lane.FETCH: 200.0}
PUT = Lane("put", Endpoint.HOST, Endpoint.STORE, deadline_s=1.0)
GET = Lane("get", Endpoint.STORE, Endpoint.HOST, deadline_s=0.6)
MORE_LANES = (*LANES, PUT, GET)
LATENCY = {PUT: 0.3, GET: 0.3, Lane.ARCHIVE: 0.5, Lane.FETCH: 0.5, Lane.LOOK: 0.25}


class World:
    """A clock, bytes, a store and the mover between them."""

    def __init__(
        self,
        choose: st.DataObject | None = None,
        most: dict[Lane, int] | None = None,
        store: WatchedStore | None = None,
    ) -> None:
        self.now = 0.0
        self.copies, self.store = ArrayCopies(), store or WatchedStore(set())
        self.content = [self.copies.fill(group, ids(*range(17)), seed=group) for group in (0, 1)]
        self.mover = ChoosingMover(
            self.copies,
            self.store,
            lanes=MORE_LANES,
            seconds=lambda: self.now,
            bandwidths=BANDWIDTHS,
            latency=LATENCY,
            choose=None if choose is None else lambda n: choose.draw(st.integers(0, n - 1)),
            most_bytes=most or {},
        )

    def move(self, link: Lane, *numbers: int) -> Transfer:
        moved = self.pages(numbers)
        size = sum(self.copies.bytes_of(item.group) * len(item) for item in moved)
        move = Transfer(link, moved, SCOPE, size if link.carries else 0)
        assert self.mover.submit(move)
        return move

    @staticmethod
    def pages(numbers: Sequence[int]) -> tuple[Units, Units]:
        return units(0, numbers, numbers, numbers), units(1, numbers, numbers, numbers)

    def run(self) -> list[Transfer]:
        """All moves, to their ends."""
        ended = []
        while (end := self.mover.next_end) is not None:
            self.now = max(self.now, end)
            ended += self.mover.finished()
        return ended + self.mover.finished()

    def whole(self, *numbers: int) -> bool:
        """Whether the device has these pages."""
        frames = ids(*numbers)
        pairs = zip(self.copies.device, self.content, strict=True)
        return all(np.array_equal(device[:, frames], content[:, frames]) for device, content in pairs)

    def wipe(self) -> None:
        for device in self.copies.device:
            device[...] = 0

    def load_what_was_saved(self, number: int) -> Transfer:
        """A load of a page that was saved, and that the device has lost."""
        self.move(Lane.SAVE, number)
        self.run()
        self.wipe()
        return self.move(Lane.LOAD, number)


def test_round_trip_in_the_time_that_bytes_take() -> None:
    world = World()
    for link in (Lane.SAVE, Lane.ARCHIVE, Lane.FETCH, Lane.LOAD):
        if link is Lane.FETCH:
            for rows in world.copies.host:
                rows[...] = 0
        began = world.now
        move = world.move(link, 1, 2, 3)
        took = LATENCY.get(link, 0.0) + move.num_bytes / BANDWIDTHS[link]
        assert world.mover.next_end == pytest.approx(began + took)
        assert world.mover.end_of(move) == world.mover.next_end
        assert world.run() == [move]
        assert move.is_whole
        assert move.seconds == pytest.approx(took)
        if link is Lane.SAVE:
            world.wipe()
    assert world.whole(1, 2, 3)
    assert world.mover.rates[Lane.LOAD].per_second == pytest.approx(BANDWIDTHS[Lane.LOAD])


def test_a_link_carries_one_move_after_the_other_and_links_run_beside_each_other() -> None:
    world = World()
    first, second, look = world.move(Lane.SAVE, 1), world.move(Lane.SAVE, 2, 3), world.move(Lane.LOOK, 1)
    each = first.num_bytes / BANDWIDTHS[Lane.SAVE]
    assert world.mover.end_of(second) == pytest.approx(3 * each)
    assert world.mover.in_flight(Lane.SAVE) == 3 * first.num_bytes
    assert world.mover.finished() == []
    assert not world.mover.wait(9.0)
    world.now = 1.0
    assert world.mover.wait(0.0)
    assert world.mover.finished() == [first, look, second]
    assert world.mover.idle
    with pytest.raises(KeyError):
        world.mover.end_of(first)


def test_bytes_come_at_the_end_and_not_before() -> None:
    world = World()
    load = world.load_what_was_saved(1)
    assert load.checked
    assert world.mover.wait(0.0)
    assert not world.mover.wait(0.0), "news is told once"
    world.now = world.mover.end_of(load) - 1e-6
    assert world.mover.finished() == []
    assert not any(device.any() for device in world.copies.device)
    save = world.move(Lane.SAVE, 5)
    for device in world.copies.device:
        device[:, 5] += 1  # reused before the save has ended
    world.run()
    assert save.is_whole
    assert world.whole(1)
    world.move(Lane.LOAD, 5)
    world.run()
    assert not world.whole(5), "a save copies what is there when it ends"


def test_a_step_that_waits_has_the_bytes_before_the_load_ends() -> None:
    world = World()
    load = world.load_what_was_saved(1)
    load.wait()
    assert world.whole(1)
    assert not load.done and world.mover.finished() == []
    assert world.run() == [load]
    load.wait()


def test_a_load_that_fails_while_a_request_waits() -> None:
    world = World()
    world.move(Lane.SAVE, 1)
    world.run()
    load = world.move(Lane.LOAD, 1)
    world.copies.failing.add("to_device")
    with pytest.raises(MoveFailed, match="to_device failed"):
        load.wait()
    assert world.run() == [load]
    assert not load.checked
    assert load.defects == (("failed",), ("failed",))


def test_of_a_damaged_load_what_is_before_it_is_copied_when_it_ends() -> None:
    world = World()
    world.move(Lane.SAVE, 1, 2)
    world.run()
    world.copies.host[1][2, HEADER] ^= 1
    load = world.move(Lane.LOAD, 1, 2)
    assert not load.checked and world.copies.calls("to_device") == 0
    assert world.run() == [load]
    assert load.defects == (("", "missing"), ("", "digest")) and not load.checked


def test_a_failure_is_that_moves_alone() -> None:
    world = World()
    world.copies.failing.add("to_host")
    first, second = world.move(Lane.SAVE, 1), world.move(Lane.SAVE, 2)
    world.now = world.mover.end_of(first)
    assert world.mover.finished() == [first]
    assert "to_host failed" in first.error
    world.copies.failing.clear()
    assert world.run() == [second]
    assert second.is_whole


def test_forgetting_is_in_line_with_archiving() -> None:
    world = World()
    world.move(Lane.SAVE, 1)
    world.run()
    archive, forget = world.move(Lane.ARCHIVE, 1), world.move(Lane.DELETE, 1)
    assert world.run() == [archive, forget]
    assert not world.store.visible


@pytest.mark.parametrize(("share", "kept"), [(0.0, 0), (0.6, 2), (1.0, 4)])
def test_a_stopped_fetch_keeps_what_had_come(share: float, kept: int) -> None:
    world = World()
    for link in (Lane.SAVE, Lane.ARCHIVE):
        world.move(link, 1, 2, 3, 4)
        world.run()
    fetch, began = world.move(Lane.FETCH, 1, 2, 3, 4), world.now
    world.now = began + share * (world.mover.end_of(fetch) - began)
    fetch.stop()
    assert world.mover.next_end == world.now
    assert world.mover.finished() == [fetch]
    assert fetch.defects == (("",) * kept + ("missing",) * (4 - kept),) * 2


def test_back_pressure_and_closing() -> None:
    size = sum(ArrayCopies().sizes)
    world = World(most={Lane.SAVE: 2 * size})
    first = world.move(Lane.SAVE, 1, 2)
    assert not world.mover.submit(Transfer(Lane.SAVE, world.pages([3]), SCOPE, size))
    world.mover.close()
    world.mover.close()
    assert first.error == CLOSED
    assert world.mover.finished() == [first]
    assert world.mover.idle
    assert not world.mover.submit(Transfer(Lane.SAVE, world.pages([3]), SCOPE, size))


def test_what_has_to_be_complete_is_and_its_link_is_busy_as_long_all_the_same() -> None:
    world = World()
    first, second, third = world.move(Lane.SAVE, 1), world.move(Lane.SAVE, 2, 3), world.move(Lane.SAVE, 4)
    ends = [world.mover.end_of(move) for move in (first, second, third)]
    world.mover.complete(second)
    assert first.done and second.done and not third.done
    assert world.now == 0.0
    assert world.mover.finished() == [first, second]
    assert world.mover.end_of(third) == pytest.approx(ends[2])
    world.mover.complete(second)  # which it is
    assert world.run() == [third]


def test_who_waits_moves_the_time_where_the_mover_may() -> None:
    world = World()

    def pass_until(time: float) -> None:
        world.now = max(world.now, time)

    world.mover = VirtualMover(
        world.copies,
        world.store,
        seconds=lambda: world.now,
        bandwidths=BANDWIDTHS,
        latency=LATENCY,
        pass_until=pass_until,
    )
    first, second = world.move(Lane.SAVE, 1), world.move(Lane.SAVE, 2, 3)
    ends = [world.mover.end_of(move) for move in (first, second)]
    assert not world.mover.wait(ends[0] / 2)
    assert world.now == pytest.approx(ends[0] / 2)
    assert world.mover.wait(9.0)
    assert world.now == pytest.approx(ends[0])
    world.mover.complete(second)
    assert world.now == pytest.approx(ends[1])
    assert world.mover.finished() == [first, second]
    assert not world.mover.wait(1.0)
    assert world.now == pytest.approx(ends[1] + 1.0)


class VirtualMoverMachine(RuleBasedStateMachine):
    """Any legal order of ends, beside a list of what was submitted. A page's bytes never change, so that all that
    arrives must be right; host frames are used by one transfer at a time, and a store that is late uses them too."""

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        self.busy: set[int] = set()
        self.world = World(data, store=WatchedStore(self.busy))
        self.mover = self.world.mover
        self.under_way: list[Transfer] = []
        self.on_host: set[int] = set()
        self.lost: set[int] = set()

    @rule(
        link=st.sampled_from([lane for lane in MORE_LANES if lane is not Lane.RECEIVE]),
        numbers=st.sets(st.integers(1, 9), min_size=1, max_size=4),
    )
    def submit(self, link: Lane, numbers: set[int]) -> None:
        wanted = sorted(numbers - self.busy)
        if link is Lane.SAVE:
            wanted = [page for page in wanted if page not in self.lost]
        elif link in (Lane.LOAD, Lane.ARCHIVE, PUT):
            wanted = [page for page in wanted if page in self.on_host]
        if not wanted:
            return
        self.under_way.append(self.world.move(link, *wanted))
        self.busy |= set(wanted)
        if link in (Lane.SAVE, Lane.FETCH, GET):
            self.on_host -= set(wanted)

    @rule(number=st.integers(1, 9))
    def lose_a_device_page(self, number: int) -> None:
        if number not in self.busy:
            self.lost.add(number)
            for device in self.world.copies.device:
                device[:, number] = 0

    @rule(seconds=st.sampled_from([0.0, 0.01, 0.1, 1.0]))
    def pass_time(self, seconds: float) -> None:
        self.world.now += seconds
        self.collect(self.mover.finished())

    @rule(picked=st.integers(0, 7))
    def stop_one(self, picked: int) -> None:
        if self.under_way:
            self.under_way[picked % len(self.under_way)].stop()

    @rule()
    def wait_as_a_step_does(self) -> None:
        for move in self.under_way:
            if move.lane is Lane.LOAD and move.checked:
                move.wait()
                assert self.world.whole(*move.units[0].host.tolist())

    def collect(self, ended: list[Transfer]) -> None:
        lanes: dict[object, list[int]] = {}
        for move in ended:
            if not move.expired:  # one that waits is given up before the one that it waits for has ended
                lanes.setdefault(move.lane.queue, []).append(self.under_way.index(move))
        assert all(order == sorted(order) for order in lanes.values()), "a link does not change the order"
        for move in ended:
            self.under_way.remove(move)
            assert move.expired == ("deadline" in move.error) == bool(move.error)
            assert not move.expired or (move.lane in (PUT, GET) and self.world.now >= move.expires_at)
            pages = move.units[0].host.tolist()
            self.busy -= set(pages)
            if move.lane is Lane.LOAD:
                assert move.is_whole
                assert self.world.whole(*pages)
                self.lost -= set(pages)
            if move.lane in (Lane.SAVE, Lane.FETCH, GET):
                self.on_host |= {page for page, defect in zip(pages, move.defects[0], strict=True) if not defect}

    @invariant()
    def in_flight_adds_up(self) -> None:
        if not hasattr(self, "mover"):
            return
        for link in MORE_LANES:
            assert self.mover.in_flight(link) == sum(move.num_bytes for move in self.under_way if move.lane is link)
        assert self.mover.idle == (not self.under_way) == (self.mover.next_end is None)

    def teardown(self) -> None:
        if hasattr(self, "mover"):
            self.mover.choose = None  # no more choices can be drawn here
            self.collect(self.world.run())
            assert not self.under_way, "a move was lost"
            assert self.world.store.prepared == {}
            assert self.world.store.wrong == []


TestVirtualMover = VirtualMoverMachine.TestCase
TestVirtualMover.settings = settings(max_examples=150, stateful_step_count=40)
