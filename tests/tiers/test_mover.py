"""ThreadMover: real threads, held at a known place by the copies or the store; no test measures time."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from quire.errors import MoveFailed
from quire.tiers.mover import CLOSED, LEFT, ThreadMover
from quire.tiers.store import Answer, StoreKey
from quire.tiers.transfer import LANES, Endpoint, Lane, Transfer, Units
from tests.tiers.array_copies import HEADER, ArrayCopies, ids, page_key, units
from tests.tiers.scripted_store import ScriptedStore, WatchedStore

SCOPE = b"s" * 16
PUT = Lane("put", Endpoint.HOST, Endpoint.STORE)
GET = Lane("get", Endpoint.STORE, Endpoint.HOST)
MORE_LANES = (*LANES, PUT, GET)
LONG = 60.0  # seconds, after which a wait is a failure


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("quire-mover")] == []


@contextmanager
def mover_of(
    copies: ArrayCopies,
    store: ScriptedStore | None = None,
    *,
    threads: int = 2,
    most: dict[Lane, int] | None = None,
    piece_bytes: int = 1,
) -> Iterator[ThreadMover]:
    mover = ThreadMover(copies, store, threads={Endpoint.STORE: threads}, most_bytes=most, piece_bytes=piece_bytes)
    try:
        yield mover
    finally:
        for gate in (*copies.held.values(), *(store.gates.values() if store else ())):
            gate.release(1000)
        mover.close()


def pages(*numbers: int) -> tuple[Units, Units]:
    return units(0, numbers, numbers, numbers), units(1, numbers, numbers, numbers)


def move_of(copies: ArrayCopies, link: Lane, moved: Sequence[Units], deadline: float | None = None) -> Transfer:
    size = sum(copies.bytes_of(item.group) * len(item) for item in moved)
    return Transfer(link, moved, SCOPE, size if link.carries else 0, deadline_s=deadline)


def collect(mover: ThreadMover, count: int = 1) -> list[Transfer]:
    ended: list[Transfer] = []
    while len(ended) < count:
        assert mover.wait(LONG), "nothing ended"
        ended += mover.finished()
    return ended


def entered(source: ArrayCopies | ScriptedStore) -> None:
    assert source.entered.acquire(timeout=LONG), "no call came"


def test_round_trip() -> None:
    copies, store = ArrayCopies(), ScriptedStore()
    numbers = ids(1, 2, 3)
    content = [copies.fill(group, numbers, seed=group) for group in (0, 1)]
    with mover_of(copies, store) as mover:
        for link in (Lane.SAVE, Lane.ARCHIVE, Lane.FETCH, Lane.LOAD):
            move = move_of(copies, link, pages(1, 2, 3))
            assert mover.submit(move)
            assert mover.in_flight(link) == move.num_bytes
            assert collect(mover) == [move]
            assert (move.done, move.is_whole, move.error) == (True, True, "")
            assert move.defects == (("", "", ""),) * 2
            assert mover.in_flight(link) == 0
            assert (mover.rates[link].per_second or 0) > 0
            assert mover.idle
            for group in (0, 1):
                if link is Lane.SAVE:
                    copies.device[group][...] = 0
                elif link is Lane.ARCHIVE:
                    copies.host[group][...] = 0
        assert mover.finished() == []
        assert not mover.wait(0.0)
    for group in (0, 1):
        assert np.array_equal(copies.device[group][:, numbers], content[group])


def test_what_has_to_be_complete_has_ended() -> None:
    copies = ArrayCopies()
    with mover_of(copies) as mover:
        gate = copies.hold("to_host")
        first, second = (move_of(copies, Lane.SAVE, pages(number)) for number in (1, 2))
        assert mover.submit(first) and mover.submit(second)
        waits = threading.Thread(target=mover.complete, args=(second,))
        waits.start()
        assert copies.entered.acquire(timeout=LONG)
        assert waits.is_alive()
        gate.release(1000)
        waits.join(LONG)
        assert not waits.is_alive() and second.done
        mover.complete(second)  # which it is
        assert second in mover.finished()


def test_looking_needs_no_frames() -> None:
    copies, store = ArrayCopies(), ScriptedStore()
    store.visible[StoreKey(SCOPE, page_key(1), 0)] = b""
    with mover_of(copies, store) as mover:
        assert mover.submit(move_of(copies, Lane.LOOK, [units(0, [], [], [1, 2])]))
        assert collect(mover)[0].answers == ((Answer.HIT, Answer.MISS),)
        assert mover.rates[Lane.LOOK].per_second is None


def saved(*numbers: int) -> ArrayCopies:
    copies = ArrayCopies()
    for group in (0, 1):
        copies.fill(group, ids(*numbers), seed=group)
    with mover_of(copies) as mover:
        assert mover.submit(move_of(copies, Lane.SAVE, pages(*numbers)))
        assert collect(mover)[0].is_whole
    copies.log.clear()
    return copies


def test_a_step_waits_for_a_load_and_is_launched_when_it_is_checked() -> None:
    copies = saved(1, 2)
    content = [device.copy() for device in copies.device]
    for device in copies.device:
        device[...] = 0
    gate = copies.hold("to_device")
    arrived: list[bool] = []
    with mover_of(copies) as mover:
        move = move_of(copies, Lane.LOAD, pages(1, 2))
        assert mover.submit(move)
        assert mover.wait(LONG), "checked is news"
        assert (move.checked, move.done) == (True, False)
        assert mover.finished() == []

        def step() -> None:
            move.wait()
            pairs = zip(copies.device, content, strict=True)
            arrived.append(all(np.array_equal(found[:, 1:3], wanted[:, 1:3]) for found, wanted in pairs))

        thread = threading.Thread(target=step)
        thread.start()
        for _ in range(4):  # a record of each page in each group is a piece
            entered(copies)
            assert not arrived
            gate.release()
        thread.join(LONG)
        assert arrived == [True]
        assert collect(mover) == [move]
        move.wait()


def test_a_damaged_load_is_never_checked() -> None:
    copies = saved(1, 2)
    copies.host[0][2, HEADER] ^= 1
    with mover_of(copies) as mover:
        move = move_of(copies, Lane.LOAD, pages(1, 2))
        assert mover.submit(move)
        collect(mover)
        assert not move.checked
        assert move.defects == (("", "digest"), ("", "missing"))
        with pytest.raises(MoveFailed, match="digest"):
            move.wait()


def test_a_load_that_fails_on_its_way_is_told_to_steps() -> None:
    copies = saved(1)
    gate = copies.hold("to_device")
    with mover_of(copies) as mover:
        move = move_of(copies, Lane.LOAD, pages(1))
        assert mover.submit(move)
        assert mover.wait(LONG)
        assert move.checked
        entered(copies)
        copies.failing.add("to_device")
        gate.release()
        with pytest.raises(MoveFailed, match="to_device failed"):
            move.wait()
        assert collect(mover) == [move]
        assert not move.checked
        assert move.defects == (("failed",), ("failed",))


@pytest.mark.parametrize(
    ("link", "call"),
    [
        (Lane.SAVE, "to_host"),
        (Lane.SAVE, "seal"),
        (Lane.LOAD, "defects"),
        (Lane.ARCHIVE, "defects"),
        (Lane.ARCHIVE, "prepare"),
        (Lane.ARCHIVE, "put"),
        (Lane.ARCHIVE, "complete"),
        (Lane.FETCH, "get"),
        (Lane.LOOK, "exists"),
        (Lane.DELETE, "remove"),
    ],
)
def test_what_copies_or_the_store_raise_ends_that_move_alone(link: Lane, call: str) -> None:
    copies, store = saved(1), ScriptedStore()
    with mover_of(copies, store, threads=1) as mover:
        copies.failing.add(call)
        store.failing.add(call)
        move = move_of(copies, link, pages(1))
        assert mover.submit(move)
        assert collect(mover) == [move]
        assert f"{call} failed" in move.error
        assert not move.is_whole
        assert move.defects == (("failed",), ("failed",))
        assert mover.idle
        copies.failing.clear()
        store.failing.clear()
        assert mover.submit(move_of(copies, link, pages(2) if link is Lane.SAVE else pages(1)))
        assert collect(mover)[0].error == ""


def test_too_much_under_way_is_refused_and_nothing_taken() -> None:
    copies = ArrayCopies()
    gate = copies.hold("to_host")
    size = sum(copies.sizes)
    with mover_of(copies, most={Lane.SAVE: 2 * size}) as mover:
        first, second, third = (move_of(copies, Lane.SAVE, pages(number)) for number in (1, 2, 3))
        assert mover.submit(first)
        assert mover.submit(second)
        assert not mover.submit(third)
        assert mover.in_flight(Lane.SAVE) == 2 * size
        assert mover.submit(move_of(copies, Lane.LOAD, pages(9))), "another link has room"
        gate.release(100)
        assert {id(move) for move in collect(mover, 3)} >= {id(first), id(second)}
        assert mover.submit(third)
        assert collect(mover) == [third]


def test_a_move_larger_than_the_bound_goes_alone() -> None:
    copies = ArrayCopies()
    gate = copies.hold("to_host")
    with mover_of(copies, most={Lane.SAVE: 1}) as mover:
        assert mover.submit(move_of(copies, Lane.SAVE, pages(1, 2)))
        assert not mover.submit(move_of(copies, Lane.SAVE, pages(3)))
        gate.release(100)
        collect(mover)
        assert mover.idle


def test_a_load_goes_between_the_pieces_of_a_save() -> None:
    copies = saved(1, 2)
    gate = copies.hold("to_host")
    with mover_of(copies, piece_bytes=1) as mover:
        save, later = move_of(copies, Lane.SAVE, pages(4, 5, 6)), move_of(copies, Lane.SAVE, pages(7))
        load = move_of(copies, Lane.LOAD, pages(1, 2))
        assert mover.submit(save)
        assert mover.submit(later)
        entered(copies)  # the first piece is being copied
        assert mover.submit(load)
        gate.release(100)
        assert collect(mover, 3) == [load, save, later]
        assert copies.log[:2] == ["to_host", "seal"]
        assert copies.log[2:8] == ["defects"] * 2 + ["to_device"] * 4
        assert save.is_whole
        assert load.is_whole


def test_reading_does_not_wait_behind_writing() -> None:
    copies, store = saved(1, 2, 3), ScriptedStore()
    gate = store.hold("put")
    with mover_of(copies, store, threads=2) as mover:
        writes = [move_of(copies, Lane.ARCHIVE, pages(number)) for number in (1, 2)]
        for write in writes:
            assert mover.submit(write)
        entered(store)
        assert not store.entered.acquire(timeout=0.1), "both threads write"
        look = move_of(copies, Lane.LOOK, [units(0, [], [], [1])])
        assert mover.submit(look)
        assert collect(mover) == [look]
        assert look.answers == ((Answer.MISS,),)
        gate.release(100)
        assert collect(mover, 2) == writes


def test_what_reads_goes_before_what_waits_to_write() -> None:
    copies, store = saved(1, 2), ScriptedStore()
    gate = store.hold("put")
    with mover_of(copies, store, threads=1) as mover:
        moves = [move_of(copies, Lane.ARCHIVE, pages(number)) for number in (1, 2)]
        assert all(mover.submit(move) for move in moves)
        entered(store)
        fetch = move_of(copies, Lane.FETCH, pages(9))
        assert mover.submit(fetch)
        gate.release(100)
        assert collect(mover, 3) == [moves[0], fetch, moves[1]]


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("link", [Lane.ARCHIVE, Lane.DELETE])
def test_writing_goes_on_however_much_is_read(threads: int, link: Lane) -> None:
    """A request that reads ahead asks again as soon as it has an answer."""
    copies, store = saved(1), ScriptedStore()
    gate = store.hold("exists")
    with mover_of(copies, store, threads=threads) as mover:
        looks = [move_of(copies, Lane.LOOK, [units(0, [], [], [1])]) for _ in range(6)]
        assert all(mover.submit(look) for look in looks)
        write = move_of(copies, link, pages(1))
        assert mover.submit(write)
        for _ in range(30):
            gate.release()
            ended = collect(mover)
            if write in ended:
                break
            for _ in ended:
                assert mover.submit(move_of(copies, Lane.LOOK, [units(0, [], [], [1])]))
        else:
            raise AssertionError("thirty looks went before a write")
        assert not write.error


def test_deletion_keeps_its_place_among_writes() -> None:
    copies, store = saved(1, 2), ScriptedStore()
    gate = store.hold("complete")
    with mover_of(copies, store, threads=4) as mover:
        first = move_of(copies, Lane.ARCHIVE, pages(1))
        forget = move_of(copies, Lane.DELETE, pages(1))
        again = move_of(copies, Lane.ARCHIVE, pages(1, 2))
        for move in (first, forget, again):
            assert mover.submit(move)
        entered(store)
        assert not store.visible
        assert all(name != "remove" for name, _ in store.log)
        gate.release(100)
        assert collect(mover, 3) == [first, forget, again]
        assert again.is_whole
        assert {name.page for name in store.visible} == {page_key(1), page_key(2)}


def test_events_come_in_the_order_in_which_things_ended() -> None:
    copies, store = saved(1, 2), ScriptedStore()
    gate, host_gate = store.hold("get"), copies.hold("to_host")
    with mover_of(copies, store, threads=2) as mover:
        fetch, save = move_of(copies, Lane.FETCH, pages(1)), move_of(copies, Lane.SAVE, pages(5))
        assert mover.submit(fetch)
        assert mover.submit(save)
        entered(store)
        entered(copies)
        host_gate.release(100)
        assert collect(mover) == [save]
        look = move_of(copies, Lane.LOOK, pages(1))
        assert mover.submit(look)
        while not look.done:
            assert mover.wait(LONG)
        gate.release(100)
        while not fetch.done:
            assert mover.wait(LONG)
        # `wait` is true as long as anything has not been collected.
        assert collect(mover, 2) == [look, fetch]
        assert fetch.defects == (("missing",), ("missing",))


def test_looking_for_many_pages_takes_turns() -> None:
    """Two looks of many pages, and what is to be fetched and stored does not wait until they have ended."""
    copies, store = saved(1, 2), ScriptedStore()
    gate = store.hold("exists")
    many = units(0, [], [], range(1000, 2000))
    with mover_of(copies, store, threads=2) as mover:
        looks = [move_of(copies, Lane.LOOK, [many]) for _ in range(2)]
        for look in looks:
            assert mover.submit(look)
            entered(store)
        others = [move_of(copies, Lane.ARCHIVE, pages(1)), move_of(copies, Lane.FETCH, pages(2))]
        for move in others:
            assert mover.submit(move)
        gate.release(2)  # of sixteen times that the store is asked
        collected = collect(mover, 2)
        assert set(map(id, collected)) == set(map(id, others))
        assert not any(look.done for look in looks)
        gate.release(100)
        collect(mover, 2)


def test_closing_ends_what_runs_and_fails_what_waits() -> None:
    copies, store = saved(1, 2, 3), ScriptedStore()
    gate, load_gate = store.hold("put"), copies.hold("to_device")
    mover = ThreadMover(copies, store, threads={Endpoint.STORE: 1}, piece_bytes=1)
    running, waiting = move_of(copies, Lane.ARCHIVE, pages(1, 2, 3)), move_of(copies, Lane.FETCH, pages(9))
    load, save = move_of(copies, Lane.LOAD, pages(1)), move_of(copies, Lane.SAVE, pages(4))
    for move in (running, load):
        assert mover.submit(move)
    entered(store)
    entered(copies)
    for move in (waiting, save):
        assert mover.submit(move)
    closing = threading.Thread(target=mover.close)
    closing.start()
    while mover.submit(move_of(copies, Lane.LOOK, [])):
        mover.wait(0.001)  # until closing has begun
    gate.release(100)
    load_gate.release(100)
    closing.join()
    ended = mover.finished()
    assert {id(move) for move in ended} >= {id(move) for move in (running, waiting, load, save)}
    assert load.is_whole
    assert waiting.error == save.error == CLOSED
    assert running.defects == (("", "store", "store"),) * 2, "it ends with the piece it was at"
    assert store.prepared == {}
    assert mover.idle
    mover.close()
    assert not mover.submit(move_of(copies, Lane.LOAD, pages(1)))
    assert mover.finished() == []


@pytest.mark.parametrize("link", [Lane.LOOK, Lane.SAVE])
def test_closing_does_not_wait_for_ever(link: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.tiers.mover.CLOSE_S", 0.05)
    copies, store = ArrayCopies(), ScriptedStore()
    held: ArrayCopies | ScriptedStore = store if link is Lane.LOOK else copies
    gate = held.hold("exists" if link is Lane.LOOK else "to_host")
    mover = ThreadMover(copies, store)
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("quire-mover")]
    hung = move_of(copies, link, pages(1))
    assert mover.submit(hung)
    entered(held)
    assert mover.close() == (hung,)
    assert mover.finished() == [hung]
    assert hung.error == LEFT
    gate.release(100)
    for thread in threads:
        thread.join(LONG)
    assert mover.finished() == [], "it came to its end after all, and has been handed back"
    assert mover.close() == ()


def test_a_stopped_fetch_ends_early() -> None:
    copies, store = saved(1, 2, 3), ScriptedStore()
    with mover_of(copies, store) as mover:
        assert mover.submit(move_of(copies, Lane.ARCHIVE, pages(1, 2, 3)))
        collect(mover)
        gate = store.hold("get")
        move = move_of(copies, Lane.FETCH, pages(1, 2, 3))
        assert mover.submit(move)
        entered(store)
        move.stop()
        gate.release(100)
        assert collect(mover) == [move]
        assert move.defects == (("", "missing", "missing"),) * 2


class ThreadMoverMachine(RuleBasedStateMachine):
    """Anything submitted in any order, beside a model that knows only what was submitted: pages have one content for
    ever, so whatever arrives whole must be that."""

    MOST = 400

    def __init__(self) -> None:
        super().__init__()
        self.busy: set[int] = set()
        self.copies = ArrayCopies(num_device=12, num_host=12)
        self.store = WatchedStore(self.busy, most_bytes=900)
        self.mover = ThreadMover(
            self.copies,
            self.store,
            lanes=MORE_LANES,
            threads={Endpoint.STORE: 3},
            most_bytes=dict.fromkeys((lane for lane in MORE_LANES if lane.carries), self.MOST),
            piece_bytes=100,
        )
        self.content = [device.copy() for device in self.copies.device]
        for group in (0, 1):
            self.content[group][:, 1:] = self.copies.fill(group, ids(*range(1, 13)), seed=group)
        self.under_way: list[Transfer] = []
        self.on_device = set(range(1, 13))
        self.on_host: set[int] = set()
        self.may_stay_prepared = False  # a store whose `complete` raises does not keep its contract

    @rule(
        link=st.sampled_from([lane for lane in MORE_LANES if lane is not Lane.RECEIVE]),
        numbers=st.sets(st.integers(1, 12), min_size=1, max_size=5),
        deadline=st.sampled_from([None, None, 0.0, 0.001]),
    )
    def submit(self, link: Lane, numbers: set[int], deadline: float | None) -> None:
        wanted = numbers - self.busy
        if link is Lane.SAVE:
            wanted &= self.on_device
        elif link in (Lane.LOAD, Lane.ARCHIVE, PUT):
            wanted &= self.on_host
        if not wanted:
            return
        move = move_of(self.copies, link, pages(*sorted(wanted)), deadline)
        before = self.mover.in_flight(link)
        fits = before + move.num_bytes <= self.MOST or not any(other.lane is link for other in self.under_way)
        self.busy |= wanted  # before its threads begin
        assert self.mover.submit(move) == fits
        assert self.mover.in_flight(link) == before + move.num_bytes * fits
        if fits:
            self.under_way.append(move)
            if link is Lane.LOAD:
                self.on_device -= wanted
            elif link in (Lane.SAVE, Lane.FETCH, GET):
                self.on_host -= wanted
        else:
            self.busy -= wanted

    @rule(call=st.sampled_from(["to_host", "to_device", "get", "put", "complete", "prepare"]))
    def fail_from_now(self, call: str) -> None:
        for calls in (self.copies, self.store):
            calls.failing.add(call)
        self.may_stay_prepared |= call == "complete"

    @rule()
    def heal(self) -> None:
        for calls in (self.copies, self.store):
            calls.failing.clear()

    @rule(number=st.integers(1, 12))
    def lose_a_device_page(self, number: int) -> None:
        if number not in self.busy and number in self.on_host:
            self.on_device.discard(number)
            for device in self.copies.device:
                device[:, number] = 0

    @rule()
    def collect_some(self) -> None:
        if self.under_way and self.mover.wait(LONG):
            self._collect()

    def _collect(self) -> None:
        for move in self.mover.finished():
            self.under_way.remove(move)  # a ValueError: not submitted, or ended twice
            wanted = set(move.units[0].host.tolist())
            self.busy -= wanted
            assert move.done
            assert [len(found) for found in move.defects] == [len(item) for item in move.units]
            if move.lane is Lane.LOAD and move.is_whole:
                self.on_device |= wanted
            if move.lane is Lane.SAVE and move.is_whole:
                self.on_host |= wanted
            assert move.expired == ("deadline" in move.error)
            if move.lane in (Lane.FETCH, GET):
                good = [page for page, defect in zip(sorted(wanted), move.defects[0], strict=True) if not defect]
                assert move.defects[0].count("") == move.defects[1].count("")
                assert good == sorted(wanted)[: len(good)]
                self.on_host |= set(good)

    @invariant()
    def in_flight_adds_up(self) -> None:
        for link in MORE_LANES:
            assert self.mover.in_flight(link) == sum(move.num_bytes for move in self.under_way if move.lane is link)
        assert self.mover.idle == (not self.under_way)

    @invariant()
    def what_arrived_is_right(self) -> None:
        for group in (0, 1):
            frames = ids(*sorted(self.on_device - self.busy))
            assert np.array_equal(self.copies.device[group][:, frames], self.content[group][:, frames])

    def teardown(self) -> None:
        while self.under_way:
            assert self.mover.wait(LONG), "a move was lost"
            self._collect()
        self.mover.close()
        assert self.mover.finished() == []
        assert self.may_stay_prepared or self.store.prepared == {}
        assert self.store.wrong == []
        for name, record in self.store.visible.items():
            number = next(number for number in range(1, 13) if page_key(number) == name.page)
            payload = self.content[name.part][:, number].tobytes()
            assert record[HEADER:] == payload


TestThreadMover = ThreadMoverMachine.TestCase
TestThreadMover.settings = settings(max_examples=60, stateful_step_count=40)
