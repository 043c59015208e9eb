"""BreakEven: whether bytes are worth moving, or their tokens are computed again sooner. Measured, never configured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from quire.tiers.moves import Link
from quire.tiers.rate import Rate

TINY_STEP: Final = 64
"""Tokens. Smaller steps are mostly launches, and say nothing about prompts."""

_ROW_OF_LOSSES = 16
_FIRST_REST = 1.0  # seconds after which a link that is off is tried again; each time twice as many
_LONGEST_REST = 300.0
_LEARNING_WAIT = 1.0  # seconds a request may wait for storage while nothing is known


class BreakEven:
    """Compares the time to move a prefix with the time to compute it, both from what was measured.

    While nothing is known of either, moving is tried. A link that loses so many decisions in a row turns itself off and
    calls `on_change(link, why)` once. That forbids nothing that pays: a decision that it wins turns it on again, and
    calls `on_change(link, "")`. As what always loses is not measured any more, it is tried again after a time that
    doubles: what was known of it is then forgotten, one decision is for it, and the next measurement counts alone.

    Of a FETCH, which ends on the host, the LOAD behind it is counted in. A LOAD that was never measured is taken to be
    as fast as a SAVE, which goes the same way back and comes first.
    """

    def __init__(
        self,
        seconds: Callable[[], float],
        *,
        losses: int = _ROW_OF_LOSSES,
        first_rest: float = _FIRST_REST,
        tiny_step: int = TINY_STEP,
        on_change: Callable[[Link, str], None] | None = None,
    ) -> None:
        self._seconds = seconds
        self._losses = losses
        self._first_rest = first_rest
        self._tiny_step = tiny_step
        self._on_change = on_change
        self._computed = Rate()
        self._links = {link: _LinkState(first_rest) for link in Link}
        self.turned_off_count = 0  # times that any link turned itself off, trials that failed counted in

    # -- what is measured

    def computed(self, tokens: int, seconds: float) -> None:
        """A step computed so many prompt tokens."""
        if tokens >= self._tiny_step:
            self._computed.add(tokens, seconds)

    def moved(self, link: Link, num_bytes: int, seconds: float) -> None:
        """A move of so many bytes took so long, without its wait in a queue."""
        self._links[link].rate.add(num_bytes, seconds)

    def knows(self, link: Link) -> bool:
        """Whether a link was measured, since it was last tried."""
        return self._links[link].rate.known

    # -- what follows from it

    def compute_seconds(self, tokens: int) -> float | None:
        """What computing so many tokens takes. None: not known."""
        rate = self._computed.mean
        return None if rate is None else tokens / rate

    def load_seconds(self, link: Link, num_bytes: int, queued_bytes: int = 0) -> float | None:
        """What it takes until the bytes can be used on the device, behind others on the link. None: not known."""
        seconds = self._rate(link).seconds(num_bytes + queued_bytes)
        if seconds is None:
            return None
        return seconds + self._seconds_after(link, num_bytes)

    def worth(self, link: Link, tokens: int, num_bytes: int, queued_bytes: int = 0) -> bool:
        """Decide for one request: whether so many tokens are moved and not computed. Counts as a decision."""
        state = self._links[link]
        compute = self.compute_seconds(tokens)
        if compute is None:
            return True
        load = self.load_seconds(link, num_bytes, queued_bytes)
        if load is None:
            return not state.why_off or self._tries(state)
        # A queue goes by; it says nothing about the link.
        alone = self.load_seconds(link, num_bytes)
        if alone is not None and alone <= compute:
            self._win(link, state)
            return load <= compute
        self._lose(link, state, compute, num_bytes)
        return bool(state.why_off) and self._may_pay(link, compute, num_bytes) and self._tries(state)

    def deadline(self, tokens: int, num_bytes: int) -> float:
        """Seconds that a request may wait for storage before computing would have been quicker."""
        compute = self.compute_seconds(tokens)
        if compute is None:
            return _LEARNING_WAIT
        return max(0.0, compute - (self.load_seconds(Link.LOAD, num_bytes) or 0.0))

    def is_off(self, link: Link) -> bool:
        """Whether it has lost too often. What uses it may be left alone until it is on again."""
        return bool(self._links[link].why_off)

    def why_off(self, link: Link) -> str:
        """In the reader's units; nothing where it is on."""
        return self._links[link].why_off

    def _may_pay(self, link: Link, compute: float, num_bytes: int) -> bool:
        """Whether it is worth a trial. SAVE is measured all the time: a LOAD as fast as that would have to pay."""
        if link is not Link.LOAD:
            return True
        seconds = self._links[Link.SAVE].rate.seconds(num_bytes)
        return seconds is None or seconds <= compute

    def _rate(self, link: Link) -> Rate:
        """What is known of a link, or else of one like it."""
        rate = self._links[link].rate
        return self._links[Link.SAVE].rate if link is Link.LOAD and not rate.known else rate

    def _seconds_after(self, link: Link, num_bytes: int) -> float:
        """What has to follow a move before its bytes are on the device."""
        return (self.load_seconds(Link.LOAD, num_bytes) or 0.0) if link is Link.FETCH else 0.0

    def _win(self, link: Link, state: _LinkState) -> None:
        state.losses = 0
        state.on_trial = False
        if state.why_off:
            state.why_off = ""
            state.rest = self._first_rest
            self._tell(link, "")

    def _lose(self, link: Link, state: _LinkState, compute: float, num_bytes: int) -> None:
        state.losses += 1
        if state.why_off and not state.on_trial:
            return
        if state.on_trial or state.losses >= self._losses:
            first = not state.why_off
            state.why_off = self._why(link, compute, num_bytes)
            state.on_trial = False
            state.next_trial = self._seconds() + state.rest
            state.rest = min(state.rest * 2, _LONGEST_REST)
            self.turned_off_count += 1
            if first:
                self._tell(link, state.why_off)

    def _tries(self, state: _LinkState) -> bool:
        """Whether a link that is off is tried now. A trial that was never measured is repeated."""
        if self._seconds() < state.next_trial:
            return False
        state.rate.forget()
        state.on_trial = True
        state.next_trial = self._seconds() + state.rest
        return True

    def _why(self, link: Link, compute: float, num_bytes: int) -> str:
        """The bandwidth at which this move would take as long as computing."""
        rate = self._rate(link)
        others = (rate.start or 0.0) + self._seconds_after(link, num_bytes)
        measured = f"measured {_in_units(rate.per_second or 0.0)}"
        if others >= compute:
            return (
                f"recompute is cheaper at any bandwidth: {_in_time(compute)}, and {_in_time(others)} before the first "
                f"byte counts; {measured}"
            )
        return f"recompute is cheaper below {_in_units(num_bytes / (compute - others))}; {measured}"

    def _tell(self, link: Link, why: str) -> None:
        if self._on_change is not None:
            self._on_change(link, why)


@dataclass(slots=True)
class _LinkState:
    """What is known of one link, and how it does."""

    rest: float  # seconds, until the next trial
    rate: Rate = field(default_factory=Rate)
    losses: int = 0  # in a row
    why_off: str = ""
    on_trial: bool = False
    next_trial: float = 0.0


def _in_units(bandwidth: float) -> str:
    for size, name in ((1e9, "GB/s"), (1e6, "MB/s")):
        if bandwidth >= size:
            return f"{bandwidth / size:.1f} {name}"
    return f"{bandwidth / 1e3:.1f} kB/s"


def _in_time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"
