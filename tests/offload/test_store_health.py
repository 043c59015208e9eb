"""A store that is down is not taken for one that is empty."""

from __future__ import annotations

from collections.abc import Sequence

from quire.counters import statistics_of
from quire.offload.tier_settings import StoreHealth
from quire.offload.tiering import Tiering
from quire.tiers.store import Answer, StoreKey
from quire.tiers.transfer import Lane, Transfer, Units
from tests.offload.cached_bytes import tokens_of
from tests.offload.tiered_cache import TieredCache
from tests.tiers.array_copies import ids, page_key
from tests.tiers.scripted_store import ScriptedStore


class Down(ScriptedStore):
    down = True

    def exists(self, keys: Sequence[StoreKey]) -> list[Answer]:
        return [Answer.RETRY] * len(keys) if self.down else super().exists(keys)


def look(*answers: Answer) -> Transfer:
    keys = tuple(page_key(number) for number in range(len(answers)))
    move = Transfer(Lane.LOOK, [Units(0, ids(), ids(), keys)])
    move.answers = (answers,)
    move.end()
    return move


def archive(*defects: str, error: str = "") -> Transfer:
    keys = tuple(page_key(number) for number in range(len(defects)))
    move = Transfer(Lane.ARCHIVE, [Units(0, ids(), ids(), keys)])
    move.defects = (defects,)
    move.end(error)
    return move


def tiers_of(world: TieredCache) -> Tiering:
    return world.tiers


def test_who_looks_at_a_store_that_is_down_hears_and_says_so() -> None:
    store = Down()
    world = TieredCache(store=store)
    for first in range(10, 60, 10):
        world.fetch(tokens_of(range(first, first + 5)))
    found = statistics_of(tiers_of(world).sections())["tiers"]
    assert found["store_refused"] == {"look": 25, "fetch": 0, "archive": 0}
    assert found["store_lost"] == ["read"]
    store.down = False
    world.fetch(tokens_of(range(10, 15)))
    found = statistics_of(tiers_of(world).sections())["tiers"]
    assert (found["store_lost"], found["store_refused"]["look"]) == ([], 25)
    world.close()


def test_a_change_is_said_once() -> None:
    said: list[tuple[str, bool]] = []
    health = StoreHealth(lambda kind, is_lost: said.append((kind, is_lost)))
    for _ in range(10):
        health.ended(look(Answer.RETRY))
        health.ended(archive("", "store"))
    assert said == [("read", True)], "a store that takes some is there"
    for _ in range(10):
        health.ended(archive("", error="the disk is gone"))
    assert said == [("read", True), ("write", True)]
    health.ended(look(Answer.RETRY, Answer.MISS))
    health.ended(look(Answer.HIT))
    assert said[2:] == [("read", False)]
    health.ended(archive("digest"))
    health.ended(archive(""))
    assert said[3:] == [("write", False)]
    assert health.refused == {Lane.LOOK: 11, Lane.FETCH: 0, Lane.ARCHIVE: 20}


def test_rare_failures_are_not_logged() -> None:
    said: list[str] = []
    health = StoreHealth(lambda kind, is_lost: said.append(kind))
    for _ in range(10):
        health.ended(look(Answer.RETRY))
        health.ended(look(Answer.RETRY))
        health.ended(look(Answer.MISS))
    assert not said
