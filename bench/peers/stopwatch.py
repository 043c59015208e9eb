"""Where the time of Quire's steps goes: exclusive time of its parts, for prefill and decode steps separately.

Parts are timed by wrapping the functions and modules where they begin, some hundred calls a step at two microseconds
each; the time of an inner part does not count for the outer one. CPU time is that of all threads, those that wait for
others included. A step is a decode step if every request in it has one token.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

PARTS = (
    "linear layers",
    "lm_head",
    "attention kernel",
    "key and value writes",
    "attention plan",
    "other model code",
    "batch to tensors",
    "sampler",
    "schedule, allocate",
    "settle, commit",
    "loop and outputs",
)


class Stopwatch:
    """Adds up exclusive time by part and phase."""

    def __init__(self) -> None:
        self.steps: Counter[str] = Counter()
        self._booked: dict[str, dict[str, tuple[float, float]]] = defaultdict(dict)  # part: phase: wall and CPU seconds
        self._step: dict[str, tuple[float, float]] = {}
        self._stack: list[str] = []
        self._since = (0.0, 0.0)
        self._phase = ""

    def enter(self, part: str) -> None:
        """Time counts for `part` from here, until it leaves or another enters."""
        self._charge()
        self._stack.append(part)

    def leave(self) -> None:
        """Time counts for the part outside again."""
        self._charge()
        self._stack.pop()

    def _charge(self) -> None:
        now = (time.perf_counter(), time.process_time())
        if self._stack:
            part = self._stack[-1]
            wall, cpu = self._step.get(part, (0.0, 0.0))
            self._step[part] = (wall + now[0] - self._since[0], cpu + now[1] - self._since[1])
        self._since = now

    def begin_phase(self, phase: str) -> None:
        """The running step is of this phase."""
        self._phase = phase

    def end_step(self) -> None:
        """Book what the step took."""
        if self._phase:
            self.steps[self._phase] += 1
            for part, (wall, cpu) in self._step.items():
                before = self._booked[part].get(self._phase, (0.0, 0.0))
                self._booked[part][self._phase] = (before[0] + wall, before[1] + cpu)
        self._step.clear()
        self._phase = ""

    def rows(self) -> list[dict[str, Any]]:
        """By phase, the wall and CPU seconds of each part that took any."""
        return [{"part": part, "seconds": self._booked[part]} for part in PARTS if part in self._booked]

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, its time counted for `part`."""

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self.enter(part)
            try:
                return call(*args, **kwargs)
            finally:
                self.leave()

        return wrapper


@contextmanager
def profiled(engine: Any) -> Iterator[Stopwatch]:
    """Time the parts of a started `engines.Quire` inside."""
    from quire.kernels.fields import KVFields
    from quire.models import attention

    watch = Stopwatch()
    core = engine.llm.engine
    launch, step = core.runner.launch, core.step

    def phased_launch(scheduled: Any, previous: Any) -> Any:
        watch.begin_phase("decode" if scheduled.num_tokens == len(scheduled) else "prefill")
        return launch(scheduled, previous)

    def whole_step() -> Any:
        try:
            return step()
        finally:
            watch.leave()
            watch.end_step()
            watch.enter("loop and outputs")

    places = [
        (core.runner, "launch", watch.timed("batch to tensors", phased_launch)),
        (core.runner.model, "run", watch.timed("other model code", core.runner.model.run)),
        (core.runner._sampler, "draw", watch.timed("sampler", core.runner._sampler.draw)),
        (core.scheduler, "schedule", watch.timed("schedule, allocate", core.scheduler.schedule)),
        (core.scheduler, "settle", watch.timed("settle, commit", core.scheduler.settle)),
        (core, "step", whole_step),
        (attention, "paged_attention", watch.timed("attention kernel", attention.paged_attention)),
        (KVFields, "write", watch.timed("key and value writes", KVFields.write)),
    ]
    head = core.runner.model.module.lm_head._product
    for product in core.runner.model.packing.products:
        part = "lm_head" if product is head else "linear layers"
        places.append((product, "compute", watch.timed(part, product.compute)))
    with ExitStack() as stack:
        for owner, name, call in places:
            stack.enter_context(patch.object(owner, name, call))
        watch.enter("loop and outputs")
        yield watch
