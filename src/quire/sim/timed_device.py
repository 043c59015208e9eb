"""TimedDevice: the simulated device as a loop's device, on a virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from quire.cache import KVCache
from quire.cache.running import Lengths
from quire.scheduler.step import Step
from quire.sim.clock import VirtualClock
from quire.sim.device import SimulatedDevice, SimulatedStep
from quire.sim.tiers import LAYER
from quire.tiers.transfer import Transfer


@dataclass(slots=True, eq=False)
class TimedStep:
    """A launched step, which is done at `done` of the virtual clock. It waits for `loads`."""

    device: TimedDevice
    simulated: SimulatedStep
    began: float
    done: float
    loads: list[Transfer]

    @property
    def step(self) -> Step:
        """The step."""
        return self.simulated.step

    @property
    def fence(self) -> int:
        """The fence that was opened for it."""
        return self.simulated.fence

    @property
    def waits(self) -> bool:
        """Whether loads were on their way when it was launched."""
        return bool(self.loads)

    def wait(self) -> Lengths:
        """Move the clock to its end. Raises WrongContent for what it has read."""
        return self.device.settle(self)


class TimedDevice:
    """Launches the steps of one cache. `end_of` says when a load ends. Each of `delays` returns the seconds that a step
    waits for something else, in all layers together. The caller's CPU time is not counted inside `apart()`."""

    def __init__(
        self,
        cache: KVCache,
        device: SimulatedDevice,
        clock: VirtualClock,
        end_of: Callable[[Transfer], float],
        delays: Sequence[Callable[[Step], float]],
        apart: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._cache, self._device, self._clock = cache, device, clock
        self._end_of, self._delays, self._apart = end_of, delays, apart
        self._carried = tuple(index for index, group in enumerate(cache.groups) if group.reach.in_place)

    def launch(self, step: Step, previous: Any) -> TimedStep:
        """See `quire.loop.Device`."""
        fence, ends = self._cache.open_fence(), step.ends
        found = [self._cache.launch(index, step.batch, ends, step.draw_counts) for index in self._carried]
        with self._apart():
            pieces = {index: each for index, each in zip(self._carried, found, strict=True) if each is not None}
            launched = self._device.launch(step, fence, pieces)
            loads = [load for kv in step.batch.kvs for load in kv.loads if not load.done]
            done = self._clock.launch(
                step.starts,
                ends,
                drafts=ends - launched.ends,
                arrives=max(map(self._end_of, loads), default=0.0),
                swap=sum(delay(step) for delay in self._delays),
            )
            return TimedStep(self, launched, self._clock.now, done, loads)

    def settle(self, launched: TimedStep) -> Lengths:
        """Wait for a step, as `TimedStep.wait`."""
        with self._apart():
            for load in launched.loads:
                load.wait_layer(LAYER)  # as a forward pass does before it reads a layer
            drawn = self._device.settle(launched.simulated)
            self._clock.move_to(launched.done)
            return drawn

    def move(self, launched: TimedStep, sources: Lengths, targets: Lengths) -> None:
        """Drafts of the simulator are chains, which lie where they belong."""
        assert not len(sources) and not len(targets)
