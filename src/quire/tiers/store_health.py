"""StoreHealth: whether a store answers at all. A store that is down looks like an empty one to those who ask it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from quire.tiers.store import Answer
from quire.tiers.transfer import FAILED, GOOD, REFUSED, Lane, Transfer

_FAILURES = 3
"""Moves in a row to which the store had no answer. One alone may have met another writer, or a busy index."""


class StoreHealth:
    """Hears of every move that has ended. `refused` counts records by link that the store could neither give, nor take,
    nor say anything of; `on_change(kind, is_lost)` is called once when it has answered nothing for some moves in a row,
    and when it answers again: `kind` is "read" or "write".
    """

    def __init__(self, on_change: Callable[[str, bool], None] | None = None) -> None:
        self.refused: Counter[Lane] = Counter(dict.fromkeys((Lane.LOOK, Lane.FETCH, Lane.ARCHIVE), 0))
        self._on_change = on_change
        self._failures = {"read": 0, "write": 0}

    @property
    def lost(self) -> tuple[str, ...]:
        """For what the store is lost now: "read", "write", both, or nothing."""
        return tuple(kind for kind, count in self._failures.items() if count >= _FAILURES)

    def ended(self, move: Transfer) -> None:
        """A move has ended."""
        if move.lane is Lane.LOOK:
            answers = [answer for found in move.answers for answer in found]
            refused = sum(map(len, move.units)) if move.error else answers.count(Answer.RETRY)
            if answers or move.error:
                self._heard("read", bool(move.error) or refused == len(answers))
        elif move.lane in (Lane.FETCH, Lane.ARCHIVE):
            defects = [defect for found in move.defects for defect in found]
            refused = defects.count(REFUSED) + defects.count(FAILED)
            if defects or move.error:
                kind = "read" if move.lane is Lane.FETCH else "write"
                self._heard(kind, bool(move.error) or (bool(refused) and GOOD not in defects))
        else:
            return
        self.refused[move.lane] += refused

    def _heard(self, kind: str, failed: bool) -> None:
        before = self._failures[kind]
        self._failures[kind] = min(before + 1, _FAILURES) if failed else 0
        was_lost, is_lost = before >= _FAILURES, self._failures[kind] >= _FAILURES
        if was_lost != is_lost and self._on_change is not None:
            self._on_change(kind, is_lost)
