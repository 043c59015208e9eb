"""Drafter: the port behind which tokens are proposed, for all requests of a step at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from quire.cache.running import Lengths, RunningBatch
from quire.spec.events import Namespace
from quire.spec.ids import Ids


@dataclass(frozen=True, slots=True)
class Drafting:
    """Requests whose next step may compute drafts.

    `tokens` int32 `[rows, width]` has the tokens of all rows: request i has the first `known[i]` of row
    `batch.rows[i]`. What is proposed for it is at most `most[i]` tokens ahead.
    """

    batch: RunningBatch
    tokens: Ids
    known: Lengths
    most: Lengths

    def __len__(self) -> int:
        return len(self.known)


@dataclass(frozen=True, slots=True)
class Drafts:
    """The first `counts[i]` of `tokens[i]`, int32 `[requests, most]`, may be the next tokens of request i.

    Each follows the one before. If they branch, draft j follows draft `parents[i, j]`, an earlier one, or the last
    known token if that is -1. No two of them follow the same one and are equal.
    """

    counts: Lengths
    tokens: Ids
    parents: Ids | None = None

    @property
    def num_tokens(self) -> int:
        """Drafts in all."""
        return int(self.counts.sum())


def no_drafts(num_requests: int) -> Drafts:
    """Nothing is proposed for any of so many requests."""
    return Drafts(np.zeros(num_requests, dtype=np.int64), np.zeros((num_requests, 0), dtype=np.int32))


class Drafter(Protocol):
    """Proposes tokens. It is told of requests only by `propose`: a row whose serial has changed is another request."""

    def propose(self, drafting: Drafting) -> Drafts:
        """The likely next tokens of each request, at most `drafting.most[i]`. The result is the caller's."""
        ...

    def ended(self, namespace: Namespace, tokens: Ids, num_cached: int) -> None:
        """A request of that namespace has ended with these tokens, the first `num_cached` of them from the cache."""
        ...

    def forget(self, namespace: Namespace | None) -> None:
        """What a namespace, or all (None), had cached is flushed: nothing of what was seen of it so far is proposed to
        requests that begin later."""
        ...
