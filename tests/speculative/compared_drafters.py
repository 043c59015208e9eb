"""ComparedDrafters: n-grams by operations on arrays and by the library, which must draft and remember the same."""

from __future__ import annotations

from typing import Any

import numpy as np

from quire.kernels.native.ngrams import native_ngrams
from quire.spec.events import Namespace
from quire.spec.ids import Ids
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
