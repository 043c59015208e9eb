"""NgramDrafter: proposes what came after the same last tokens before, in the request or in an earlier one.

    tokens of a row     a b c d . . . . . . a b c          the last three are found at the beginning,
    drafts                                        d . .    so what followed there is proposed

Where an answer departs from what it copies, it often returns to it a little further on: a name is changed, or the value
of a key. So the place where the drafts became wrong is kept for a few tokens, and a single token that is found near it
is enough to go on from there:

    copied from         " k " : " v w " , x y
    tokens of a row     " k " : " n o m " ,            of all places with these last two, the one near `v` is taken
    drafts                                  x y

The end of every n-gram is entered in a table of hashes, the newest last, as soon as a token follows it. What the table
says is compared with the tokens themselves, so entries may collide or be out of date. All requests of a step are
looked up together; a step enters the few tokens that are new. An engine has this done by the compiled library, in one
call. The operations on arrays here do the same without a compiler, and tests compare both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from quire.cache.running import Lengths, Rows
from quire.spec.events import Namespace
from quire.spec.ids import Bools, Ids
from quire.spec.speculation import SpeculativeConfig
from quire.speculative.drafter import Drafting, Drafts, joined, no_drafts

_TABLE_BITS = 20
_HISTORY = 2**20
"""Tokens of ended requests that are remembered, and twice as many places for them."""
_MOST_TEXTS = 2**31 - 1
"""Numbers of ended requests, after which they begin again at 1: those of so long ago are forgotten."""
_RESUME_TOKENS = 8
"""Tokens without a draft after which a copy is given up."""
_NEAR = np.arange(16)
"""How far behind its end a copy may go on."""
_PRIME = np.uint64(0x9E3779B97F4A7C15)
_OTHER_PRIME = np.uint64(0xBF58476D1CE4E5B9)
_SHARED = np.uint64(1) << np.uint64(63)
_Hashes = npt.NDArray[np.uint64]


class Search(Protocol):
    """What enters and finds n-grams in place of this module, and has the same state in its arrays."""

    def drafts(
        self, tokens: Ids, rows: Rows, known: Lengths, most: Lengths, depth: int, *, finds_history: bool
    ) -> tuple[Lengths, Ids, Ids | None]:
        """`counts`, `tokens` and `parents` of `Drafts`, for requests as in `Drafting`; `depth` is the largest of
        `most`."""


SearchOf = Callable[[Mapping[str, npt.NDArray[Any]], Mapping[str, int]], Search | None]
"""The search with these arrays and numbers, by the names that kernels/native/ngrams.cpp gives them; None if there is
none."""


class _Query(NamedTuple):
    """The ends of some requests: of request i the `lengths[i]` tokens of `flat` up to place `ends[i]`."""

    flat: Ids
    ends: Lengths
    lengths: Lengths


class _Match(NamedTuple):
    """Where an n-gram of each request ended before, and how long it is; 0: nowhere."""

    places: Lengths
    sizes: Lengths
    is_own: bool


class NgramDrafter:
    """See the module. The longest n-gram that is found proposes, or the `topk` longest if drafts may branch.

    `num_rows` are the cache's. With `shares`, requests of one namespace also find what earlier ones of it had; with
    `resumes`, a copy that became wrong is taken up again near where it did. `search_of` gives what searches in place of
    operations on arrays.
    """

    def __init__(
        self,
        num_rows: int,
        config: SpeculativeConfig,
        *,
        shares: bool = True,
        resumes: bool = True,
        search_of: SearchOf | None = None,
    ) -> None:
        self._config = config
        self._search_of = search_of
        self._met: Lengths | None = None  # the serials of the last requests
        self._places = _Places(config)
        self._serials: Lengths = np.zeros(num_rows, dtype=np.int64)
        self._entered: Lengths = np.zeros(num_rows, dtype=np.int64)  # n-grams of each row that end before it
        self._spaces: Lengths = np.zeros(num_rows, dtype=np.int64)  # the namespace of each row, hashed
        self._history = _History(config) if shares else None
        self._copies = _Copies(num_rows) if resumes else None
        self._search = self._new_search()

    def propose(self, drafting: Drafting) -> Drafts:
        """What came after the newest earlier place of the longest n-gram; of equal ones, that of the request itself."""
        rows, depth = drafting.batch.rows, int(drafting.most.max(initial=0))
        if drafting.batch.serials is not self._met:
            self._meet(drafting)
        if self._search is not None:
            finds = self._history is not None and self._history.num_texts > 0
            about = drafting.tokens, rows, drafting.known, drafting.most, depth
            return Drafts(*self._search.drafts(*about, finds_history=finds))
        query = _Query(
            drafting.tokens.reshape(-1), rows * drafting.tokens.shape[1] + drafting.known - 1, drafting.known
        )
        self._enter(rows, query)
        if not depth:
            return no_drafts(len(rows))
        matches = [*self._matches(rows, query)]
        if self._copies is not None:
            matches.insert(0, self._copies.resumed(rows, query))
        every, num_chains = np.arange(len(rows)), self._config.topk
        order = np.argsort([-match.sizes for match in matches], axis=0, kind="stable")[:num_chains]
        if self._copies is not None:
            self._copies.took(rows, query, matches, order[0])
        tokens = np.zeros((len(rows), num_chains, depth), dtype=np.int32)
        counts = np.zeros((len(rows), num_chains), dtype=np.int64)
        for place, best in enumerate(order):
            for at, match in enumerate(matches):
                some = every[(best == at) & (match.sizes > 0)]
                if len(some):
                    tokens[some, place], counts[some, place] = self._after(match, query, some, depth)
        counts = np.minimum(counts, drafting.most[:, None])
        if num_chains == 1:
            return Drafts(counts[:, 0], tokens[:, 0])
        return joined(tokens, counts, self._config.num_draft_tokens - 1)

    def ended(self, namespace: Namespace, tokens: Ids, num_cached: int) -> None:
        """What it computed itself can be found by later requests of its namespace; the rest was there before."""
        if self._history is not None:
            self._history.add(_space_of(namespace), tokens[max(0, num_cached - self._config.prompt_lookup_max) :])

    def clear(self, namespace: Namespace | None) -> None:
        """Ended requests are found no more."""
        if self._history is not None and namespace is not None:
            self._history.delete(_space_of(namespace))
        elif self._history is not None:
            self._history = _History(self._config)
            self._search = self._new_search()

    def _new_search(self) -> Search | None:
        """What searches in place of operations on arrays, on the arrays of now."""
        if self._search_of is None:
            return None
        config, is_tree = self._config, self._config.branches
        arrays = {"own": self._places.table, "spaces": self._spaces, "entered": self._entered}
        if self._history is not None:
            arrays |= self._history.arrays()
        if self._copies is not None:
            arrays |= self._copies.arrays()
        numbers = {
            "history_size": 2 * _HISTORY,
            "shortest": config.prompt_lookup_min,
            "longest": config.prompt_lookup_max,
            "table_bits": _TABLE_BITS,
            "resume_tokens": _RESUME_TOKENS,
            "near": len(_NEAR) if self._copies is not None else 0,
            "num_chains": config.topk,
            "most_nodes": config.num_draft_tokens - 1 if is_tree else 0,
        }
        return self._search_of(arrays, numbers)

    def _meet(self, drafting: Drafting) -> None:
        """Rows that have another request than before begin anew."""
        rows, serials = drafting.batch.rows, drafting.batch.serials
        fresh = (self._serials[rows] != serials).nonzero()[0]
        for at in fresh.tolist():
            self._spaces[rows[at]] = _space_of(drafting.batch.kvs[at].namespace)
        self._entered[rows[fresh]] = 0
        if self._copies is not None:
            self._copies.clear(rows[fresh])
        self._serials[rows] = self._met = serials

    def _enter(self, rows: Rows, query: _Query) -> None:
        """Enter the n-grams of these rows that a token follows since the last time."""
        before, after = self._entered[rows], query.lengths - 1
        counts = after - before
        owners = np.repeat(np.arange(len(rows)), counts)
        within = np.arange(len(owners)) + (before - (np.cumsum(counts) - counts))[owners]
        ends = (query.ends - after)[owners] + within
        self._places.enter(_Query(query.flat, ends, within + 1), _own_seeds(rows[owners]))
        self._entered[rows] = after

    def _matches(self, rows: Rows, query: _Query) -> Iterator[_Match]:
        """The request's own before those of the history, so that they are taken if they are as long."""
        low = query.ends - query.lengths + 1
        found = [(self._places.find(query.flat, query, _own_seeds(rows), low, query.ends), True)]
        if self._history is not None and self._history.num_texts:
            found.append((self._history.find(query, self._spaces[rows]), False))
        for (places, sizes), is_own in found:
            if self._config.branches:
                yield from (_Match(*each, is_own) for each in zip(places, sizes, strict=True))
            else:
                best, each = sizes.argmax(axis=0), np.arange(len(rows))
                yield _Match(places[best, each], sizes[best, each], is_own)

    def _after(self, match: _Match, query: _Query, some: Rows, depth: int) -> tuple[Ids, Lengths]:
        """The `depth` tokens after the match of some requests, and how many of these may be proposed. What ends with
        the request's last token is repeated."""
        places = match.places[some]
        if match.is_own:
            period = query.ends[some] - places
            found = query.flat[places[:, None] + 1 + np.arange(depth) % period[:, None]]
            return found, np.full(len(some), depth)
        assert self._history is not None
        return self._history.after(places, depth)


_Found = tuple[Lengths, Lengths]
"""Places of n-grams, and their sizes, 0 where none is found: `[sizes, requests]`, the shortest first."""


class _Copies:
    """What each row's text is a copy of, as places counted from the beginning of the row; 0: of nothing.

    While a row copies, its last token is expected `_sources` plus as many places further as it has more than `_lengths`
    tokens. Where it `_departed`, the source stays at the first token that is another.
    """

    def __init__(self, num_rows: int) -> None:
        self._sources: Lengths = np.zeros(num_rows, dtype=np.int64)
        self._lengths: Lengths = np.zeros(num_rows, dtype=np.int64)
        self._departed: Bools = np.zeros(num_rows, dtype=np.bool_)

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Its state, as a `Search` names it."""
        return {"sources": self._sources, "lengths": self._lengths, "departed": self._departed}

    def clear(self, rows: Rows) -> None:
        """Other requests begin in these rows."""
        self._sources[rows] = 0

    def resumed(self, rows: Rows, query: _Query) -> _Match:
        """Where the source goes on with the last token or, rather, the last two."""
        more, departed = query.lengths - self._lengths[rows], self._departed[rows]
        self._sources[rows[departed & (more > _RESUME_TOKENS)]] = 0
        self._sources[rows] += np.where((self._sources[rows] > 0) & ~departed, more, 0)
        self._lengths[rows[~departed]] = query.lengths[~departed]
        sources, begin = self._sources[rows], query.ends - query.lengths + 1
        where = (begin + sources)[:, None] + _NEAR
        inside = (where < query.ends[:, None]) & (sources > 0)[:, None]
        where = np.minimum(where, query.ends[:, None])
        is_last = (query.flat[where] == query.flat[query.ends][:, None]) & inside
        is_second = query.flat[where - 1] == query.flat[query.ends - 1][:, None]
        sizes = is_last * (1 + is_second)
        best = sizes.argmax(axis=1)
        each = np.arange(len(rows))
        return _Match(where[each, best], sizes[each, best], is_own=True)

    def took(self, rows: Rows, query: _Query, matches: Sequence[_Match], best: Rows) -> None:
        """Request i proposes what `matches[best[i]]` found."""
        each = np.arange(len(rows))
        places, sizes = (
            np.array(part)[best, each] for part in ([m.places for m in matches], [m.sizes for m in matches])
        )
        is_own = np.array([match.is_own for match in matches])[best] & (sizes > 0)
        self._sources[rows[(sizes > 0) & ~is_own]] = 0
        own = rows[is_own]
        self._sources[own] = (places - (query.ends - query.lengths + 1))[is_own]
        self._lengths[own] = query.lengths[is_own]
        self._departed[rows] = sizes == 0


class _Places:
    """A table from the hash of an n-gram to the place of its last token, in an array that the caller keeps."""

    def __init__(self, config: SpeculativeConfig) -> None:
        shortest, longest = config.prompt_lookup_min, config.prompt_lookup_max
        self.table = np.zeros(2**_TABLE_BITS, dtype=np.int64)  # the place + 1
        self._sizes = np.arange(shortest, longest + 1)[:, None]
        self._backs = np.arange(longest)[:, None]
        self._factors = np.cumprod(np.full((longest, 1), _PRIME))
        self._beyond: Bools = self._backs[:, 0] >= self._sizes[..., None]

    def enter(self, query: _Query, seeds: _Hashes) -> None:
        """The n-grams that end at these places; later ones replace earlier ones."""
        whole = query.lengths >= self._sizes
        cells = self._cells(self._last(query), seeds)
        self.table[cells[whole]] = np.broadcast_to(query.ends + 1, whole.shape)[whole]

    def find(self, text: Ids, query: _Query, seeds: _Hashes, low: Lengths | int, high: Lengths | int) -> _Found:
        """Where in `text`, from `low[i]` on and before `high[i]`, the n-grams ended with which request i ends."""
        last = self._last(query)
        places = self.table[self._cells(last, seeds)] - 1
        found = (query.lengths >= self._sizes) & (places >= low + (self._sizes - 1)) & (places < high)
        if np.count_nonzero(found):
            there = text[np.maximum(places[..., None] - self._backs[:, 0], 0)]
            found &= ((there == last.T) | self._beyond).all(axis=2)
        return places, found * self._sizes

    def _last(self, query: _Query) -> Ids:
        """The last tokens at each place, the newest first, `[longest, places]`; what is before the first one is any."""
        last: Ids = query.flat[np.maximum(query.ends - self._backs, 0)]
        return last

    def _cells(self, last: Ids, seeds: _Hashes) -> npt.NDArray[np.intp]:
        """Where the n-grams of each size with these last tokens are in the table, `[sizes, places]`."""
        state = (last.astype(np.uint64) * self._factors[:, None]).cumsum(axis=0)[self._sizes[0, 0] - 1 :]
        state = (state ^ seeds) * _PRIME
        state ^= state >> np.uint64(29)
        state *= _PRIME
        return (state >> np.uint64(64 - _TABLE_BITS)).astype(np.intp)


class _History:
    """The tokens of ended requests, one after the other; the oldest are overwritten."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._places = _Places(config)
        self._tokens: Ids = np.zeros(2 * _HISTORY, dtype=np.int32)
        self._spaces: Lengths = np.zeros(2 * _HISTORY, dtype=np.int64)
        self._texts: Ids = np.zeros(2 * _HISTORY, dtype=np.int32)  # the number of each token's text
        self._end = 1  # place 0 is none
        self.num_texts = 0

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Its state, as a `Search` names it."""
        found = {"shared": self._places.table, "history": self._tokens, "texts": self._texts}
        return {**found, "history_spaces": self._spaces}

    def add(self, space: int, tokens: Ids) -> None:
        """Add the last tokens of a text, in one piece."""
        tokens = tokens[-_HISTORY // 2 :]
        if self._end + len(tokens) > len(self._tokens):
            self._end = 1
        self.num_texts = self.num_texts % _MOST_TEXTS + 1
        first, stop = self._end, self._end + len(tokens)
        self._tokens[first:stop], self._spaces[first:stop], self._texts[first:stop] = tokens, space, self.num_texts
        ends = np.arange(first, stop - 1, dtype=np.int64)  # the last token has none after it
        self._places.enter(_Query(self._tokens, ends, ends - first + 1), _shared_seeds(np.full(len(ends), space)))
        self._end = stop

    def delete(self, space: int) -> None:
        """Delete the texts of a namespace."""
        where = self._spaces == space
        self._tokens[where], self._spaces[where] = 0, -1

    def find(self, query: _Query, spaces: Lengths) -> _Found:
        """As `_Places.find`, of places in texts of the same namespace."""
        found, sizes = self._places.find(self._tokens, query, _shared_seeds(spaces), 1, len(self._tokens) - 1)
        if np.count_nonzero(sizes):
            texts = self._texts[found]
            same = (self._spaces[found] == spaces) & (self._texts[found - sizes + 1] == texts)
            sizes[~(same & (self._texts[np.minimum(found + 1, len(self._texts) - 1)] == texts))] = 0
        return found, sizes

    def after(self, places: Lengths, depth: int) -> tuple[Ids, Lengths]:
        """The `depth` tokens after each place, and how many of these belong to its text."""
        where = np.minimum(places[:, None] + np.arange(1, depth + 1), len(self._tokens) - 1)
        same = self._texts[where] == self._texts[places][:, None]
        return self._tokens[where], same.cumprod(axis=1).sum(axis=1)


def _own_seeds(rows: Rows) -> _Hashes:
    """Keep n-grams of different rows apart. The factor is another than that of tokens: equal ones would cancel out."""
    return (rows.astype(np.uint64) + np.uint64(1)) * _OTHER_PRIME


def _shared_seeds(spaces: Lengths) -> _Hashes:
    return spaces.astype(np.uint64) ^ _SHARED


def _space_of(namespace: Namespace) -> int:
    return hash(namespace) & (2**62 - 1)
