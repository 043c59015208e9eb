"""Drafts of n-grams by the library: what `speculative/ngram.py` computes by operations on arrays, in one call."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.kernels.native.library import address_of, native

_P, _I64 = ctypes.c_void_p, ctypes.c_int64
_Array = npt.NDArray[Any]


class _Ngrams(ctypes.Structure):
    _fields_ = (
        *((name, _P) for name in ("own", "shared", "history", "texts", "history_spaces")),
        *((name, _P) for name in ("spaces", "entered", "sources", "lengths", "departed")),
        *((name, _I64) for name in ("history_size", "shortest", "longest", "table_bits")),
        *((name, _I64) for name in ("resume_tokens", "near", "num_chains", "most_nodes")),
    )


class _Search(ctypes.Structure):
    _fields_ = (
        *((name, _P if name == "flat" else _I64) for name in ("flat", "width")),
        *((name, _P) for name in ("rows", "known", "most")),
        *((name, _I64) for name in ("count", "depth", "finds_history")),
        *((name, _P) for name in ("tokens", "parents", "counts")),
    )


class NativeNgrams:
    """The search of one drafter. `arrays` are its state, contiguous, which each search changes in place, and `numbers`
    what does not change, both by the names that ngrams.cpp gives them; arrays that are left out are not there."""

    def __init__(self, library: ctypes.CDLL, arrays: Mapping[str, _Array], numbers: Mapping[str, int]) -> None:
        self._search: Any = library.quire_ngram_drafts
        self._search.argtypes, self._search.restype = (_P, _P), None
        self._kept = dict(arrays)
        self._state = _Ngrams(**{name: address_of(array) for name, array in arrays.items()}, **numbers)
        self._nodes = int(self._state.most_nodes)
        self._step = _Search()
        self._places = ctypes.addressof(self._state), ctypes.addressof(self._step)
        self._last: _Array | None = None
        self._about = np.zeros(
            (4, len(arrays["spaces"])), dtype=np.int64
        )  # rows, tokens, limits and drafts of requests
        self._step.rows, self._step.known, self._step.most, self._step.counts = map(address_of, self._about)
        self._make_room(1)

    def drafts(
        self, tokens: _Array, rows: _Array, known: _Array, most: _Array, depth: int, *, finds_history: bool
    ) -> tuple[_Array, _Array, _Array | None]:
        """Enter what is new of requests `rows[i]`, which have the first `known[i]` tokens of their row of `tokens`,
        int32 `[rows, width]`, contiguous. Returns how many drafts each has, int64 `[requests]`, at most `most[i]` or
        `depth` tokens ahead; the drafts, int32 `[requests, depth or nodes]`; and where they may branch, what each
        follows."""
        step, count = self._step, len(rows)
        if tokens is not self._last:
            assert tokens.dtype == np.int32 and tokens.flags.c_contiguous
            self._last, step.flat, step.width = tokens, address_of(tokens), tokens.shape[1]
        width = self._nodes or depth
        if count * width > self._found.shape[1]:
            self._make_room(width)
        about, found = self._about, self._found[:, : count * width]
        about[0, :count], about[1, :count], about[2, :count] = rows, known, most
        step.count, step.depth, step.finds_history = count, depth, finds_history
        self._search(*self._places)
        drafts, parents = found.reshape(2, count, width).copy()
        return about[3, :count].copy(), drafts, parents if self._nodes else None

    def _make_room(self, width: int) -> None:
        """For `width` drafts of each row. A call passes no addresses: they cost as much as the search of a request."""
        self._found = np.zeros((2, self._about.shape[1] * width), dtype=np.int32)
        self._step.tokens, self._step.parents = map(address_of, self._found)


def native_ngrams(arrays: Mapping[str, _Array], numbers: Mapping[str, int]) -> NativeNgrams | None:
    """The search with this state by the library; None if there is none."""
    library = native().library
    return None if library is None else NativeNgrams(library, arrays, numbers)
