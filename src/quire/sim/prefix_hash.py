"""Prefix hashes: a 64-bit hash of the content of a token's slot, from the namespace and all tokens up to this one.

Token i of a sequence has the hash `h[i] = A * h[i - 1] + m(t[i])` modulo 2^64, with `h[-1]` made from the namespace, an
odd `A`, and a mixing `m` that is one-to-one. For all tokens at once it is two multiplications and a running sum, some
nanoseconds per token. Two sequences that differ in one token have different hashes from there on, because `A` has an
inverse. Any others agree with a chance of about 2^-64 per slot.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from quire.prefix.hashing import namespace_seed
from quire.spec.events import Namespace
from quire.spec.ids import Ids

Hashes = npt.NDArray[np.uint64]

_A = 0x5851F42D4C957F2D
ODD_STEP = np.uint64(0x9E3779B97F4A7C15)
"""2^64 by the golden ratio. Its multiples are far from each other."""
_MIX = np.uint64(0xD6E8FEB86659FD93)
_HALF = np.uint64(32)


class PrefixHasher:
    """Hashes of sequences of up to `longest` tokens, with tables for that length."""

    def __init__(self, longest: int) -> None:
        self._powers = _powers(_A, longest)
        self._inverses = _powers(pow(_A, -1, 1 << 64), longest)
        self._seeds: dict[Namespace, np.uint64] = {}

    def hashes(self, namespace: Namespace, tokens: Ids) -> Hashes:
        """The hash of each token, uint64 `[num_tokens]`."""
        if namespace not in self._seeds:
            self._seeds[namespace] = np.uint64(int.from_bytes(namespace_seed(namespace)[:8], "little"))
        found = _mixed(tokens.astype(np.uint64))
        found *= self._inverses[: len(tokens)]
        np.cumsum(found, out=found)
        found += self._seeds[namespace]
        found *= self._powers[: len(tokens)]
        return found


def page_digests(hashes: Hashes) -> Hashes:
    """The digest of each page, uint64 `[pages]`, from the hashes or the tokens of its slots, `[pages, slots]`. It is a
    sum in which every slot has an odd weight of its own, so that one wrong slot always changes it."""
    found: Hashes = hashes @ _weights(hashes.shape[1])
    return found


@cache
def _weights(slots: int) -> Hashes:
    return _mixed(np.arange(1, slots + 1, dtype=np.uint64)) | np.uint64(1)


def _powers(base: int, count: int) -> Hashes:
    """`base ** 1, base ** 2, ...` modulo 2^64."""
    return np.multiply.accumulate(np.full(count, base, dtype=np.uint64))


def _mixed(numbers: Hashes) -> Hashes:
    """A one-to-one mixing of 64-bit numbers, in place."""
    numbers += np.uint64(1)
    numbers *= ODD_STEP
    return mix_bits(numbers)


def mix_bits(numbers: Hashes) -> Hashes:
    """A one-to-one mixing of the bits of each number, in place. 0 stays 0."""
    for _ in range(2):
        numbers ^= numbers >> _HALF
        numbers *= _MIX
    return numbers
