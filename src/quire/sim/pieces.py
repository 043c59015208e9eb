"""Pieces: text that is known by name and length only, and the tokens it stands for.

Published traces do not say what was written, only which parts were alike, and a generated workload only needs parts
that are alike. So a text is a sequence of pieces, and the tokens of a piece are a fixed function of its key and the
position inside it: nothing has to be stored, any request can be built alone, and two texts share the pieces they begin
with.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quire.spec.ids import Ids

VOCABULARY = 128_000
"""Token ids of pieces are below this, as in many models. Two different pieces agree in one position in 128,000."""

_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xD6E8FEB86659FD93)
_HALF = np.uint64(32)


class Piece(NamedTuple):
    """The first `length` tokens of the endless text named `key` (any 64-bit number)."""

    key: int
    length: int


def piece_key(*parts: int | str) -> int:
    """A key made of a few numbers and words, the same in every process. Different parts give different keys."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def num_tokens(pieces: Iterable[Piece]) -> int:
    """The length of a text."""
    return sum(piece.length for piece in pieces)


def tokens_of(pieces: Iterable[Piece]) -> Ids:
    """The tokens of a text, int32 `[num_tokens(pieces)]`. Vectorised: about 15 ns a token."""
    pieces = tuple(pieces)
    keys = np.array([piece.key for piece in pieces], dtype=np.uint64)
    lengths = np.array([piece.length for piece in pieces], dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    # Token i of a piece draws from key + i * step, so the difference to a plain count is one number for each piece.
    state = np.repeat(keys - starts.astype(np.uint64) * _STEP, lengths)
    state += _steps(1 << len(state).bit_length())[: len(state)]
    return _drawn(state)


@lru_cache(maxsize=32)
def _steps(length: int) -> npt.NDArray[np.uint64]:
    """Multiples of the step, as many as that."""
    return np.arange(length, dtype=np.uint64) * _STEP


def _drawn(state: npt.NDArray[np.uint64]) -> Ids:
    """A token id for each state, which is used up."""
    for _ in range(2):
        state ^= state >> _HALF
        state *= _MIX
    state >>= _HALF
    state *= np.uint64(VOCABULARY)
    state >>= _HALF
    return state.astype(np.int32)
