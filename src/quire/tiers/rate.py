"""Rate: how fast something is, as measured; new measurements count most."""

from __future__ import annotations

_KEPT = 0.9  # weight of earlier measurements at each new one
_SPREAD = 0.3  # of the mean amount; where amounts vary less, a start cannot be told from the rest


class Rate:
    """Seconds for an amount: a start, and a constant rate behind it. All are None until something was measured.

    A line through the measurements, of which the newest counts most. Where amounts hardly differ, the start is 0.
    """

    def __init__(self) -> None:
        # Of weights, amounts, seconds, squares of amounts, and amounts times seconds.
        self._sums: tuple[float, ...] = (0.0,) * 5

    def add(self, amount: float, seconds: float) -> None:
        """An amount took these seconds. Where either is 0, nothing is learned."""
        if amount > 0 and seconds > 0:
            new = (1.0, amount, seconds, amount * amount, amount * seconds)
            self._sums = tuple(was * _KEPT + now for was, now in zip(self._sums, new, strict=True))

    @property
    def known(self) -> bool:
        """Whether anything was measured."""
        return self._sums[0] > 0

    @property
    def mean(self) -> float | None:
        """Amount per second, start included."""
        return self._sums[1] / self._sums[2] if self.known else None

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
        amount, seconds, square, product = (total / self._sums[0] for total in self._sums[1:])
        variance = square - amount * amount
        each = seconds / amount
        slope = (product - amount * seconds) / variance if variance > (_SPREAD * amount) ** 2 else each
        return (seconds - slope * amount, slope) if 0 < slope < each else (0.0, each)
