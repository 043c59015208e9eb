"""NgramDrafter: proposes what came after the same last tokens before, in the request or in an earlier one.

    tokens of a row     a b c d . . . . . . a b c          the last three are found at the beginning,
    drafts                                        d . .    so what followed there is proposed

The end of every n-gram is entered in a table of hashes, the newest last, as soon as a token follows it. What the table
says is compared with the tokens themselves, so entries may collide or be out of date. All requests of a step are
looked up together, with array operations only; a step enters the few tokens that are new.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quire.cache.running import Lengths, Rows
from quire.spec.events import Namespace
from quire.spec.ids import Bools, Ids
from quire.speculative.drafter import Drafting, Drafts, no_drafts

_TABLE_BITS = 20
_HISTORY = 2**20
"""Tokens of ended requests that are remembered."""
_PRIME = np.uint64(0x9E3779B97F4A7C15)
_SHARED = np.uint64(1) << np.uint64(63)
_Hashes = npt.NDArray[np.uint64]


class NgramDrafter:
    """See the module. N-grams have `shortest` to `longest` tokens; the longest that is found proposes.

    `num_rows` are the cache's. With `shares`, requests of one namespace also find what earlier ones of it had.
    """

    def __init__(self, num_rows: int, *, shortest: int, longest: int, shares: bool = True) -> None:
        self._shortest, self._longest = shortest, longest
        self._places = _Places(shortest, longest)
        self._serials: Lengths = np.zeros(num_rows, dtype=np.int64)
        self._entered: Lengths = np.zeros(num_rows, dtype=np.int64)  # n-grams of each row that end before it
        self._spaces: Lengths = np.zeros(num_rows, dtype=np.int64)  # the namespace of each row, hashed
        self._history = _History(shortest, longest) if shares else None

    def propose(self, drafting: Drafting) -> Drafts:
        """The tokens after the newest earlier place of each request's longest n-gram that is found anywhere."""
        rows, width = drafting.batch.rows, drafting.tokens.shape[1]
        if not len(rows):
            return no_drafts(0)
        flat = drafting.tokens.reshape(-1)
        self._meet(drafting)
        base = rows * width
        self._enter(rows, base, drafting.known, flat)
        ends = base + drafting.known - 1
        most = drafting.most
        depth = int(most.max(initial=0))
        counts, tokens = np.zeros(len(rows), dtype=np.int64), np.zeros((len(rows), depth), dtype=np.int32)
        if not depth:
            return Drafts(counts, tokens)
        found, lengths = self._places.find(flat, flat, ends, drafting.known, _own_seeds(rows), base, ends)
        later = None
        if self._history is not None and self._history.num_texts:
            later, longer = self._history.find(flat, ends, drafting.known, self._spaces[rows])
            from_history = longer > lengths
        here = lengths > 0 if later is None else (lengths > 0) & ~from_history
        at = here.nonzero()[0]
        if len(at):
            after, period = found[at] + 1, ends[at] - found[at]
            tokens[at] = flat[after[:, None] + np.arange(depth) % period[:, None]]
            counts[at] = most[at]
        if self._history is not None and later is not None:
            at = from_history.nonzero()[0]
            if len(at):
                tokens[at], follow = self._history.after(later[at], depth)
                counts[at] = np.minimum(follow, most[at])
        return Drafts(counts, tokens)

    def ended(self, namespace: Namespace, tokens: Ids, num_cached: int) -> None:
        """What it computed itself can be found by later requests of its namespace; the rest was there before."""
        if self._history is not None:
            self._history.add(_space_of(namespace), tokens[max(0, num_cached - self._longest) :])

    def forget(self) -> None:
        """Ended requests are found no more."""
        if self._history is not None:
            self._history = _History(self._shortest, self._longest)

    def _meet(self, drafting: Drafting) -> None:
        """Rows that have another request than before begin anew."""
        rows, serials = drafting.batch.rows, drafting.batch.serials
        fresh = (self._serials[rows] != serials).nonzero()[0]
        for at in fresh.tolist():
            self._spaces[rows[at]] = _space_of(drafting.batch.kvs[at].namespace)
        self._entered[rows[fresh]] = 0
        self._serials[rows] = serials

    def _enter(self, rows: Rows, base: Lengths, known: Lengths, flat: Ids) -> None:
        """Enter the n-grams of these rows that a token follows since the last time."""
        before = self._entered[rows]
        counts = known - 1 - before
        owners = np.repeat(np.arange(len(rows)), counts)
        within = np.arange(len(owners)) + (before - (np.cumsum(counts) - counts))[owners]
        self._places.enter(flat, base[owners] + within, within + 1, _own_seeds(rows[owners]))
        self._entered[rows] = known - 1


class _Places:
    """A table from the hash of an n-gram to the place of its last token, in an array that the caller keeps."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest
        self._table = np.zeros(2**_TABLE_BITS, dtype=np.int64)  # the place + 1

    def enter(self, flat: Ids, ends: Lengths, lengths: Lengths, seeds: _Hashes) -> None:
        """The n-grams that end at these places, in the order in which newer ones replace older ones. Of place i, the
        `lengths[i]` tokens up to it are of one sequence."""
        for size, hashes in enumerate(self._hashes(flat, ends, seeds), start=self._shortest):
            if size > self._shortest and not np.count_nonzero(lengths < size):
                self._table[hashes] = ends + 1
            else:
                whole = lengths >= size
                self._table[hashes[whole]] = ends[whole] + 1

    def find(
        self,
        text: Ids,
        flat: Ids,
        ends: Lengths,
        lengths: Lengths,
        seeds: _Hashes,
        low: Lengths | int,
        high: Lengths | int,
    ) -> tuple[Lengths, Lengths]:
        """Where in `text`, from `low[i]` on and before `high[i]`, the longest n-gram ended that ends in `flat` at
        `ends[i]`, and its length: 0 if none is found. `lengths[i]` tokens up to there are of one sequence."""
        found, sizes = np.zeros(len(ends), dtype=np.int64), np.zeros(len(ends), dtype=np.int64)
        for size, hashes in enumerate(self._hashes(flat, ends, seeds), start=self._shortest):
            places = self._table[hashes] - 1
            right = (lengths >= size) & (places >= low + (size - 1)) & (places < high)
            at = right.nonzero()[0]
            for back in range(size):
                if not len(at):
                    break
                at = at[text[places[at] - back] == flat[ends[at] - back]]
            found[at], sizes[at] = places[at], size
        return found, sizes

    def _hashes(self, flat: Ids, ends: Lengths, seeds: _Hashes) -> list[npt.NDArray[np.intp]]:
        """Hashes of the n-grams that end at these places, by length, the shortest first."""
        state, found = seeds.copy(), []
        for back in range(self._longest):
            state ^= flat[np.maximum(ends - back, 0)].astype(np.uint64)
            state *= _PRIME
            state ^= state >> np.uint64(29)
            if back + 1 >= self._shortest:
                found.append((state >> np.uint64(64 - _TABLE_BITS)).astype(np.intp))
        return found


class _History:
    """The tokens of ended requests, one after the other; the oldest are overwritten."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._places = _Places(shortest, longest)
        self._tokens: Ids = np.zeros(2 * _HISTORY, dtype=np.int32)
        self._spaces: Lengths = np.zeros(2 * _HISTORY, dtype=np.int64)
        self._texts: Ids = np.zeros(2 * _HISTORY, dtype=np.int32)  # the number of each token's text
        self._end = 1  # place 0 is none
        self.num_texts = 0

    def add(self, space: int, tokens: Ids) -> None:
        """Add the last tokens of a text, in one piece."""
        tokens = tokens[-_HISTORY // 2 :]
        if self._end + len(tokens) > len(self._tokens):
            self._end = 1
        self.num_texts += 1
        places = slice(self._end, self._end + len(tokens))
        self._tokens[places], self._spaces[places], self._texts[places] = tokens, space, self.num_texts
        ends = np.arange(places.start, places.stop - 1, dtype=np.int64)  # the last token has none after it
        self._places.enter(self._tokens, ends, ends - places.start + 1, _shared_seeds(np.full(len(ends), space)))
        self._end = places.stop

    def find(self, flat: Ids, ends: Lengths, lengths: Lengths, spaces: Lengths) -> tuple[Lengths, Lengths]:
        """As `_Places.find`, of places in texts of the same namespace."""
        found, sizes = self._places.find(
            self._tokens, flat, ends, lengths, _shared_seeds(spaces), 1, len(self._tokens) - 1
        )
        first = np.maximum(found - sizes + 1, 0)
        same: Bools = (self._spaces[found] == spaces) & (self._texts[first] == self._texts[found])
        sizes[~(same & (self._texts[found + 1] == self._texts[found]))] = 0
        return found, sizes

    def after(self, places: Lengths, depth: int) -> tuple[Ids, Lengths]:
        """The `depth` tokens after each place, and how many of these belong to its text."""
        where = np.minimum(places[:, None] + np.arange(1, depth + 1), len(self._tokens) - 1)
        same = self._texts[where] == self._texts[places][:, None]
        return self._tokens[where], same.cumprod(axis=1).sum(axis=1)


def _own_seeds(rows: Rows) -> _Hashes:
    """Keep n-grams of different rows apart."""
    return rows.astype(np.uint64) * _PRIME


def _shared_seeds(spaces: Lengths) -> _Hashes:
    return spaces.astype(np.uint64) ^ _SHARED


def _space_of(namespace: Namespace) -> int:
    return hash(namespace) & (2**62 - 1)
