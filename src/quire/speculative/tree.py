"""Drafts that branch: chains of several requests, joined where they begin alike."""

from __future__ import annotations

import numpy as np

from quire.cache.running import Lengths
from quire.spec.ids import Ids
from quire.speculative.drafter import Drafts


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
