"""Rate: how fast something is, learned from what was seen and forgetting what is long ago."""

from __future__ import annotations

_KEPT = 0.9  # of what was known counts, when something new is seen
_SPREAD = 0.3  # of the mean size, that sizes have to vary by before a start can be told from the rest


class Rate:
    """Seconds for an amount: a start, and then so much per second.

    A line through what was seen, of which the newest counts most. From amounts that hardly differ no start can be told;
    all of the time is then laid to the amount.
    """

    __slots__ = ("_amount", "_product", "_seconds", "_square", "_weight")

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Know nothing."""
        self._weight = self._amount = self._seconds = self._square = self._product = 0.0

    def add(self, amount: float, seconds: float) -> None:
        """So much took so long. What took no time, or was nothing, teaches nothing."""
        if amount <= 0 or seconds <= 0:
            return
        self._weight = self._weight * _KEPT + 1
        self._amount = self._amount * _KEPT + amount
        self._seconds = self._seconds * _KEPT + seconds
        self._square = self._square * _KEPT + amount * amount
        self._product = self._product * _KEPT + amount * seconds

    @property
    def known(self) -> bool:
        """Whether anything was seen."""
        return self._weight > 0

    @property
    def mean(self) -> float | None:
        """Amount per second, the start counted in."""
        return self._amount / self._seconds if self.known else None

    @property
    def per_second(self) -> float | None:
        """Amount per second, once it has started."""
        return 1 / self._line()[1] if self.known else None

    @property
    def start(self) -> float | None:
        """Seconds before the first of it."""
        return self._line()[0] if self.known else None

    def seconds(self, amount: float) -> float | None:
        """What an amount would take."""
        if not self.known:
            return None
        start, each = self._line()
        return start + each * amount

    def _line(self) -> tuple[float, float]:
        """Seconds at an amount of nothing, and for each more."""
        amount, seconds = self._amount / self._weight, self._seconds / self._weight
        variance = self._square / self._weight - amount * amount
        each = seconds / amount
        if variance <= (_SPREAD * amount) ** 2:
            return 0.0, each
        slope = (self._product / self._weight - amount * seconds) / variance
        if not 0 < slope < each:
            return 0.0, each
        return seconds - slope * amount, slope
