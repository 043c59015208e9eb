"""Rate: how fast something is, as measured; new measurements count most."""

from __future__ import annotations

_KEPT = 0.9  # weight of earlier measurements at each new one
_SPREAD = 0.3  # of the mean amount; where amounts vary less, a start cannot be told from the rest


class Rate:
    """Seconds for an amount: a start, and a constant rate behind it.

    A line through the measurements, of which the newest counts most. Where amounts hardly differ, the start is 0.
    """

    __slots__ = ("_amount", "_product", "_seconds", "_square", "_weight")

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Drop all measurements."""
        self._weight = self._amount = self._seconds = self._square = self._product = 0.0

    def add(self, amount: float, seconds: float) -> None:
        """An amount took these seconds. Where either is 0, nothing is learned."""
        if amount <= 0 or seconds <= 0:
            return
        self._weight = self._weight * _KEPT + 1
        self._amount = self._amount * _KEPT + amount
        self._seconds = self._seconds * _KEPT + seconds
        self._square = self._square * _KEPT + amount * amount
        self._product = self._product * _KEPT + amount * seconds

    @property
    def known(self) -> bool:
        """Whether anything was measured."""
        return self._weight > 0

    @property
    def mean(self) -> float | None:
        """Amount per second, start included."""
        return self._amount / self._seconds if self.known else None

    @property
    def per_second(self) -> float | None:
        """Amount per second, behind the start."""
        return 1 / self._line()[1] if self.known else None

    @property
    def start(self) -> float | None:
        """Seconds before the first unit."""
        return self._line()[0] if self.known else None

    def seconds(self, amount: float) -> float | None:
        """Seconds that an amount would take."""
        if not self.known:
            return None
        start, each = self._line()
        return start + each * amount

    def _line(self) -> tuple[float, float]:
        """Seconds at an amount of 0, and for each unit more."""
        amount, seconds = self._amount / self._weight, self._seconds / self._weight
        variance = self._square / self._weight - amount * amount
        each = seconds / amount
        if variance <= (_SPREAD * amount) ** 2:
            return 0.0, each
        slope = (self._product / self._weight - amount * seconds) / variance
        if not 0 < slope < each:
            return 0.0, each
        return seconds - slope * amount, slope
