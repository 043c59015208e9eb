"""ComparedDrafters: n-grams by operations on arrays and by the library, which must draft and remember the same."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from quire.cache.running import RunningBatch
from quire.kernels.native.ngrams import native_ngrams
from quire.spec.events import Namespace
from quire.spec.ids import Ids
from quire.spec.speculation import SpeculativeConfig
from quire.speculative import ngram
from quire.speculative.drafter import Drafting, Drafts
from quire.speculative.ngram import NgramDrafter


class ComparedDrafters:
    """A drafter that asks both, and fails where they differ in drafts or in any array of their state."""

    def __init__(self, *given: Any, **settings: Any) -> None:
        self.plain = NgramDrafter(*given, **settings)
        self.native = NgramDrafter(*given, **settings, search_of=native_ngrams)
        assert self.native._search is not None, "the library lacks"

    def propose(self, drafting: Drafting) -> Drafts:
        found, same = self.plain.propose(drafting), self.native.propose(drafting)
        assert found.counts.tolist() == same.counts.tolist()
        for at, count in enumerate(found.counts.tolist()):
            assert found.tokens[at, :count].tolist() == same.tokens[at, :count].tolist()
            if found.parents is not None and count:
                assert same.parents is not None
                assert found.parents[at, :count].tolist() == same.parents[at, :count].tolist()
        assert state_of(self.plain).keys() == state_of(self.native).keys()
        for name, array in state_of(self.plain).items():
            assert np.array_equal(array, state_of(self.native)[name]), name
        return same

    def ended(self, namespace: Namespace, tokens: Ids, num_cached: int) -> None:
        for each in (self.plain, self.native):
            each.ended(namespace, tokens, num_cached)

    def clear(self, namespace: Namespace | None) -> None:
        for each in (self.plain, self.native):
            each.clear(namespace)


def state_of(drafter: NgramDrafter) -> dict[str, Any]:
    """The arrays of a drafter that a search reads or changes; rows that copy nothing are of no meaning."""
    found = {"own": drafter._places.table, "entered": drafter._entered}
    if drafter._copies is not None:
        found |= drafter._copies.arrays()
    return found


def check_a_life(seed: int) -> None:
    """Requests of two tenants that copy themselves, end, and begin in the rows of others, in tables so small that
    n-grams replace each other."""
    draw, spaces = random.Random(seed), [Namespace(), Namespace(salt="other")]
    shortest, topk, alphabet = draw.randint(1, 3), draw.choice([1, 1, 2, 3]), draw.choice([2, 3, 5])
    config = SpeculativeConfig(
        method="ngram",
        num_steps=6,
        topk=topk,
        num_draft_tokens=draw.randint(2, 12),
        prompt_lookup_min=shortest,
        prompt_lookup_max=shortest + draw.randint(0, 2),
    )
    tokens = np.zeros((3, 80), dtype=np.int32)
    known, serials = np.zeros(3, dtype=np.int64), np.zeros(3, dtype=np.int64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ngram, "_TABLE_BITS", draw.choice([2, 6]))
        patch.setattr(ngram, "_HISTORY", 64)
        drafters = ComparedDrafters(3, config, shares=draw.random() < 0.8, resumes=draw.random() < 0.7)
        for _ in range(80):
            for row in range(3):
                if not known[row] or known[row] > 70 or draw.random() < 0.03:
                    if known[row]:
                        drafters.ended(spaces[row % 2], tokens[row, : known[row]].copy(), 0)
                    serials[row], known[row] = serials.max() + 1, draw.randint(1, 30)
                    tokens[row, : known[row]] = draw.choices(range(alphabet), k=int(known[row]))
                source = draw.randrange(int(known[row]))
                for at in range(draw.randint(0, 4)):
                    copied = draw.random() < 0.85
                    tokens[row, known[row]] = tokens[row, source + at] if copied else 10 + draw.randrange(alphabet)
                    known[row] += 1
            if draw.random() < 0.05:
                drafters.clear(draw.choice([None, *spaces]))
            rows = [row for row in range(3) if draw.random() < 0.8]
            kvs = [Tenant(spaces[row % 2]) for row in rows]
            batch = RunningBatch(kvs, np.array(rows, dtype=np.intp), serials[rows])  # type: ignore[arg-type]
            most = np.array([draw.randint(0, 6) for _ in rows], dtype=np.int64)
            drafters.propose(Drafting(batch, tokens, known[rows], most))


class Tenant:
    """What a drafter reads of a request of the cache."""

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
