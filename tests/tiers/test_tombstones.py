"""A scope that was deleted in a store stays deleted when the process stops on the way, and is gone in the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from quire.errors import StoreError
from quire.memory.record import check_record
from quire.tiers.executor import TransferExecutor
from quire.tiers.store import Answer, Entry, StoreKey
from quire.tiers.tombstones import tombstone_of, tombstone_scope, tombstones_over
from quire.tiers.transfer import Lane, Transfer, Units
from tests.tiers.array_copies import ArrayCopies
from tests.tiers.scripted_store import ScriptedStore

ALICE, BOB, OTHER = b"edition1" + b"alice   ", b"edition1" + b"bob     ", b"edition2" + b"alice   "
NONE = np.empty(0, dtype=np.int32)
COUNT = 3000


def page(number: int) -> bytes:
    return number.to_bytes(32, "big")


def filled(kind: type[ScriptedStore] = ScriptedStore) -> ScriptedStore:
    store = kind()
    for scope in (ALICE, BOB, OTHER):
        store.visible |= {StoreKey(scope, page(number), 0): b"x" * 200 for number in range(COUNT)}
    return store


def left(store: ScriptedStore, scope: bytes) -> int:
    return sum(key.scope == scope and tombstone_scope(key) is None for key in store.visible)


def looked(store: ScriptedStore, scope: bytes) -> Transfer:
    """A lookup of the last page, in two groups, and of one that never was."""
    units = [Units(0, NONE, NONE, (page(COUNT - 1), page(COUNT))), Units(1, NONE, NONE, (page(COUNT - 1),))]
    move = Transfer(Lane.LOOK, units, scope)
    list(TransferExecutor(ArrayCopies(), store).run(move))
    return move


def deleting(store: ScriptedStore, scope: bytes) -> tuple[Transfer, Iterator[None]]:
    move = Transfer(Lane.DELETE, (), scope)
    return move, TransferExecutor(ArrayCopies(), store).run(move)


def delete(store: ScriptedStore, scope: bytes) -> None:
    list(deleting(store, scope)[1])


def test_marks_say_what_they_stand_for() -> None:
    for part in (ALICE, ALICE[:8], bytes(16), bytes(8)):
        assert tombstone_scope(tombstone_of(part)) == part
    assert [part for part, _ in tombstones_over(ALICE)] == [ALICE[:8], ALICE]
    assert len({tombstone_of(part) for part in (ALICE, BOB, ALICE[:8])}) == 3
    assert tombstone_scope(StoreKey(ALICE, page(1), 0)) is None
    assert tombstone_scope(StoreKey(ALICE, page(1), 0xFFFF)) is None, "another tenant's"


@pytest.mark.parametrize(("scope", "hidden"), [(ALICE, [ALICE]), (ALICE[:8], [ALICE, BOB])])
@pytest.mark.parametrize("pieces", [1, 2, 3])
def test_an_interrupted_deletion_is_found_by_no_lookup_and_goes_on(
    scope: bytes, hidden: list[bytes], pieces: int
) -> None:
    store = filled()
    move, steps = deleting(store, scope)
    assert not move.hidden
    for _ in range(pieces):
        next(steps)
    assert move.hidden
    del steps  # as when the process is killed
    assert left(store, BOB) == COUNT, "which was not reached"
    for each in (ALICE, BOB, OTHER):
        found = looked(store, each)
        assert found.answers == (((Answer.MISS if each in hidden else Answer.HIT), Answer.MISS), (Answer.MISS,))
        assert found.deleted_scopes == ((scope,) if each in hidden else ())
    delete(store, scope)
    assert [left(store, each) for each in (ALICE, BOB, OTHER)] == [
        0 if each in hidden else COUNT for each in (ALICE, BOB, OTHER)
    ]
    assert not any(tombstone_scope(key) for key in store.visible), "nor is the tombstone"
    store.visible[StoreKey(ALICE, page(COUNT - 1), 0)] = b"y"
    assert looked(store, ALICE).answers[0][0] is Answer.HIT, "what is stored afterwards is found"


def test_to_be_stopped_is_to_stop_soon_and_still_to_hide() -> None:
    store = filled()
    move, steps = deleting(store, ALICE)
    move.stop()
    with pytest.raises(StoreError, match="it was stopped when 0 records"):
        list(steps)
    assert move.hidden and left(store, ALICE) == COUNT
    assert looked(store, ALICE).deleted_scopes == (ALICE,)
    move, steps = deleting(store, ALICE)
    next(steps), next(steps), move.stop()
    with pytest.raises(StoreError, match="it was stopped when 1,024 records"):
        list(steps)
    assert left(store, ALICE) == COUNT - 1024


def test_a_mark_is_a_sound_record_of_the_size_of_others() -> None:
    """So that it takes the room of one of those, and a check of the store finds nothing wrong."""
    store = filled()
    _move, steps = deleting(store, ALICE)
    next(steps)
    record = store.visible[tombstone_of(ALICE)]
    assert len(record) == 200 and check_record(record) == ""
    assert list(store.visible)[-1] == tombstone_of(ALICE), "an LRU store evicts the rest before it"


def test_all_deletes_the_tombstones_of_scopes_too() -> None:
    store = filled()
    for scope in (ALICE, BOB):
        next(deleting(store, scope)[1])
    delete(store, ALICE[:8])
    assert {key.scope for key in store.visible} == {OTHER}


class Moody(ScriptedStore):
    """A store that does not do what is named in `down`."""

    down = ""

    def entries(self, scope: bytes | None = None) -> Iterator[Entry]:
        if self.down == "entries":
            raise StoreError("no answer")
        return super().entries(scope)

    def exists(self, keys: Sequence[StoreKey]) -> list[Answer]:
        return [Answer.RETRY] * len(keys) if self.down == "exists" else super().exists(keys)

    def remove(self, keys: Sequence[StoreKey]) -> int:
        return 0 if self.down == "remove" else super().remove(keys)


def test_a_store_that_cannot_be_listed_hides_all_the_same() -> None:
    store = filled(Moody)
    store.down = "entries"  # type: ignore[attr-defined]
    move, steps = deleting(store, ALICE)
    with pytest.raises(StoreError, match="no answer"):
        list(steps)
    assert move.hidden and looked(store, ALICE).answers[0][0] is Answer.MISS


def test_a_store_that_takes_nothing_may_still_delete() -> None:
    store = filled()
    store.refused["prepare"].add(tombstone_of(ALICE))
    move, steps = deleting(store, ALICE)
    next(steps)
    assert not move.hidden
    list(steps)
    assert left(store, ALICE) == 0


@pytest.mark.parametrize("verb", ["put", "complete"])
def test_a_mark_that_was_not_taken_hides_nothing_and_says_so(verb: str) -> None:
    store = filled()
    store.refused[verb].add(tombstone_of(ALICE))
    move, steps = deleting(store, ALICE)
    next(steps)
    assert not move.hidden and not store.prepared and not store.taken
    assert looked(store, ALICE).deleted_scopes == ()


def test_what_cannot_be_said_of_a_mark_is_not_taken_for_no() -> None:
    store = filled(Moody)
    next(deleting(store, ALICE)[1])
    store.down = "exists"  # type: ignore[attr-defined]
    assert set(looked(store, ALICE).answers[0]) == {Answer.RETRY}
    store.down = "remove"  # type: ignore[attr-defined]
    _move, steps = deleting(store, ALICE)
    with pytest.raises(StoreError, match="3,000 of 3,000 records could not be removed"):
        list(steps)
    assert looked(store, ALICE).deleted_scopes == (ALICE,)
