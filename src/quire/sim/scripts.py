"""Scripts: what the running requests of a replay draw, by their row in the cache. SimulatedDrafter drafts from them."""

from __future__ import annotations

from zlib import crc32

import numpy as np
import numpy.typing as npt

from quire.cache.running import Lengths
from quire.errors import InvalidInput
from quire.plan.budget import MemoryPlan
from quire.scheduler.step import StepRows
from quire.sim.arrivals import scripted
from quire.spec.events import Namespace
from quire.spec.ids import Ids
from quire.speculative.drafter import Drafting, Drafts

_STEP, _FIRST, _SECOND = (np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


class Scripts:
    """`outputs` int32 `[rows, positions]` has the outputs of each request, as far as `enter` was told of it."""

    def __init__(self, plan: MemoryPlan) -> None:
        # Memory is allocated when it is written.
        self.outputs: Ids = np.zeros((plan.max_requests, plan.pages_per_row * plan.tokens_per_page), dtype=np.int32)
        self.seeds = np.zeros(plan.max_requests, dtype=np.uint64)  # of each request
        self.acceptances = np.zeros(plan.max_requests)  # as recorded; not a number: none was
        self._serials: Lengths = np.zeros(plan.max_requests, dtype=np.int64)

    def enter(self, batch: StepRows) -> None:
        """Write the outputs of requests that are new in their rows."""
        rows, serials = batch.rows, batch.serials
        fresh = (self._serials[rows] != serials).nonzero()[0]
        if not len(fresh):
            return
        for row, request in zip(rows[fresh], scripted(batch.requests[at] for at in fresh.tolist()), strict=True):
            script, first = request.script, request.num_prompt_tokens
            self.outputs[row, first : len(script)] = script[first:]
            self.seeds[row] = crc32(request.request_id.encode())
            self.acceptances[row] = np.nan if request.acceptance is None else request.acceptance
        self._serials[rows] = serials


class SimulatedDrafter:
    """Drafts what a request will draw, and other tokens as often as it has to. Its methods are those of `Drafter`.

    A draft is right with the probability `acceptance`, or as recorded for its request. That depends on request and
    position alone, so replays with other pools and policies have the same drafts. Raises InvalidInput for a
    request without a recorded one.
    """

    def __init__(self, scripts: Scripts, acceptance: float | None) -> None:
        self._scripts = scripts
        self._acceptance = acceptance

    def propose(self, drafting: Drafting) -> Drafts:
        assert isinstance(drafting.batch, StepRows)
        scripts, rows = self._scripts, drafting.batch.rows
        scripts.enter(drafting.batch)
        places = drafting.known[:, None] + np.arange(int(drafting.most.max(initial=0)))
        places = np.minimum(places, scripts.outputs.shape[1] - 1)
        right = scripts.acceptances[rows] if self._acceptance is None else np.full(len(rows), self._acceptance)
        if np.isnan(right).any():
            raise InvalidInput(
                "the trace records no acceptance of drafts for all of its requests.",
                fix="give a probability: --speculate 4,0.7.",
            )
        wrong = _chances(scripts.seeds[rows][:, None], places) >= right[:, None]
        return Drafts(drafting.most.copy(), scripts.outputs[rows[:, None], places] + wrong)

    def ended(self, namespace: Namespace, tokens: Ids, num_cached: int) -> None:
        return

    def forget(self) -> None:
        return


def _chances(seeds: npt.NDArray[np.uint64], places: Lengths) -> npt.NDArray[np.float64]:
    """A number from 0 to 1 for each request and position (SplitMix64)."""
    mixed = seeds + places.astype(np.uint64) * _STEP
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _FIRST
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _SECOND
    found: npt.NDArray[np.float64] = ((mixed ^ (mixed >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53
    return found
