"""Endings: which last tokens of outputs are frequent. Models end a call of a tool otherwise than an answer."""

from __future__ import annotations

CLASSES = 4
"""Class 0 has all tokens that are no frequent ending."""
_COUNTED = 12  # tokens, at most: one that ends more than a 13th of the outputs is always counted
_MEMORY = 4096  # outputs after which each counts half
_FREQUENT = 8  # times that a token is counted before it is a class of its own


class Endings:
    """Counts last tokens (Misra and Gries), and gives the most frequent a class each. O(1), and bounded memory."""

    def __init__(self) -> None:
        self._counts: dict[bytes, int] = {}
        self._classes: dict[bytes, int] = {}
        self._num_counted = 0

    def class_of(self, token: bytes) -> tuple[int, bool]:
        """Count an ending. Returns its class, and whether the class was another token's until now."""
        if not token:
            return 0, False
        self._num_counted += 1
        if self._num_counted > _MEMORY:  # so that others become frequent, however many there were before
            self._num_counted //= 2
            self._counts = {each: times // 2 for each, times in self._counts.items() if times > 1}
        counts = self._counts
        if token in counts:
            counts[token] += 1
        elif len(counts) < _COUNTED:
            counts[token] = 1
        else:
            self._counts = {each: times - 1 for each, times in counts.items() if times > 1}
        known = self._classes.get(token)
        if known is not None:
            return known, False
        if self._counts.get(token, 0) < _FREQUENT:
            return 0, False
        if len(self._classes) < CLASSES - 1:
            self._classes[token] = len(self._classes) + 1
            return self._classes[token], False
        rarest = min(self._classes, key=lambda each: self._counts.get(each, 0))
        if self._counts[token] < 2 * self._counts.get(rarest, 0) + _FREQUENT:
            return 0, False
        self._classes[token] = self._classes.pop(rarest)
        return self._classes[token], True
