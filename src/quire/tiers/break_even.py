"""Rate: measured speed. BreakEven: whether moving pages is faster than computing their tokens again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

from quire.tiers.transfer import LANES, Lane

_KEPT = 0.9  # weight of earlier measurements at each new one
_SPREAD = 0.3  # share of the mean amount; if amounts vary less, the fixed time is not identifiable
_TINY_STEP = 64  # tokens; a smaller step is mostly launch overhead
_LOSSES = 16  # lost decisions in a row, after which a lane turns itself off
_FAILURES = 3  # failed transfers in a row, with the same effect
_WINS = 8  # measured wins, after which earlier losses do not count
_FIRST_REST = 1.0  # seconds before a lane that is off is tried again; they double each time
_LONGEST_REST = 300.0
_PRICE = 50.0  # a trial waits this many times its expected loss, so that trials cost at most 2 % of the time
_OVERDUE = 8.0  # a trial that takes this many times its expected duration is cancelled
_QUIET = 60.0  # seconds between two notices about one lane
_LEARNING_WAIT = 1.0  # seconds a request may wait for storage while nothing is measured


class Rate:
    """A line through measured (amount, seconds): a fixed time, then a constant rate. None without a measurement."""

    def __init__(self) -> None:
        # Sums of weights, amounts, seconds, squares of amounts, and amounts times seconds.
        self._sums: tuple[float, ...] = (0.0,) * 5

    def add(self, amount: float, seconds: float) -> None:
        """Add a measurement; one with a 0 is ignored. If the amounts hardly differ, the fixed time is 0."""
        if amount > 0 and seconds > 0:
            new = (1.0, amount, seconds, amount * amount, amount * seconds)
            self._sums = tuple(was * _KEPT + now for was, now in zip(self._sums, new, strict=True))

    @property
    def known(self) -> bool:
        """Whether there is a measurement."""
        return self._sums[0] > 0

    @property
    def mean(self) -> float | None:
        """Amount per second, with the fixed time."""
        return self._sums[1] / self._sums[2] if self.known else None

    @property
    def per_second(self) -> float | None:
        """Amount per second, without the fixed time."""
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


class _Verdict(Enum):
    LEARN = auto()  # nothing to compare: move and measure
    WIN = auto()
    LATE = auto()  # a transfer would win without the queue of its lane
    LOSE = auto()
    TRY = auto()  # a transfer is expected to lose: move, to measure again


_MOVED = (_Verdict.LEARN, _Verdict.WIN, _Verdict.TRY)


class _Trial(Enum):
    NONE = auto()
    UNDER_WAY = auto()
    MEASURED = auto()  # the next decision judges it


@dataclass(slots=True)
class _LaneState:
    lane: Lane
    rate: Rate = field(default_factory=Rate)
    is_fresh: bool = False  # measured since it last won
    losses: int = 0  # in a row
    wins: int = 0  # measured since it was off
    failures: int = 0  # in a row
    wasted: float = 0.0  # seconds of the last failure
    why_off: str = ""
    off_since: float = 0.0  # or since the last lost trial
    rest: float = _FIRST_REST  # seconds until the next trial
    trial: _Trial = _Trial.NONE
    next_trial: float = 0.0
    notified_off: bool = False
    next_notice: float = 0.0


class BreakEven:
    """Compares the measured times to move and to compute a prefix.

    While either time is unknown, pages move. A lane turns off after several lost decisions in a row, or transfers that
    moved less than half of their bytes. It turns on when it wins by its own measurements: one request at a time is a
    trial, whose measurement replaces earlier ones. Pauses between trials double, until several wins are measured.

    `on_change(lane, why)` is called when a lane turns off, and with an empty `why` when it turns on: at most once a
    minute per lane. The time of a FETCH includes the LOOK before it and the LOAD after it. A LOAD that was never
    measured counts as fast as a SAVE, but that turns no lane on."""

    def __init__(
        self,
        seconds: Callable[[], float],
        *,
        losses: int = _LOSSES,
        tiny_step: int = _TINY_STEP,
        on_change: Callable[[Lane, str], None] | None = None,
    ) -> None:
        self._seconds = seconds
        self._losses = losses
        self._tiny_step = tiny_step
        self._on_change = on_change
        self._computed = Rate()
        self._lanes = {lane: _LaneState(lane) for lane in LANES}
        self.turned_off_count = 0  # decisions of all lanes, with failed trials

    @property
    def compute_rate(self) -> float | None:
        """Prompt tokens that steps compute a second; None without a measurement."""
        return self._computed.mean

    def computed(self, tokens: int, seconds: float) -> None:
        """A step has computed this many prompt tokens."""
        if tokens >= self._tiny_step:
            self._computed.add(tokens, seconds)

    def moved(self, lane: Lane, num_bytes: int, seconds: float) -> None:
        """A transfer has moved these bytes in this time, without waiting in a queue. A LOOK counts as one byte."""
        if num_bytes > 0:
            state = self._lanes[lane]
            if state.trial is _Trial.UNDER_WAY:
                state.rate, state.trial = Rate(), _Trial.MEASURED
            state.rate.add(num_bytes, max(seconds, 1e-9))
            state.failures, state.wasted, state.is_fresh = 0, 0.0, True

    def failed(self, lane: Lane, seconds: float) -> None:
        """A transfer has moved less than half of its bytes in this time."""
        state = self._lanes[lane]
        state.failures += 1
        state.wasted = seconds
        now = self._seconds()
        is_trial = bool(state.why_off) and (state.trial is _Trial.UNDER_WAY or now >= state.next_trial)
        if is_trial or (not state.why_off and state.failures >= _FAILURES):
            why = f"{state.failures} in a row brought less than half of what they were for, the last after"
            self._turn_off(state, f"{why} {_in_time(seconds)}")
        self._notify(state)

    def is_measured(self, lane: Lane) -> bool:
        """Whether a lane was measured since its last trial began."""
        state = self._lanes[lane]
        return state.rate.known and state.trial is not _Trial.UNDER_WAY

    def compute_seconds(self, tokens: int) -> float | None:
        """Seconds to compute these tokens; None: unknown."""
        rate = self._computed.mean
        return None if rate is None else tokens / rate

    def load_seconds(self, lane: Lane, num_bytes: int, queued_bytes: int = 0) -> float | None:
        """Seconds until the bytes are on the device, after those queued on the lane; None: unknown."""
        seconds = self._rate(lane).seconds(num_bytes + queued_bytes)
        return None if seconds is None else seconds + self._seconds_around(lane, num_bytes)

    def pays(self, lane: Lane, tokens: int, num_bytes: int, queued_bytes: int = 0) -> bool:
        """Whether a request that begins now would move these tokens and not compute them. Changes nothing."""
        return self._verdict(lane, tokens, num_bytes, queued_bytes) in _MOVED

    def decide(self, lane: Lane, tokens: int, num_bytes: int, queued_bytes: int = 0) -> bool:
        """As `pays`, for a request that does begin: the decision counts, and may be a trial."""
        state = self._lanes[lane]
        verdict = self._verdict(lane, tokens, num_bytes, queued_bytes)
        if verdict is _Verdict.TRY:
            self._begin_trial(state, num_bytes)
        elif verdict is _Verdict.LOSE:
            state.losses += 1
            is_due = state.trial is _Trial.MEASURED if state.why_off else state.losses >= self._losses
            compute = self.compute_seconds(tokens)
            if is_due and compute is not None:
                self._turn_off(state, self._why(lane, compute, num_bytes))
        elif verdict is not _Verdict.LEARN:
            state.losses = 0
            if state.trial is not _Trial.UNDER_WAY:  # otherwise it is not measured yet
                state.why_off, state.trial = "", _Trial.NONE
                state.wins += state.is_fresh
                state.is_fresh = False
                if state.wins >= _WINS:
                    state.rest = _FIRST_REST
        self._notify(state)
        return verdict in _MOVED

    def untried(self, lane: Lane) -> None:
        """The request of a trial moves nothing after all, so another one may try."""
        state = self._lanes[lane]
        if state.trial is _Trial.UNDER_WAY:
            state.trial = _Trial.NONE
            state.next_trial = self._seconds()

    def deadline(self, tokens: int, num_bytes: int) -> float:
        """Seconds that a request may wait for storage before computing is faster."""
        compute = self.compute_seconds(tokens)
        if compute is None:
            return _LEARNING_WAIT
        return max(0.0, compute - (self.load_seconds(Lane.LOAD, num_bytes) or 0.0))

    def why_off(self, lane: Lane) -> str:
        """Why the lane is off, for users; empty while it is on."""
        return self._lanes[lane].why_off

    def _verdict(self, lane: Lane, tokens: int, num_bytes: int, queued_bytes: int) -> _Verdict:
        state = self._lanes[lane]
        compute, alone = self.compute_seconds(tokens), self.load_seconds(lane, num_bytes)
        if compute is not None and alone is None and (least := self._seconds_around(lane, num_bytes)) > compute:
            alone = least
        if (compute is None or alone is None) and not state.why_off:
            return _Verdict.LEARN
        wins = compute is not None and alone is not None and alone <= compute
        if wins and state.failures < _FAILURES and (not state.why_off or state.rate.known):
            load = self.load_seconds(lane, num_bytes, queued_bytes)  # the length of a queue says nothing about the lane
            return _Verdict.WIN if load is not None and load <= (compute or 0.0) else _Verdict.LATE
        return _Verdict.TRY if self._is_due(state, compute, num_bytes) else _Verdict.LOSE

    def _is_due(self, state: _LaneState, compute: float | None, num_bytes: int) -> bool:
        """Whether this transfer is a trial of a lane that is off."""
        now = self._seconds()
        if not state.why_off or state.trial is _Trial.MEASURED or now < state.next_trial:
            return False
        if compute is None:
            return True
        if state.lane is Lane.LOAD and now < state.off_since + _LONGEST_REST:
            # SAVE is always measured: if a LOAD at that speed does not pay, a trial can wait.
            saved = self._lanes[Lane.SAVE].rate.seconds(num_bytes)
            if saved is not None and saved > compute:
                return False
        lost = max(state.wasted, (self.load_seconds(state.lane, num_bytes) or 0.0) - compute)
        if state.lane is Lane.FETCH:
            lost = min(lost, compute)  # a request waits no longer
        return now >= state.off_since + _PRICE * lost

    def _rate(self, lane: Lane) -> Rate:
        rate = self._lanes[lane].rate
        return self._lanes[Lane.SAVE].rate if lane is Lane.LOAD and not rate.known else rate

    def _seconds_around(self, lane: Lane, num_bytes: int) -> float:
        """Seconds of the other transfers that bring these bytes to the device."""
        if lane is not Lane.FETCH:
            return 0.0
        looked = self._lanes[Lane.LOOK].rate.seconds(1) or 0.0
        return looked + (self.load_seconds(Lane.LOAD, num_bytes) or 0.0)

    def _turn_off(self, state: _LaneState, why: str) -> None:
        self.turned_off_count += 1
        state.why_off = why
        state.trial = _Trial.NONE
        state.wins = 0
        state.off_since = self._seconds()
        state.next_trial = state.off_since + state.rest
        state.rest = min(state.rest * 2, _LONGEST_REST)

    def _begin_trial(self, state: _LaneState, num_bytes: int) -> None:
        expected = self.load_seconds(state.lane, num_bytes) or 0.0
        state.trial = _Trial.UNDER_WAY
        state.next_trial = self._seconds() + max(state.rest, _OVERDUE * expected)
        if state.lane is Lane.FETCH:
            self._lanes[Lane.LOOK].trial = _Trial.UNDER_WAY  # measured with it

    def _why(self, lane: Lane, compute: float, num_bytes: int) -> str:
        rate = self._rate(lane)
        others = (rate.start or 0.0) + self._seconds_around(lane, num_bytes)
        if others >= compute:
            when = f"at any bandwidth: {_in_time(compute)}, and {_in_time(others)} before the first byte counts"
        else:
            when = f"below {_in_units(num_bytes / (compute - others))}"
        return f"recompute is cheaper {when}; measured {_in_units(rate.per_second or 0.0)}"

    def _notify(self, state: _LaneState) -> None:
        is_off, now = bool(state.why_off), self._seconds()
        if is_off is not state.notified_off and now >= state.next_notice:
            state.notified_off, state.next_notice = is_off, now + _QUIET
            if self._on_change is not None:
                self._on_change(state.lane, state.why_off)


def _in_units(bandwidth: float) -> str:
    for size, name in ((1e9, "GB/s"), (1e6, "MB/s")):
        if bandwidth >= size:
            return f"{bandwidth / size:.1f} {name}"
    return f"{bandwidth / 1e3:.1f} kB/s"


def _in_time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"
