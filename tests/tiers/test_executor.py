"""TransferExecutor: the laws of moving, one at a time, with no thread about."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import InvalidInput, MoveFailed, StoreError
from quire.spec.ids import Ids
from quire.tiers.executor import TransferExecutor
from quire.tiers.store import Answer, Record, StoreKey
from quire.tiers.tombstones import tombstone_of
from quire.tiers.transfer import LANES, Lane, Transfer, Units
from tests.tiers.array_copies import HEADER, ArrayCopies, ids, page_key, units
from tests.tiers.scripted_store import ScriptedStore

SCOPE = b"s" * 16
SMALL = 2 * 64  # bytes of a piece: two or three pages


def key(page: int, group: int) -> StoreKey:
    return StoreKey(SCOPE, page_key(page), group)


def run(
    copies: ArrayCopies, store: ScriptedStore | None, link: Lane, *moved: Units, piece_bytes: int = SMALL
) -> Transfer:
    size = sum(copies.bytes_of(item.group) * len(item) for item in moved)
    move = Transfer(link, moved, SCOPE, size)
    for _ in TransferExecutor(copies, store, piece_bytes=piece_bytes).run(move):
        pass
    move.end()
    return move


def both(numbers: Sequence[int], *, shift: int = 0) -> tuple[Units, Units]:
    """Pages 1.. in both groups: device frame n, host frame n + shift."""
    host = [number + shift for number in numbers]
    return units(0, numbers, host, numbers), units(1, numbers, host, numbers)


def saved(numbers: Sequence[int], copies: ArrayCopies | None = None) -> ArrayCopies:
    copies = copies or ArrayCopies()
    for group in (0, 1):
        copies.fill(group, ids(*numbers), seed=group)
    run(copies, None, Lane.SAVE, *both(numbers))
    return copies


def test_bytes_go_round_by_device_host_and_store() -> None:
    copies, store, numbers = ArrayCopies(), ScriptedStore(), [1, 2, 3, 4, 5]
    content = [copies.fill(group, ids(*numbers), seed=group) for group in (0, 1)]
    assert run(copies, store, Lane.SAVE, *both(numbers)).is_whole
    assert run(copies, store, Lane.ARCHIVE, *both(numbers)).is_whole
    assert set(store.visible) == {key(page, group) for page in numbers for group in (0, 1)}
    for rows in (*copies.host, *copies.device):
        rows[...] = 255
    assert run(copies, store, Lane.FETCH, *both(numbers, shift=7)).is_whole
    move = run(copies, store, Lane.LOAD, *both(numbers, shift=7))
    assert move.is_whole
    assert move.moved_bytes == move.num_bytes == 5 * sum(copies.sizes)
    for group in (0, 1):
        assert np.array_equal(copies.device[group][:, ids(*numbers)], content[group])
        assert (copies.device[group][:, ids(0, 6, 7)] == 255).all(), "a frame that was not named was written"
        assert (copies.host[group][:, copies.sizes[group] :] == 255).all(), "written behind the record"


def test_a_load_is_checked_and_then_comes_in_pieces() -> None:
    copies = saved([1, 2, 3, 4])
    copies.log.clear()
    load = Transfer(Lane.LOAD, both([1, 2, 3, 4]), SCOPE)
    pieces = TransferExecutor(copies, None, piece_bytes=SMALL).run(load)
    next(pieces)
    assert copies.log == ["defects", "defects"] and load.checked
    for count in range(1, 5):  # in each group, two for two records
        next(pieces)
        assert copies.calls("to_device") == count
        assert not load._has_arrived
    next(pieces)
    assert load._has_arrived and load.moved_bytes == 4 * sum(copies.sizes)
    assert list(pieces) == [] and copies.calls("to_device") == 4


class Queued:
    """A copy that notes who follows it: steps of the device, or the host."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def order(self) -> None:
        self.log.append("order")

    def wait(self) -> None:
        self.log.append("wait")


class QueueingCopies(ArrayCopies):
    """Copies that are said to be queued. Only the first `most` to the device succeed."""

    queues = True

    def __init__(self, most: int = 100) -> None:
        super().__init__()
        self._most = most

    def to_device(self, group: int, device: Ids, host: Ids) -> Queued:  # type: ignore[override]
        if self.calls("to_device") == self._most:
            raise OSError("no")
        super().to_device(group, device, host)
        return Queued(self.log)


def test_a_queued_load_is_checked_when_all_of_it_is_queued() -> None:
    """A step that is launched then finds each copy, and the executor waits for all of them after that."""
    copies = saved([1, 2, 3, 4], QueueingCopies())
    copies.log.clear()
    load = Transfer(Lane.LOAD, both([1, 2, 3, 4]), SCOPE)
    pieces = TransferExecutor(copies, None, piece_bytes=SMALL).run(load)
    next(pieces)
    assert load.checked and copies.log == ["defects"] * 2 + ["to_device"] * 4
    load.wait()
    assert copies.log[6:] == ["order"] * 4
    assert list(pieces) == [] and copies.log[10:] == ["wait"] * 4


@pytest.mark.parametrize("damaged", [False, True])
def test_queued_copies_are_waited_for_whatever_becomes_of_a_load(damaged: bool) -> None:
    """Records must not be reused while a copy reads them: of a load that fails at its third copy, or is damaged."""
    copies = saved([1, 2, 3, 4], QueueingCopies(most=100 if damaged else 2))
    copies.log.clear()
    load = Transfer(Lane.LOAD, both([1, 2, 3, 4]), SCOPE)
    load.pieces = TransferExecutor(copies, None, piece_bytes=SMALL).run(load)
    copies.host[1][3, HEADER] ^= damaged
    load.advance()
    assert load.over
    load.end()
    assert not load.checked and not load.is_whole and not load._has_arrived
    assert copies.calls("wait") == copies.calls("to_device") == 2
    with pytest.raises(MoveFailed):
        load.wait()


def test_a_load_of_a_damaged_record_copies_what_is_before_it() -> None:
    copies = saved([1, 2, 3])
    was = [device.copy() for device in copies.device]
    for device in copies.device:
        device[:] = 0
    copies.host[1][2, HEADER] ^= 1
    move = run(copies, None, Lane.LOAD, *both([1, 2, 3]))
    assert move.defects == (("", "missing", "missing"), ("", "digest", "missing"))
    assert not move.checked and not move.is_whole
    for device, before in zip(copies.device, was, strict=True):
        assert np.array_equal(device[:, 1], before[:, 1]) and device[:, 1].any()
        assert not device[:, 2:].any()


def test_a_record_under_another_key_or_in_another_group_is_a_defect() -> None:
    copies = saved([1, 2])
    assert run(copies, None, Lane.LOAD, units(0, [1], [1], [2])).defects == (("digest",),)


@pytest.mark.parametrize("group", [0, 1])
def test_a_damaged_record_does_not_leave_the_host_nor_do_the_pages_behind_it(group: int) -> None:
    copies, store = saved([1, 2, 3, 4, 5]), ScriptedStore()
    copies.host[group][3, HEADER + 1] ^= 1
    move = run(copies, store, Lane.ARCHIVE, *both([1, 2, 3, 4, 5]))
    other = ("", "", "store", "store", "store")
    damaged = ("", "", "digest", "store", "store")
    assert move.defects == ((damaged, other) if group == 0 else (other, damaged))
    assert set(store.visible) == {key(page, part) for page in (1, 2) for part in (0, 1)}
    assert store.prepared == {}


@pytest.mark.parametrize("method", ["prepare", "put", "complete"])
@pytest.mark.parametrize("piece_bytes", [SMALL, 1 << 20])
def test_a_page_that_the_store_refuses_in_one_group_is_in_none(method: str, piece_bytes: int) -> None:
    copies, store = saved([1, 2, 3, 4, 5]), ScriptedStore()
    store.refused[method].add(key(3, 1))
    move = run(copies, store, Lane.ARCHIVE, *both([1, 2, 3, 4, 5]), piece_bytes=piece_bytes)
    assert move.defects == (("", "", "store", "store", "store"),) * 2
    assert set(store.visible) == {key(page, part) for page in (1, 2) for part in (0, 1)}
    assert store.prepared == {}
    assert move.moved_bytes == 2 * sum(copies.sizes)


def test_what_another_writer_is_at_is_left_to_it() -> None:
    copies, store = saved([1, 2, 3]), ScriptedStore()
    store.prepare([key(2, 0)], [9])
    move = run(copies, store, Lane.ARCHIVE, *both([1, 2, 3]))
    assert move.defects == (("", "store", "store"),) * 2
    assert set(store.prepared) == {key(2, 0)}


def test_what_the_store_has_is_not_put_again() -> None:
    copies, store = saved([1, 2, 3]), ScriptedStore()
    run(copies, store, Lane.ARCHIVE, *both([1, 2]))
    store.log.clear()
    move = run(copies, store, Lane.ARCHIVE, *both([1, 2, 3]), piece_bytes=1 << 20)
    assert move.is_whole
    assert ("put", 2) in store.log
    assert move.moved_bytes == sum(copies.sizes)


@pytest.mark.parametrize("method", ["prepare", "put", "complete"])
def test_nothing_stays_prepared_when_the_store_raises(method: str) -> None:
    copies, store = saved([1, 2]), ScriptedStore()
    store.failing.add(method)
    with pytest.raises(InvalidInput):
        run(copies, store, Lane.ARCHIVE, *both([1, 2]))
    assert store.visible == {}
    assert method == "complete" or store.prepared == {}


def test_groups_may_have_only_the_last_pages() -> None:
    copies, store = saved([1, 2, 3, 4]), ScriptedStore()
    moved = units(0, [1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]), units(1, [3, 4], [3, 4], [3, 4])
    assert run(copies, store, Lane.ARCHIVE, *moved).is_whole
    del store.visible[key(3, 1)]
    move = run(copies, store, Lane.FETCH, *moved)
    assert move.defects == (("", "", "missing", "missing"), ("missing", "missing"))


def test_pages_that_no_group_has_all_of_keep_their_order() -> None:
    copies, store = saved([1, 2, 3, 4, 5]), ScriptedStore()
    moved = units(0, [1, 2, 4], [1, 2, 4], [1, 2, 4]), units(1, [2, 3, 4, 5], [2, 3, 4, 5], [2, 3, 4, 5])
    store.refused["put"].add(key(3, 1))
    move = run(copies, store, Lane.ARCHIVE, *moved)
    assert move.defects == (("", "", "store"), ("", "store", "store", "store"))


def test_a_fetch_ends_at_the_first_page_that_is_not_whole() -> None:
    copies, store = saved([1, 2, 3, 4, 5]), ScriptedStore()
    run(copies, store, Lane.ARCHIVE, *both([1, 2, 3, 4, 5]))
    del store.visible[key(4, 0)]
    move = run(copies, store, Lane.FETCH, *both([1, 2, 3, 4, 5]), piece_bytes=1 << 20)
    assert move.defects == (("", "", "", "missing", "missing"),) * 2
    store.refused["get"].add(key(2, 1))
    move = run(copies, store, Lane.FETCH, *both([1, 2, 3, 4, 5]))
    assert move.defects == (("", "missing", "missing", "missing", "missing"), ("", "store", *("missing",) * 3))
    assert move.moved_bytes == sum(copies.sizes)


def test_a_damaged_record_of_the_store_is_named_and_deleted_there() -> None:
    copies, store = saved([1, 2, 3]), ScriptedStore()
    run(copies, store, Lane.ARCHIVE, *both([1, 2, 3]))
    store.spoil(key(2, 1))
    move = run(copies, store, Lane.FETCH, *both([1, 2, 3]), piece_bytes=1 << 20)
    assert move.defects == (("", "missing", "missing"), ("", "digest", "missing"))
    assert key(2, 1) not in store.visible
    assert key(2, 0) in store.visible
    copies = saved([1, 2, 3])
    assert run(copies, store, Lane.ARCHIVE, *both([1, 2, 3])).is_whole
    assert run(copies, store, Lane.FETCH, *both([1, 2, 3])).is_whole


def test_looking_and_deleting() -> None:
    copies, store = saved([1, 2]), ScriptedStore()
    run(copies, store, Lane.ARCHIVE, *both([1]))
    looked = units(0, [], [], [1, 2]), units(1, [], [], [2])
    assert run(copies, store, Lane.LOOK, *looked).answers == ((Answer.HIT, Answer.MISS), (Answer.MISS,))
    run(copies, store, Lane.DELETE, *looked)
    assert set(store.visible) == {key(1, 1)}


class Stuck(ScriptedStore):
    """Reads well, into memory of which a byte is always the same."""

    def __init__(self, row: np.ndarray, at: int) -> None:
        super().__init__()
        self.row, self.at = row, at

    def get(self, keys: Sequence[StoreKey], records: Sequence[Record]) -> list[Answer]:
        answers = super().get(keys, records)
        self.row[self.at] = 77
        return answers


def test_a_good_record_that_was_read_into_bad_memory_stays_in_the_store() -> None:
    copies = saved([1, 2, 3])
    store = Stuck(copies.host[1][9], HEADER + 1)
    run(copies, store, Lane.ARCHIVE, *both([1, 2, 3]))
    fetch = [units(group, [], [8, 9, 10], [1, 2, 3]) for group in (0, 1)]
    move = run(copies, store, Lane.FETCH, *fetch, piece_bytes=1 << 20)
    assert move.defects == (("", "missing", "missing"), ("", "digest", "missing"))
    assert move.suspect == {(1, 1)} and len(store.visible) == 6
    store.spoil(key(2, 1))
    fetch = [units(group, [], [11, 12, 13], [1, 2, 3]) for group in (0, 1)]
    move = run(copies, store, Lane.FETCH, *fetch, piece_bytes=1 << 20)
    assert not move.suspect and len(store.visible) == 5, "this time it is the record"


class Asked(ScriptedStore):
    """Notes the pages that it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []

    def exists(self, keys: Sequence[StoreKey]) -> list[Answer]:
        self.asked.append(sum(key.part < 2 for key in keys))
        return super().exists(keys)


@pytest.mark.parametrize(("stored", "whole", "asked"), [(0, [0], 1), (200, [0], 2), (0, [], 8), (600, [0, 1], 5)])
def test_the_store_is_asked_for_no_more_than_could_be_used(stored: int, whole: list[int], asked: int) -> None:
    store, numbers = Asked(), list(range(1, 1001))
    for number in numbers[:stored]:
        for part in (0, 1):
            store.visible[key(number, part)] = b""
    move = Transfer(Lane.LOOK, (units(0, [], [], numbers), units(1, [], [], numbers)), SCOPE, whole=whole)
    for _ in TransferExecutor(saved([1]), store).run(move):
        pass
    assert len(store.asked) == asked and max(store.asked) <= 256
    assert [answers.count(Answer.HIT) for answers in move.answers] == [stored] * 2
    assert [len(answers) for answers in move.answers] == [1000] * 2


def test_looking_can_be_stopped() -> None:
    store, numbers = Asked(), list(range(1, 1001))
    for number in numbers:
        store.visible[key(number, 0)] = b""
    move = Transfer(Lane.LOOK, (units(0, [], [], numbers),), SCOPE, whole=[0])
    pieces = TransferExecutor(saved([1]), store).run(move)
    next(pieces)
    move.stop()
    assert list(pieces) == [] and store.asked == [128]
    assert move.answers[0].count(Answer.HIT) == 128


def test_what_is_deleted_during_a_lookup_is_not_there() -> None:
    store, numbers = Asked(), list(range(1, 1001))
    for number in numbers:
        store.visible[key(number, 0)] = b""
    move = Transfer(Lane.LOOK, (units(0, [], [], numbers),), SCOPE, whole=[0])
    pieces = TransferExecutor(saved([1]), store).run(move)
    next(pieces)
    store.visible[tombstone_of(SCOPE)] = b""
    assert list(pieces) == []
    assert move.deleted_scopes == (SCOPE,) and set(move.answers[0]) == {Answer.MISS}


@pytest.mark.parametrize("link", [Lane.ARCHIVE, Lane.FETCH, Lane.LOOK, Lane.DELETE])
def test_without_a_store_there_is_nothing_to_ask(link: Lane) -> None:
    with pytest.raises(InvalidInput, match="no storage tier"):
        run(saved([1]), None, link, *both([1]))


@pytest.mark.parametrize("link", [Lane.FETCH, Lane.ARCHIVE])
def test_what_was_stopped_keeps_what_it_had(link: Lane) -> None:
    copies, store = saved([1, 2, 3, 4]), ScriptedStore()
    if link is Lane.FETCH:
        run(copies, store, Lane.ARCHIVE, *both([1, 2, 3, 4]))
    move = Transfer(link, both([1, 2, 3, 4]), SCOPE, 0)
    pieces = TransferExecutor(copies, store, piece_bytes=1).run(move)
    next(pieces)
    move.stop()
    assert list(pieces) == []
    rest = "missing" if link is Lane.FETCH else "store"
    assert move.defects == (("", rest, rest, rest),) * 2


def test_an_empty_move_is_whole() -> None:
    copies, store = ArrayCopies(), ScriptedStore()
    for link in LANES:
        assert run(copies, store, link).is_whole
        assert run(copies, store, link, units(0, [], [], [])).is_whole


@given(st.data())
def test_a_store_that_refuses_anything_never_shows_part_of_a_page(data: st.DataObject) -> None:
    """Any units, any refusals but of `complete`: pages are in the store whole, and none without those before it."""
    count = data.draw(st.integers(1, 6))
    numbers = list(range(1, count + 1))
    copies, store = saved(numbers), ScriptedStore()
    has_room = data.draw(st.booleans())
    store.most_bytes = 1 << 20 if has_room else data.draw(st.integers(50, 800))
    tail = data.draw(st.integers(0, count))
    moved = units(0, numbers, numbers, numbers), units(1, *[numbers[tail:]] * 3)
    parts = {page: {0, 1} if page > tail else {0} for page in numbers}
    for method in ("prepare", "put"):
        for page in data.draw(st.sets(st.sampled_from(numbers), max_size=1)):
            store.refused[method].add(key(page, data.draw(st.sampled_from(sorted(parts[page])))))
    if data.draw(st.booleans()):
        copies.host[0][data.draw(st.sampled_from(numbers)), HEADER] ^= 1
    move = run(copies, store, Lane.ARCHIVE, *moved, piece_bytes=data.draw(st.sampled_from([1, 150, 1 << 20])))
    good = [page for page in numbers if move.defects[0][page - 1] == ""]
    assert good == numbers[: len(good)]
    assert move.defects[1] == tuple("" if page in good else move.defects[1][page - tail - 1] for page in numbers[tail:])
    assert {name.page for name in store.visible} <= {page_key(page) for page in good}
    assert store.prepared == {}
    if has_room:
        assert set(store.visible) == {key(page, part) for page in good for part in parts[page]}


def delete(store: ScriptedStore, scope: bytes) -> Transfer:
    move = Transfer(Lane.DELETE, (), scope)
    for _ in TransferExecutor(ArrayCopies(), store).run(move):
        pass
    return move


def test_everything_of_a_scope_is_deleted_and_nothing_else() -> None:
    store = ScriptedStore()
    scopes = [b"prefix-1" + name for name in (b"tenant 1", b"tenant 2")] + [b"prefix-2tenant 1"]
    for scope in scopes:
        for page in range(3000 if scope is scopes[0] else 3):
            store.visible[StoreKey(scope, page_key(page), page % 2)] = b"x"
    delete(store, scopes[0])
    assert [sum(key.scope == scope for key in store.visible) for scope in scopes] == [0, 3, 3]
    assert store.log.count(("remove", 1024)) == 2, "some at a time"
    store.visible |= {StoreKey(scopes[0], page_key(1), 0): b"x"}
    delete(store, b"prefix-1")
    assert [sum(key.scope == scope for key in store.visible) for scope in scopes] == [0, 0, 3]
    store.log.clear()
    delete(store, b"prefix-1")
    assert not any(name in ("prepare", "put") for name, _ in store.log), "there is nothing to hide"
    assert len(store.visible) == 3


def test_what_a_store_keeps_though_it_was_to_delete_it_is_an_error() -> None:
    class Stubborn(ScriptedStore):
        def remove(self, keys: Sequence[StoreKey]) -> int:
            return super().remove([key for key in keys if key.part])

    store = Stubborn()
    for part in (0, 1):
        store.visible[StoreKey(SCOPE, page_key(1), part)] = b"x"
    with pytest.raises(StoreError, match="1 of 2 records could not be removed"):
        delete(store, SCOPE)
    with pytest.raises(InvalidInput, match="no storage"):
        list(TransferExecutor(ArrayCopies(), None).run(Transfer(Lane.DELETE, (), SCOPE)))
