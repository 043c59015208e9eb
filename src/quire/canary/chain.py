"""What a page is, in 64 bits: its namespace, its tokens, their positions and all tokens before it.

    chain of page i = chain of page i - 1 + sum over its tokens of mix(token, position)        modulo 2**64

The chain begins at a hash of the namespace. Sums of mixed terms are computed for all pages of a prompt at once. A chain
that hashes token by token, as SGLang's does, needs one operation of Python for each token.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from quire.spec.events import Namespace
from quire.spec.ids import Ids

Words = npt.NDArray[np.uint64]

_ODD = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def seed_of(namespace: Namespace) -> int:
    """Where the chains of a namespace begin."""
    parts = [part.encode(errors="surrogatepass") for part in (namespace.adapter, namespace.salt)]
    digest = hashlib.blake2b(b"".join(len(part).to_bytes(8, "little") + part for part in parts), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


def chain(before: int, tokens: Ids, first: int, page_size: int) -> Words:
    """The chains of the whole pages in `tokens`, uint64 `[pages]`. `first` is the position of the first token, and
    `before` the chain of the page before, or the namespace's seed."""
    whole = len(tokens) // page_size * page_size
    positions = np.arange(first, first + whole, dtype=np.uint64)
    found: Words = np.cumsum(
        _sums(tokens[:whole].reshape(-1, page_size), positions.reshape(-1, page_size)), dtype=np.uint64
    )
    found += np.uint64(before)
    return found


def next_chains(before: Words, tokens: Ids, firsts: Words) -> Words:
    """The chain of a page of each of several paths, uint64 `[pages]`. `tokens` are int32 `[pages, page_size]`,
    `firsts[i]` is the position of a page's first token, and `before[i]` the chain of the page before it."""
    positions: Words = np.add.outer(firsts, np.arange(tokens.shape[1], dtype=np.uint64))
    found: Words = before + _sums(tokens, positions)
    return found


def _sums(tokens: Ids, positions: Words) -> Words:
    """The mixed terms of pages, each `[pages, page_size]`, as their sums, uint64 `[pages]`."""
    mixed = tokens.astype(np.uint64) << np.uint64(32)
    mixed += positions
    mixed *= _ODD  # the finaliser of splitmix64
    mixed ^= mixed >> np.uint64(30)
    mixed *= _FIRST
    mixed ^= mixed >> np.uint64(27)
    mixed *= _SECOND
    mixed ^= mixed >> np.uint64(31)
    found: Words = mixed.sum(axis=1, dtype=np.uint64)
    return found
