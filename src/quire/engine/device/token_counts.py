"""TokenCounts: the distinct tokens of a sequence, kept while it grows."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quire.spec.ids import Ids

_FEW = 16  # tokens that are entered one by one


class TokenCounts:
    """Tokens of a sequence up to `end`: distinct `ids`, ascending, and how often each is there, both int64. A token
    more costs an insertion, and no look at the others."""

    __slots__ = ("counts", "end", "ids")

    def __init__(self) -> None:
        self.ids: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self.counts: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self.end = 0

    def advance(self, tokens: Ids) -> None:
        """Count `tokens`, int32, which go on where the counted ones end; a shorter sequence is counted anew."""
        if not self.end <= len(tokens) <= self.end + _FEW:
            ids, self.counts = np.unique(tokens, return_counts=True)
            self.ids = ids.astype(np.int64)
        else:
            for token in tokens[self.end :].tolist():
                self._enter(token)
        self.end = len(tokens)

    def _enter(self, token: int) -> None:
        at = int(self.ids.searchsorted(token))
        if at < len(self.ids) and self.ids[at] == token:
            self.counts[at] += 1
        else:
            self.ids, self.counts = np.insert(self.ids, at, token), np.insert(self.counts, at, 1)

    def ahead(self, tokens: Ids) -> TokenCounts:
        """The counts of a longer sequence; these stay."""
        found = TokenCounts()
        found.ids, found.counts, found.end = self.ids, self.counts.copy(), self.end
        found.advance(tokens)
        return found
