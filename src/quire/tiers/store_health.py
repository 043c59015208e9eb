"""StoreHealth: whether a store answers at all. To a lookup, a store that is down looks like an empty one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from quire.tiers.store import Answer
from quire.tiers.transfer import FAILED, GOOD, REFUSED, Lane, Transfer

_FAILURES = 3
"""Transfers in a row that the store did not answer. One alone may have met another writer, or a busy index."""


class StoreHealth:
    """Counts the records that the store could not give, take or look up (`refused`, per lane).

    `on_change(kind, is_lost)` is called once when several transfers in a row had no answer, and when the store answers
    again; `kind` is "read" or "write".
    """

    def __init__(self, on_change: Callable[[str, bool], None] | None = None) -> None:
        self.refused: Counter[Lane] = Counter(dict.fromkeys((Lane.LOOK, Lane.FETCH, Lane.ARCHIVE), 0))
        self._on_change = on_change
        self._failures = {"read": 0, "write": 0}

    @property
    def lost(self) -> tuple[str, ...]:
        """The kinds for which the store does not answer now: "read", "write", both or none."""
        return tuple(kind for kind, count in self._failures.items() if count >= _FAILURES)

    def ended(self, transfer: Transfer) -> None:
        """Count a transfer that has ended."""
        if transfer.lane is Lane.LOOK:
            answers = [answer for found in transfer.answers for answer in found]
            refused = sum(map(len, transfer.units)) if transfer.error else answers.count(Answer.RETRY)
            if answers or transfer.error:
                self._heard("read", bool(transfer.error) or refused == len(answers))
        elif transfer.lane in (Lane.FETCH, Lane.ARCHIVE):
            defects = [defect for found in transfer.defects for defect in found]
            refused = defects.count(REFUSED) + defects.count(FAILED)
            if defects or transfer.error:
                kind = "read" if transfer.lane is Lane.FETCH else "write"
                self._heard(kind, bool(transfer.error) or (bool(refused) and GOOD not in defects))
        else:
            return
        self.refused[transfer.lane] += refused

    def _heard(self, kind: str, failed: bool) -> None:
        before = self._failures[kind]
        self._failures[kind] = min(before + 1, _FAILURES) if failed else 0
        was_lost, is_lost = before >= _FAILURES, self._failures[kind] >= _FAILURES
        if was_lost != is_lost and self._on_change is not None:
            self._on_change(kind, is_lost)
