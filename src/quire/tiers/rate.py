"""Rate: measured speed; new measurements weigh most."""

from __future__ import annotations

_KEPT = 0.9  # weight of earlier measurements at each new one
_SPREAD = 0.3  # of the mean amount; where amounts vary less, the start is not identifiable


class Rate:
    """A line through measurements of (amount, seconds): a start, then a constant rate. None until one was added."""

    def __init__(self) -> None:
        # Of weights, amounts, seconds, squares of amounts, and amounts times seconds.
        self._sums: tuple[float, ...] = (0.0,) * 5

    def add(self, amount: float, seconds: float) -> None:
        """Add a measurement; one with a 0 is ignored. Where amounts hardly differ, the start is 0."""
        if amount > 0 and seconds > 0:
            new = (1.0, amount, seconds, amount * amount, amount * seconds)
            self._sums = tuple(was * _KEPT + now for was, now in zip(self._sums, new, strict=True))

    @property
    def known(self) -> bool:
        """Whether there is a measurement."""
        return self._sums[0] > 0

    @property
    def mean(self) -> float | None:
        """Amount per second, with the start."""
        return self._sums[1] / self._sums[2] if self.known else None

    @property
    def per_second(self) -> float | None:
        """Amount per second, without the start."""
        return 1 / self._line()[1] if self.known else None

    @property
    def start(self) -> float | None:
        """Seconds before the first unit."""
        return self._line()[0] if self.known else None

    def seconds(self, amount: float) -> float | None:
        """Expected seconds for an amount."""
        if not self.known:
            return None
        start, each = self._line()
        return start + each * amount

    def _line(self) -> tuple[float, float]:
        """Seconds at amount 0, and per unit."""
        amount, seconds, square, product = (total / self._sums[0] for total in self._sums[1:])
        variance = square - amount * amount
        each = seconds / amount
        slope = (product - amount * seconds) / variance if variance > (_SPREAD * amount) ** 2 else each
        return (seconds - slope * amount, slope) if 0 < slope < each else (0.0, each)
