"""StoreHealth: whether a store answers. For a lookup, a store that is down is like an empty one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import chain

from quire.tiers.store import Answer
from quire.tiers.transfer import FAILED, GOOD, REFUSED, Lane, Transfer

_FAILURES = 3  # unanswered transfers in a row; a single one may be due to another writer or a busy index
_KINDS = {Lane.LOOK: "read", Lane.FETCH: "read", Lane.ARCHIVE: "write"}
_NO_ANSWER = (Answer.RETRY, REFUSED, FAILED)
_ANSWERS = (Answer.HIT, Answer.MISS, Answer.PENDING, GOOD)


class StoreHealth:
    """`refused` counts the records per lane that the store refused. `on_change(kind, is_lost)` is called when several
    transfers in a row had no answer, and when the store answers again; `kind` is "read" or "write"."""

    def __init__(self, on_change: Callable[[str, bool], None] | None = None) -> None:
        self.refused: Counter[Lane] = Counter(dict.fromkeys(_KINDS, 0))
        self._on_change = on_change
        self._failures = {"read": 0, "write": 0}

    @property
    def lost(self) -> tuple[str, ...]:
        """The kinds of transfers that the store does not answer now."""
        return tuple(kind for kind, count in self._failures.items() if count >= _FAILURES)

    def ended(self, transfer: Transfer) -> None:
        """Count a transfer that has ended."""
        kind = _KINDS.get(transfer.lane)
        if kind is None:
            return
        results = transfer.answers if transfer.lane is Lane.LOOK and not transfer.error else transfer.defects
        found = Counter(chain.from_iterable(results))
        refused = sum(found[result] for result in _NO_ANSWER)
        self.refused[transfer.lane] += refused
        if found or transfer.error:
            failed = bool(transfer.error) or (refused > 0 and not any(found[result] for result in _ANSWERS))
            before = kind in self.lost
            self._failures[kind] = min(self._failures[kind] + 1, _FAILURES) if failed else 0
            if (kind in self.lost) is not before and self._on_change is not None:
                self._on_change(kind, not before)
