"""Chains of pages beside a plain loop over their tokens."""

from __future__ import annotations

import numpy as np
import pytest

from quire.canary import chain as chains
from quire.spec.events import Namespace

MASK = 2**64 - 1


def by_hand(before: int, tokens: list[int], first: int, page_size: int) -> list[int]:
    """The definition, in whole numbers."""
    found = []
    for at, token in enumerate(tokens):
        mixed = ((token << 32) + first + at) * 0x9E3779B97F4A7C15 & MASK
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & MASK
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & MASK
        before = before + (mixed ^ mixed >> 31) & MASK
        if (at + 1) % page_size == 0:
            found.append(before)
    return found


def check_chains() -> None:
    """Equal to the loop, continued at any page, and different for other tokens, orders, positions and namespaces."""
    rng = np.random.default_rng(3)
    seeds = [chains.seed_of(space) for space in (Namespace(), Namespace("a"), Namespace(salt="a"), Namespace("a", "a"))]
    assert len(set(seeds)) == len(seeds)
    for size in (1, 4, 16):
        tokens = rng.integers(0, 2**31 - 1, 7 * size + size // 2).astype(np.int32)
        found = chains.chain(seeds[1], tokens, 0, size)
        assert found.tolist() == by_hand(seeds[1], tokens.tolist(), 0, size)
        later = chains.chain(int(found[2]), tokens[3 * size :], 3 * size, size)
        assert later.tolist() == found[3:].tolist()
        pages = tokens[size : 7 * size].reshape(-1, size)
        firsts = np.arange(1, 7, dtype=np.uint64) * np.uint64(size)
        assert chains.next_chains(found[:-1], pages, firsts).tolist() == found[1:].tolist()
        exchanged = tokens.copy()
        exchanged[: 2 * size] = np.roll(tokens[: 2 * size], size)
        assert not set(chains.chain(seeds[1], exchanged, 0, size).tolist()) & set(found.tolist())


def test_chains() -> None:
    check_chains()


@pytest.mark.parametrize("count", [0, 3])
def test_less_than_a_page_has_no_chain(count: int) -> None:
    assert len(chains.chain(1, np.arange(count, dtype=np.int32), 0, 4)) == 0
