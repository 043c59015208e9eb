"""Lanes: the table, checks of what a peer has written, and what becomes of transfers whose endpoint hangs."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest

from quire.errors import InvalidInput, MoveFailed
from quire.tiers.executor import TransferExecutor
from quire.tiers.mover import LEFT, ThreadMover
from quire.tiers.store import StoreKey
from quire.tiers.transfer import LANES, Endpoint, Lane, Transfer, Units
from quire.tiers.virtual_mover import VirtualMover
from tests import waits
from tests.tiers.array_copies import ArrayCopies, ids, page_key, units
from tests.tiers.scripted_store import ScriptedStore

PUT = Lane("put", Endpoint.HOST, Endpoint.STORE, most_bytes=1 << 20, deadline_s=0.05)
GET = Lane("get", Endpoint.STORE, Endpoint.HOST, most_bytes=1 << 20, deadline_s=0.05)
MORE_LANES = (*LANES, PUT, GET)
SCOPE = b"s" * 16


def transfer_of(
    copies: ArrayCopies, lane: Lane, *numbers: int, shift: int = 0, deadline: float | None = None
) -> Transfer:
    host = [number + shift for number in numbers]
    moved: Sequence[Units] = [units(group, numbers, host, numbers) for group in (0, 1)]
    size = sum(copies.bytes_of(item.group) * len(item) for item in moved)
    return Transfer(lane, moved, SCOPE, size if lane.carries else 0, deadline_s=deadline)


def saved(*numbers: int) -> ArrayCopies:
    copies = ArrayCopies()
    for group in (0, 1):
        copies.fill(group, ids(*numbers), seed=group)
    for _ in TransferExecutor(copies, None).run(transfer_of(copies, Lane.SAVE, *numbers)):
        pass
    return copies


@contextmanager
def mover_of(copies: ArrayCopies, store: ScriptedStore) -> Iterator[ThreadMover]:
    mover = ThreadMover(copies, store, lanes=MORE_LANES, piece_bytes=1)
    try:
        yield mover
    finally:
        for gate in (*copies.held.values(), *store.gates.values()):
            gate.release(1000)
        mover.close()


def until(mover: ThreadMover, is_so: Callable[[], bool]) -> None:
    while not is_so():
        assert mover.wait(waits.SOON_S), "nothing happens"
        if mover._ended and not is_so():
            raise AssertionError("something else has ended")


def collect(mover: ThreadMover, *expected: Transfer) -> None:
    ended: list[Transfer] = []
    while len(ended) < len(expected):
        assert mover.wait(waits.SOON_S), "nothing ended"
        ended += mover.finished()
    assert set(map(id, ended)) == set(map(id, expected))


def entered(source: ArrayCopies | ScriptedStore) -> None:
    assert source.entered.acquire(timeout=waits.SOON_S), "the call did not begin"


# -- the table


@pytest.mark.parametrize(
    ("lane", "far", "inward", "queue"),
    [
        (Lane.SAVE, Endpoint.DEVICE, False, Lane.SAVE),
        (Lane.LOAD, Endpoint.DEVICE, True, Lane.LOAD),
        (Lane.ARCHIVE, Endpoint.STORE, False, Endpoint.STORE),
        (Lane.FETCH, Endpoint.STORE, True, Lane.FETCH),
        (Lane.LOOK, Endpoint.STORE, True, Lane.LOOK),
        (Lane.DELETE, Endpoint.STORE, False, Endpoint.STORE),
        (Lane.RECEIVE, Endpoint.PEER, True, Lane.RECEIVE),
    ],
)
def test_the_endpoints_say_whose_threads_which_side_and_which_order(
    lane: Lane, far: Endpoint, inward: bool, queue: Lane | Endpoint
) -> None:
    assert (lane.far, lane.is_inward, lane.queue) == (far, inward, queue)
    assert Endpoint.HOST in (lane.source, lane.target)


def test_names_that_users_see() -> None:
    assert [str(lane) for lane in LANES] == ["save", "load", "archive", "fetch", "look", "delete", "receive"]


# -- a peer


def test_what_a_peer_has_written_is_checked() -> None:
    copies = saved(1, 2, 3)
    copies.host[1][2, copies.sizes[1] - 1] ^= 1
    with mover_of(copies, ScriptedStore()) as mover:
        good, bad = transfer_of(copies, Lane.RECEIVE, 1), transfer_of(copies, Lane.RECEIVE, 1, 2, 3)
        assert mover.submit(good) and mover.submit(bad)
        collect(mover, good, bad)
    assert good.is_whole and good.moved_bytes == good.num_bytes
    assert bad.defects == (("", "missing", "missing"), ("", "digest", "missing"))


def test_without_a_store_there_is_nothing_to_put_into() -> None:
    with pytest.raises(InvalidInput, match="no storage tier"):
        list(TransferExecutor(saved(1), None).run(transfer_of(saved(1), PUT, 1)))


# -- deadlines


def test_a_hung_store_holds_its_own_threads_only() -> None:
    """Both of its threads hang. Everything else moves, and what hangs or waits has failed at its deadline."""
    copies, store = saved(1, 2, 3, 4), ScriptedStore()
    puts, gets = store.hold("prepare"), store.hold("get")
    rows = [host.copy() for host in copies.host]
    with mover_of(copies, store) as mover:
        put, queued = (transfer_of(copies, PUT, number) for number in (1, 2))
        get = transfer_of(copies, GET, 3, shift=7)
        store.visible[StoreKey(SCOPE, page_key(3), 0)] = rows[0][3, : copies.sizes[0]].tobytes()
        store.visible[StoreKey(SCOPE, page_key(3), 1)] = rows[1][3, : copies.sizes[1]].tobytes()
        for transfer in (put, get, queued):
            assert mover.submit(transfer)
        entered(store)
        entered(store)
        until(mover, lambda: put.expired and get.expired)
        until(mover, lambda: queued.done)
        assert mover.finished() == [queued], "what hangs is handed back while a call may touch its frames"
        for late in (put, get, queued):
            assert "did not end within its deadline of 0.05 s" in late.error and "the store hangs" in late.error
        assert not put.done and not get.done and not mover.idle
        assert mover.in_flight(PUT) == put.num_bytes and mover.in_flight(GET) == get.num_bytes
        for lane in (Lane.SAVE, Lane.LOAD, Lane.RECEIVE):
            other = transfer_of(copies, lane, 4)
            assert mover.submit(other), lane
            collect(mover, other)
            assert not other.error, lane
        puts.release(100)
        gets.release(100)
        collect(mover, put, get)
        assert put.defects == get.defects == (("failed",),) * 2
        assert np.array_equal(copies.host[0][10], rows[0][3]), "the call that came back late has written its frame"
        assert mover.idle and not store.prepared
        again = transfer_of(copies, PUT, 1, deadline=waits.SOON_S)
        assert mover.submit(again), "the lane works again"
        collect(mover, again)
        assert again.is_whole


def test_a_step_does_not_wait_longer_than_the_deadline_of_a_load() -> None:
    copies = saved(1)
    gate = copies.hold("to_device")
    raised: list[str] = []

    def step(load: Transfer) -> None:
        try:
            load.wait()
        except MoveFailed as failed:
            raised.append(str(failed))

    with mover_of(copies, ScriptedStore()) as mover:
        load = transfer_of(copies, Lane.LOAD, 1, deadline=0.05)
        assert mover.submit(load)
        entered(copies)
        thread = threading.Thread(target=step, args=(load,))
        thread.start()
        until(mover, lambda: load.expired)
        thread.join(waits.SOON_S)
        assert len(raised) == 1 and "the device hangs" in raised[0]
        assert not load.checked and not load.done and mover.finished() == []
        gate.release()
        collect(mover, load)
        assert copies.calls("to_device") == 1, "it goes on with the next piece, though it has failed"


def test_closing_does_not_wait_for_a_hung_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.tiers.mover.CLOSE_S", 0.05)
    copies, store = saved(1, 2), ScriptedStore()
    gate = store.hold("prepare")
    mover = ThreadMover(copies, store, lanes=MORE_LANES)
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("quire-mover")]
    hung, late = transfer_of(copies, PUT, 1, deadline=waits.SOON_S), transfer_of(copies, PUT, 2, deadline=waits.SOON_S)
    assert mover.submit(hung) and mover.submit(late)
    entered(store)
    assert mover.close() == (hung,)
    assert mover.finished() == [hung, late] and hung.error == LEFT
    gate.release(100)
    for thread in threads:
        thread.join(waits.SOON_S)


# -- in counted time


class World:
    """A clock and a virtual mover whose store takes `seconds` to answer."""

    def __init__(self, copies: ArrayCopies, seconds: float) -> None:
        self.now, self.copies, self.store = 0.0, copies, ScriptedStore()
        self.mover = VirtualMover(
            copies,
            self.store,
            lanes=MORE_LANES,
            seconds=lambda: self.now,
            bandwidths={},
            latency={PUT: seconds, GET: seconds, Lane.SAVE: 0.02, Lane.LOAD: 0.02},
        )

    def submit(self, lane: Lane, *numbers: int, shift: int = 0) -> Transfer:
        transfer = transfer_of(self.copies, lane, *numbers, shift=shift)
        assert self.mover.submit(transfer)
        return transfer

    def run_until(self, time: float) -> list[Transfer]:
        ended = []
        for _ in range(20):
            if (end := self.mover.next_end) is None or end > time:
                break
            self.now = max(self.now, end)
            ended += self.mover.finished()
        self.now = time
        return ended + self.mover.finished()


def test_a_slow_virtual_store_keeps_its_frames_behind_the_deadline() -> None:
    copies = saved(1, 2, 3)
    world = World(copies, 1.0)
    put, queued, get = world.submit(PUT, 1), world.submit(PUT, 2), world.submit(GET, 3, shift=7)
    for group in (0, 1):
        record = copies.host[group][3, : copies.sizes[group]].tobytes()
        world.store.visible[StoreKey(SCOPE, page_key(3), group)] = record
    save, load = world.submit(Lane.SAVE, 1), world.submit(Lane.LOAD, 2)
    assert world.mover.next_end == pytest.approx(0.02)
    assert world.run_until(0.04) == [save, load]
    assert world.mover.next_end == pytest.approx(0.05)
    assert world.run_until(0.06) == [queued], "what has begun is handed back at its deadline"
    assert put.expired and get.expired and not put.done and not get.done
    assert "deadline" in put.error and "deadline" in queued.error
    assert not copies.host[0][10].any()
    assert world.run_until(2.0) == [put, get] and world.mover.idle
    assert copies.host[0][10].any(), "a late call has written its frame"
    assert put.defects == get.defects == (("failed",),) * 2


def test_damage_that_a_late_call_has_found_keeps_its_name() -> None:
    copies = saved(1, 2)
    world = World(copies, 1.0)
    for group in (0, 1):
        for page in (1, 2):
            record = copies.host[group][page, : copies.sizes[group]].tobytes()
            world.store.visible[StoreKey(SCOPE, page_key(page), group)] = record
    world.store.spoil(StoreKey(SCOPE, page_key(2), 1))
    get = world.submit(GET, 1, 2, shift=7)
    assert world.run_until(2.0) == [get] and get.expired
    assert get.defects == (("failed", "failed"), ("failed", "digest"))


def test_a_virtual_store_that_hangs_ends_nothing_else() -> None:
    copies = saved(1, 2)
    world = World(copies, math.inf)
    put, queued, save = world.submit(PUT, 1), world.submit(PUT, 2), world.submit(Lane.SAVE, 2)
    assert world.run_until(100.0) == [save, queued]
    assert put.expired and not put.done and world.mover.next_end is None and not world.mover.idle
    world.mover.close()
    assert world.mover.finished() == [put]


def test_time_that_jumps_over_a_deadline_changes_nothing() -> None:
    copies = saved(1, 2)
    world = World(copies, 0.03)
    first, second, third = world.submit(PUT, 1), world.submit(PUT, 2), world.submit(PUT, 2)
    world.now = 9.0
    assert world.mover.finished() == [first, second, third]
    assert (first.error, second.expired, third.expired) == ("", True, True)
    assert third.seconds == 0.0 and second.seconds == pytest.approx(0.03)
