"""Part: a feature of the loop. Each hook does nothing here; a feature overrides those that it needs.

The order of hooks in one turn of the loop:

    before_schedule    before requests are admitted and pages allocated
    scheduled          the next step is made; it may be empty
    launched           the device has it
    settling           its tokens are drawn; a part may keep a part of them only
    settled            its tokens are those of their requests
    ended              a request has ended: in a step, or at any other moment
    idle               there is nothing to compute and nothing to report
    after_step         the turn is over

A part adds what it needs of a step to the step, and gets what it needs of another part when it is built.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

from quire.cache.running import Lengths, Rows
from quire.counters import Section
from quire.scheduler.request import Request
from quire.scheduler.step import Settled, Step
from quire.spec.events import Namespace
from quire.spec.ids import Ids

if TYPE_CHECKING:
    from quire.loop.loop import Loop


@dataclass(slots=True, eq=False)
class Launched(ABC):
    """A step that a device has, and the `fence` that was opened for it (`KVCache.open_fence`).

    It was launched when it `began`, by the clock of the loop. If it `waits` for bytes from lower tiers, its time does
    not say what it costs.
    """

    step: Step
    fence: int
    began: float
    waits: bool

    @abstractmethod
    def wait(self) -> Lengths:
        """Wait until the device has computed it: the tokens of its draws, int64."""


class Device(Protocol):
    """What computes steps: the model runner, or a simulated device."""

    def launch(self, step: Step, previous: Any) -> Launched:
        """Start a step. `previous` is the result of the launch before, if that step has not settled: this one may
        continue its tokens."""


class End(StrEnum):
    """How a request ended: it has all its tokens, its client left, it can never run, or its step failed."""

    FINISHED = "finished"
    ABORTED = "aborted"
    REFUSED = "refused"
    FAILED = "failed"


@dataclass(slots=True)
class StepResult:
    """What a step drew: `tokens`, one for each of its draws. Work i keeps the first `kept[i]` of its own; None: all.
    `order` are the draws in the order in which tokens follow each other; None: as they are. `settled` is the result
    once the scheduler has it."""

    launched: Launched
    tokens: Lengths
    kept: Lengths | None = None
    order: Rows | None = None
    settled: Settled | None = None

    @property
    def step(self) -> Step:
        """The step that drew them."""
        return self.launched.step


class Part:
    """A feature of a loop. A hook that raises ends the loop, so a part catches the errors that it can live with."""

    def attach(self, loop: Loop) -> None:
        """The loop is built. Called once, before any other hook."""

    @property
    def is_due(self) -> bool:
        """Whether a step should be made although there is no work."""
        return False

    def before_schedule(self) -> None:
        """A step is about to be scheduled."""

    def scheduled(self, step: Step) -> None:
        """The step is made, with pages for all its tokens. `step.admitted` have begun. It may be empty."""

    def launched(self, launched: Launched) -> None:
        """The device has the step."""

    def settling(self, result: StepResult) -> None:
        """A step has drawn its tokens. The part may set `result.kept` and `result.order`."""

    def settled(self, result: StepResult) -> None:
        """The scheduler has the result of a step, and has ended requests that are done."""

    def ended(self, request: Request, end: End, error: Exception | None) -> None:
        """A request has ended. `error` is why it has failed."""

    def idle(self) -> None:
        """Nothing can be computed now: the part may wait a little for what requests wait for."""

    def after_step(self, *, idle: bool) -> None:
        """The turn is over; with `idle` nothing was launched. Steps may be in flight (`Loop.drain`)."""

    def flush(self, namespace: Namespace | None) -> None:
        """The cached pages of a namespace, or of all, are deleted: so is what was learned from its tokens."""

    def model_changed(self, epoch: int) -> None:
        """The weights were replaced, `epoch` times; no step is in flight."""

    def counters(self) -> Sequence[Section]:
        """Counters and gauges now, each with its section of the statistics (`quire.counters`)."""
        return ()

    def close(self) -> None:
        """The loop ends; no request runs."""


class ForwardPart:
    """A feature of forward passes on a device. The runner calls it for each step."""

    def preparing(self, step: Step) -> None:
        """The step is about to be sent to the device: the part may add to it."""

    def before_forward(self, step: Step, running: Any) -> None:
        """The model is about to run on `running.batches`, one for each group."""

    def allowed(self, step: Step, previous: Any) -> tuple[Rows, Ids] | None:
        """Which tokens some draws may be, asked after the model was launched: rows of the step's draws, and a bit for
        each token, int32 `[rows, vocabulary / 32]`, lowest bits first. `previous` is the step in flight."""
        return None

    def after_forward(self, step: Step, running: Any, drawn: Any) -> None:
        """The model runs, or has run; `drawn` are its draws, None if there are none."""

    def moved(self, step: Step, batches: Sequence[Any], sources: Rows, targets: Rows) -> None:
        """What the step wrote at the flat places `sources` was copied to `targets`, in every group."""
