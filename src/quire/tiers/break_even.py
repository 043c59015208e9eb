"""BreakEven: whether bytes are worth moving, or their tokens are computed again sooner. Measured, never configured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

from quire.tiers.rate import Rate
from quire.tiers.transfer import LANES, Lane

TINY_STEP: Final = 64
"""Tokens. Smaller steps are mostly launches, and say nothing about prompts."""

_ROW_OF_LOSSES = 16
_ROW_OF_FAILURES = 3  # each was waited for in vain
_ROW_OF_WINS = 8  # measured ones, after which what was lost before counts no more
_FIRST_REST = 1.0  # seconds after which a link that is off is tried again; each time twice as many
_LONGEST_REST = 300.0
_PRICE = 50.0  # times what a trial is expected to lose, that has to pass before it: it may cost 2 % of the time
_OVERDUE = 8.0  # times as long as was expected, after which a trial is given up
_QUIET = 60.0  # seconds between two words about one link
_LEARNING_WAIT = 1.0  # seconds a request may wait for storage while nothing is known


class _Verdict(Enum):
    LEARN = auto()  # nothing to compare: moved, and measured
    WIN = auto()
    LATE = auto()  # it would win, but others are before it
    LOSE = auto()
    TRY = auto()  # it would lose as far as is known, and is moved to see


class _Trial(Enum):
    NONE = auto()
    UNDER_WAY = auto()
    MEASURED = auto()  # the next decision says how it went


class BreakEven:
    """Compares the time to move a prefix with the time to compute it, both from what was measured.

    `pays` asks and changes nothing; `decide` is for a request that begins, and counts. While nothing is known of either
    time, moving is tried. A link that loses so many decisions in a row turns itself off. So does one that fails: three
    moves in a row that brought less than half of what they were for. That forbids nothing that pays: what a link that
    works wins by its own measurements turns it on again. As what always loses is not measured any more, it is tried by
    one request at a time, after a time that doubles, and that is long enough for what trials lose to stay below 2 % of
    it. The measurement of a trial then counts alone. The time is short again after several wins that were measured.

    `on_change(link, why)` hears that a link is off, and with no `why` that it is on; of one link at most once a minute,
    and then of how it is by then.

    Of a FETCH, which ends on the host, the LOOK before it and the LOAD behind it are counted in. A LOAD that was never
    measured is taken to be as fast as a SAVE, which goes the same way back and comes first; but that turns nothing on.
    """

    def __init__(
        self,
        seconds: Callable[[], float],
        *,
        losses: int = _ROW_OF_LOSSES,
        first_rest: float = _FIRST_REST,
        tiny_step: int = TINY_STEP,
        on_change: Callable[[Lane, str], None] | None = None,
    ) -> None:
        self._seconds = seconds
        self._losses = losses
        self._first_rest = first_rest
        self._tiny_step = tiny_step
        self._on_change = on_change
        self._computed = Rate()
        self._links = {link: _LinkState(first_rest) for link in LANES}
        self.turned_off_count = 0  # times that any link turned itself off, trials that failed counted in

    # -- what is measured

    def computed(self, tokens: int, seconds: float) -> None:
        """A step computed so many prompt tokens."""
        if tokens >= self._tiny_step:
            self._computed.add(tokens, seconds)

    def moved(self, link: Lane, num_bytes: int, seconds: float) -> None:
        """A move brought so many bytes, and took so long, without its wait in a queue."""
        if num_bytes > 0:
            state = self._links[link]
            if state.trial is _Trial.UNDER_WAY:
                state.rate.forget()
                state.trial = _Trial.MEASURED
            state.rate.add(num_bytes, max(seconds, 1e-9))
            state.failures, state.wasted = 0, 0.0
            state.is_fresh = True

    def failed(self, link: Lane, seconds: float) -> None:
        """A move brought less than half of what was asked for, in so long."""
        state = self._links[link]
        state.failures += 1
        state.wasted = seconds
        now = self._seconds()
        is_trial = bool(state.why_off) and (state.trial is _Trial.UNDER_WAY or now >= state.next_trial)
        if is_trial or (not state.why_off and state.has_failed):
            self._turn_off(
                state,
                f"{state.failures} in a row brought less than half of what they were for, the last after "
                f"{_in_time(seconds)}",
            )
        self._tell(link, state)

    def looked(self, seconds: float) -> None:
        """A store has said what it has, after so long."""
        self.moved(Lane.LOOK, 1, seconds)

    def knows(self, link: Lane) -> bool:
        """Whether a link was measured, since it was last tried."""
        state = self._links[link]
        return state.rate.known and state.trial is not _Trial.UNDER_WAY

    # -- what follows from it

    def compute_seconds(self, tokens: int) -> float | None:
        """What computing so many tokens takes. None: not known."""
        rate = self._computed.mean
        return None if rate is None else tokens / rate

    def load_seconds(self, link: Lane, num_bytes: int, queued_bytes: int = 0) -> float | None:
        """What it takes until the bytes can be used on the device, behind others on the link. None: not known."""
        seconds = self._rate(link).seconds(num_bytes + queued_bytes)
        if seconds is None:
            return None
        return seconds + self._seconds_around(link, num_bytes)

    def pays(self, link: Lane, tokens: int, num_bytes: int, queued_bytes: int = 0) -> bool:
        """Whether so many tokens would be moved and not computed, if a request began now. Changes nothing."""
        return self._verdict(link, tokens, num_bytes, queued_bytes) in _MOVED

    def decide(self, link: Lane, tokens: int, num_bytes: int, queued_bytes: int = 0) -> bool:
        """The same for a request that begins. It counts, and may be the one that a link is tried with."""
        state = self._links[link]
        verdict = self._verdict(link, tokens, num_bytes, queued_bytes)
        if verdict is _Verdict.TRY:
            self._begin_trial(link, state, num_bytes)
        elif verdict is _Verdict.LOSE:
            self._lose(link, state, tokens, num_bytes)
        elif verdict is not _Verdict.LEARN:
            self._win(state)
        self._tell(link, state)
        return verdict in _MOVED

    def untried(self, link: Lane) -> None:
        """A request that a link was to be tried with moves nothing after all. Another one may."""
        state = self._links[link]
        if state.trial is _Trial.UNDER_WAY:
            state.trial = _Trial.NONE
            state.next_trial = self._seconds()

    def deadline(self, tokens: int, num_bytes: int) -> float:
        """Seconds that a request may wait for storage before computing would have been quicker."""
        compute = self.compute_seconds(tokens)
        if compute is None:
            return _LEARNING_WAIT
        return max(0.0, compute - (self.load_seconds(Lane.LOAD, num_bytes) or 0.0))

    def is_off(self, link: Lane) -> bool:
        """Whether it has lost or failed too often. What uses it may be left alone until it is on again."""
        return bool(self._links[link].why_off)

    def why_off(self, link: Lane) -> str:
        """In the reader's units; nothing where it is on."""
        return self._links[link].why_off

    # -- inside

    def _verdict(self, link: Lane, tokens: int, num_bytes: int, queued_bytes: int) -> _Verdict:
        state = self._links[link]
        compute, alone = self.compute_seconds(tokens), self.load_seconds(link, num_bytes)
        if alone is None and compute is not None and (least := self._seconds_around(link, num_bytes)) > compute:
            alone = least
        if (compute is None or alone is None) and not state.why_off:
            return _Verdict.LEARN
        # A queue goes by; it says nothing about the link.
        wins = compute is not None and alone is not None and alone <= compute
        if wins and not state.has_failed and (not state.why_off or state.rate.known):
            load = self.load_seconds(link, num_bytes, queued_bytes)
            return _Verdict.WIN if load is not None and load <= (compute or 0.0) else _Verdict.LATE
        return _Verdict.TRY if self._is_due(link, state, compute, num_bytes) else _Verdict.LOSE

    def _is_due(self, link: Lane, state: _LinkState, compute: float | None, num_bytes: int) -> bool:
        """Whether a link that is off is tried with this move."""
        now = self._seconds()
        if not state.why_off or state.trial is _Trial.MEASURED or now < state.next_trial:
            return False
        if compute is None:
            return True
        if link is Lane.LOAD and now < state.off_since + _LONGEST_REST:
            # SAVE is measured all the time: if a LOAD as fast as that would not pay, there is no hurry.
            saved = self._links[Lane.SAVE].rate.seconds(num_bytes)
            if saved is not None and saved > compute:
                return False
        lost = max(state.wasted, (self.load_seconds(link, num_bytes) or 0.0) - compute)
        if link is Lane.FETCH:
            lost = min(lost, compute)  # nobody waits longer
        return now >= state.off_since + _PRICE * lost

    def _rate(self, link: Lane) -> Rate:
        """What is known of a link, or else of one like it."""
        rate = self._links[link].rate
        return self._links[Lane.SAVE].rate if link is Lane.LOAD and not rate.known else rate

    def _seconds_around(self, link: Lane, num_bytes: int) -> float:
        """What comes before a move, and has to follow it before its bytes are on the device."""
        if link is not Lane.FETCH:
            return 0.0
        looked = self._links[Lane.LOOK].rate.seconds(1) or 0.0
        return looked + (self.load_seconds(Lane.LOAD, num_bytes) or 0.0)

    def _win(self, state: _LinkState) -> None:
        state.losses = 0
        if state.trial is _Trial.UNDER_WAY:
            return  # of what it is now, nothing is known yet
        state.why_off = ""
        state.trial = _Trial.NONE
        state.wins += state.is_fresh
        state.is_fresh = False
        if state.wins >= _ROW_OF_WINS:
            state.rest = self._first_rest

    def _lose(self, link: Lane, state: _LinkState, tokens: int, num_bytes: int) -> None:
        state.losses += 1
        has_to = state.trial is _Trial.MEASURED if state.why_off else state.losses >= self._losses
        compute = self.compute_seconds(tokens)
        if has_to and compute is not None:
            self._turn_off(state, self._why(link, compute, num_bytes))

    def _turn_off(self, state: _LinkState, why: str) -> None:
        """Or a trial was lost."""
        state.why_off = why
        state.trial = _Trial.NONE
        state.wins = 0
        state.off_since = self._seconds()
        state.next_trial = state.off_since + state.rest
        state.rest = min(state.rest * 2, _LONGEST_REST)
        self.turned_off_count += 1

    def _begin_trial(self, link: Lane, state: _LinkState, num_bytes: int) -> None:
        state.trial = _Trial.UNDER_WAY
        state.next_trial = self._seconds() + max(state.rest, _OVERDUE * (self.load_seconds(link, num_bytes) or 0.0))
        if link is Lane.FETCH:
            self._links[Lane.LOOK].trial = _Trial.UNDER_WAY  # is measured with it

    def _why(self, link: Lane, compute: float, num_bytes: int) -> str:
        """The bandwidth at which this move would take as long as computing."""
        rate = self._rate(link)
        others = (rate.start or 0.0) + self._seconds_around(link, num_bytes)
        measured = f"measured {_in_units(rate.per_second or 0.0)}"
        if others >= compute:
            return (
                f"recompute is cheaper at any bandwidth: {_in_time(compute)}, and {_in_time(others)} before the first "
                f"byte counts; {measured}"
            )
        return f"recompute is cheaper below {_in_units(num_bytes / (compute - others))}; {measured}"

    def _tell(self, link: Lane, state: _LinkState) -> None:
        is_off, now = bool(state.why_off), self._seconds()
        if is_off is not state.told_off and now >= state.next_word:
            state.told_off, state.next_word = is_off, now + _QUIET
            if self._on_change is not None:
                self._on_change(link, state.why_off)


_MOVED = (_Verdict.LEARN, _Verdict.WIN, _Verdict.TRY)


@dataclass(slots=True)
class _LinkState:
    """What is known of one link, and how it does."""

    rest: float  # seconds, until the next trial
    rate: Rate = field(default_factory=Rate)
    is_fresh: bool = False  # measured since it last won
    losses: int = 0  # in a row
    wins: int = 0  # measured, since it was off
    failures: int = 0  # in a row
    wasted: float = 0.0  # seconds of the last failure
    why_off: str = ""
    off_since: float = 0.0  # or since the last trial that was lost
    trial: _Trial = _Trial.NONE
    next_trial: float = 0.0
    told_off: bool = False
    next_word: float = 0.0

    @property
    def has_failed(self) -> bool:
        """Whether it brings nothing, so that how fast it was says nothing."""
        return self.failures >= _ROW_OF_FAILURES


def _in_units(bandwidth: float) -> str:
    for size, name in ((1e9, "GB/s"), (1e6, "MB/s")):
        if bandwidth >= size:
            return f"{bandwidth / size:.1f} {name}"
    return f"{bandwidth / 1e3:.1f} kB/s"


def _in_time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"
