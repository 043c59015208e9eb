"""The keys of pages: each is made once, and the memory of names is bounded."""

from __future__ import annotations

import pytest

from quire.prefix import hashing, page_names
from quire.prefix.page_names import PageNames
from quire.spec.events import AllCleared, Namespace
from tests.offload.cached_bytes import PAGE, asking, tokens_of
from tests.offload.tiered_cache import TieredCache


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many pages each call has hashed."""
    counts: list[int] = []
    chain = hashing.chain_pages

    def count(parent: bytes, tokens: bytes, page_bytes: int) -> tuple[bytes, ...]:
        counts.append(len(tokens) // page_bytes)
        return chain(parent, tokens, page_bytes)

    monkeypatch.setattr(hashing, "chain_pages", count)
    return counts


@pytest.mark.parametrize("emit", [False, True])
def test_a_key_is_made_once_for_store_tiers_and_events(hashed: list[int], emit: bool) -> None:
    world = TieredCache(emit=emit)
    tokens = tokens_of((1, 2, 3, 4, 5))
    assert world.fetch(tokens) == 0
    assert sum(hashed) == 5, "the store was asked for them"
    kv = world.begin(asking(tokens))
    for end in (2, 5):
        world.grow(kv, tokens[: end * PAGE])
        world.cache.commit(kv, tokens[: end * PAGE])
    world.finish(kv)
    world.drain()
    assert world.stored() == 5
    told = [event for event in world.events if not isinstance(event, AllCleared)]
    assert {len(key) for event in told for key in event.hashes} == ({32} if emit else set())
    assert sum(hashed) == 5
    world.close()


def test_keys_that_were_asked_for_ahead_serve_what_begins_alike() -> None:
    names = PageNames(4, b"identity", None, 16)
    ahead = names.keys_ahead(Namespace(), 0, b"aaaabbbbcccc")
    assert names.keys_ahead(Namespace(), 0, b"aaaabbbb").digests == ahead.digests[:2]
    other = names.keys_ahead(Namespace(), 0, b"aaaaxxxx")
    assert other.digests[0] == ahead.digests[0] and other.digests[1] not in ahead.digests
    for number in range(1_000):
        names.keys_ahead(Namespace(salt=str(number)), 0, b"aaaa")
    assert len(names._ahead) <= 64
    names.rename(b"another")
    assert not set(names.keys_ahead(Namespace(), 0, b"aaaabbbbcccc").digests) & set(ahead.digests)


def test_scopes_of_many_salts_are_not_kept_for_ever() -> None:
    names = PageNames(16, b"identity", None, 4)
    first = names.scope(Namespace(salt="0"))
    others = {names.scope(Namespace(salt=str(number))) for number in range(1, 5_000)}
    assert len(others) == 4_999 and first not in others
    assert page_names._scope_of.cache_info().currsize <= 1_024
    assert names.scope(Namespace(salt="0")) == first
