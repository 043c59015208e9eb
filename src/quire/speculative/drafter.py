"""Drafter: the port behind which tokens are proposed, for all requests of a step at once, as chains or trees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from quire.cache.running import Lengths, Rows, RunningBatch
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

    def clear(self, namespace: Namespace | None) -> None:
        """What a namespace, or all (None), had cached is flushed: nothing of what was seen of it so far is proposed to
        requests that begin later."""
        ...


def joined(chains: Ids, lengths: Lengths, most: int) -> Drafts:
    """The tree of some chains of each request, the first `most` tokens of it, earlier chains first.

    Chain c of request i has the first `lengths[i, c]` tokens of `chains[i, c]`, int32 `[requests, chains, depth]`.
    """
    num_requests, num_chains, depth = chains.shape
    tokens = np.full((num_requests, most), -1, dtype=np.int32)
    parents = np.full((num_requests, most), -2, dtype=np.int32)
    counts = np.zeros(num_requests, dtype=np.int64)
    for chain in range(num_chains):
        rows, parent = np.arange(num_requests), np.full(num_requests, -1)
        for place in range(depth):
            some = lengths[rows, chain] > place
            rows, parent = rows[some], parent[some]
            wanted = chains[rows, chain, place]
            same = (parents[rows] == parent[:, None]) & (tokens[rows] == wanted[:, None])
            node, is_new = same.argmax(axis=1), ~same.any(axis=1)
            node[is_new] = counts[rows[is_new]]
            fits = node < most
            rows, parent, wanted, node, is_new = (each[fits] for each in (rows, parent, wanted, node, is_new))
            added = rows[is_new]
            tokens[added, node[is_new]], parents[added, node[is_new]] = wanted[is_new], parent[is_new]
            counts[added] += 1
            parent = node
    return Drafts(counts, tokens, parents)


class BestFirst:
    """Trees of some requests that grow by one depth at a time. A node is as likely as all tokens up to it together.

    At each depth the `topk` likeliest new nodes are expanded, each by `topk` children. Expanded nodes are the rows of a
    drafter's passes, in the order in which they were chosen.
    """

    def __init__(self, num_requests: int, topk: int, depth: int) -> None:
        shape = (num_requests, topk + (depth - 1) * topk * topk)
        self._topk = topk
        self._tokens: Ids = np.zeros(shape, dtype=np.int32)
        self._parents: Ids = np.full(shape, -1, dtype=np.int32)  # nodes
        self._scores: npt.NDArray[np.float32] = np.full(shape, -np.inf, dtype=np.float32)  # log-probabilities
        self._num_nodes = 0
        self._expanded: Rows = np.zeros((num_requests, 0), dtype=np.intp)  # the node of each row
        self._row_parents: Ids = np.zeros((num_requests, 0), dtype=np.int32)

    def rows(self, at: Rows) -> tuple[Ids, Ids]:
        """The tokens of the rows of requests `at`, and the row that each follows, -1 for the last known token. Both
        `[len(at), rows]`, the last `topk` of them new."""
        return np.take_along_axis(self._tokens[at], self._expanded[at], axis=1), self._row_parents[at]

    def grow(self, at: Rows, tokens: Ids, scores: npt.NDArray[np.float32]) -> None:
        """The next nodes of requests `at`: children of the new rows, or of the last known token, by log-probability.

        Both are `[len(at), rows, topk]`. Requests that are left out grow no more.
        """
        count, width, topk = tokens.shape
        parents = np.full((count, width), -1, dtype=np.int32)
        if self._num_nodes:
            parents = self._expanded[at, -topk:].astype(np.int32)
            scores = scores + np.take_along_axis(self._scores[at], parents, axis=1)[:, :, None]
        new = slice(self._num_nodes, self._num_nodes + width * topk)
        self._tokens[at, new] = tokens.reshape(count, -1)
        self._parents[at, new] = parents.repeat(topk, axis=1)
        self._scores[at, new] = scores.reshape(count, -1)
        best = (-scores.reshape(count, -1)).argsort(axis=1, kind="stable")[:, :topk]
        chosen = np.zeros((len(self._tokens), topk), dtype=np.intp)
        follows = np.full((len(self._tokens), topk), -1, dtype=np.int32)
        chosen[at] = self._num_nodes + best
        if self._num_nodes:
            follows[at] = self._expanded.shape[1] - topk + best // topk
        self._expanded = np.concatenate((self._expanded, chosen), axis=1)
        self._row_parents = np.concatenate((self._row_parents, follows), axis=1)
        self._num_nodes = new.stop

    def drafts(self, most: int) -> Drafts:
        """The `most` likeliest nodes of each request, the likeliest first. A node comes after all those it follows."""
        order = (-self._scores).argsort(axis=1, kind="stable")[:, :most]
        places = np.full(self._parents.shape, -1, dtype=np.int32)
        np.put_along_axis(places, order, np.arange(order.shape[1], dtype=np.int32)[None], axis=1)
        parents = np.take_along_axis(self._parents, order, axis=1)
        parents = np.where(parents >= 0, np.take_along_axis(places, np.maximum(parents, 0), axis=1), -1)
        counts = np.minimum(np.isfinite(self._scores).sum(axis=1), most).astype(np.int64)
        return Drafts(counts, np.take_along_axis(self._tokens, order, axis=1), parents.astype(np.int32))
