"""Budget: a share of the time that passes, saved up for work that is worth its overhead."""

from __future__ import annotations

import math

_MOST_S = 0.02
"""Never saved up more: a burst of checks delays no step by more than this."""

LEAST_S = 0.002
"""Work begins when so much is saved up."""

_MOST_BESIDE = 0.75
"""Part of the share that pays for what each step needs. The rest is for looking at pages, also with short steps."""

_NEWEST = 0.2


class Budget:
    """Seconds for work, `share` of those that pass; infinite for a share of `math.inf`. What an item costs is
    learned."""

    def __init__(self, share: float) -> None:
        self.share = share
        self.saved_s = math.inf if math.isinf(share) else 0.0
        self.spent_s = 0.0
        self._beside_s = 0.0  # not taken from savings yet
        self._item_s = [0.0, 0.0]  # on the host, and on a device that computes asynchronously
        self._at: float | None = None

    def earn(self, now: float) -> bool:
        """Add what was earned until `now`. Returns whether there is enough to begin."""
        if self._at is not None and self.share < math.inf:
            earned = (now - self._at) * self.share
            taken = min(self._beside_s, earned * _MOST_BESIDE)
            self._beside_s = min(_MOST_S, self._beside_s - taken)
            self.saved_s = min(_MOST_S, self.saved_s + earned - taken)
        self._at = now
        return self.saved_s >= LEAST_S

    def items(self) -> int:
        """Items for which it suffices, at least 8: a few say what one costs."""
        if math.isinf(self.saved_s):
            return 2**31
        each = sum(self._item_s)
        return max(8, int(self.saved_s / each)) if each else 8

    def beside(self, seconds: float) -> None:
        """What a step needs took this long. It is taken from what is earned later."""
        self.spent_s += seconds
        self._beside_s += seconds

    def spend(self, seconds: float, items: int = 0, *, on_device: bool = False) -> None:
        """Work took this long, for so many items."""
        self.spent_s += seconds
        self.saved_s -= seconds
        if items:
            before = self._item_s[on_device]
            self._item_s[on_device] += (seconds / items - before) * (_NEWEST if before else 1.0)
