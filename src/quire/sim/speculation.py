"""SimulatedDrafter: drafts of a replay, which are right as often as they have to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.cache.running import Lengths
from quire.errors import InvalidInput
from quire.plan.budget import MemoryPlan
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.step import StepRows
from quire.sim.result import ReplayResult
from quire.sim.scripts import Scripts
from quire.sim.trace_request import ODD_STEP, Hashes, mix_bits
from quire.spec.events import Namespace
from quire.spec.ids import Ids
from quire.speculative.drafter import Drafting, Drafts
from quire.speculative.speculator import Move, Speculator


def simulated_drafts(
    plan: MemoryPlan, acceptance: float | None, scripts: Scripts, scheduler: Scheduler, move: Move, *, overlap: bool
) -> Sequence[Speculator]:
    """The part that drafts, if the plan has speculation. `acceptance` is as in `SimulatedDrafter`. Raises InvalidInput
    if steps `overlap`: one is launched before the one before it has settled."""
    if plan.speculation is None:
        return ()
    if overlap:
        raise InvalidInput("drafts follow the tokens of the last step.", fix="leave --overlap or --speculate out.")
    return (Speculator(SimulatedDrafter(scripts, acceptance), None, plan.tokens_per_step - 1, scheduler, move),)


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
        scripts, batch = self._scripts, drafting.batch
        assert isinstance(batch, StepRows)
        scripts.enter(batch)
        rows = batch.rows
        places = drafting.known[:, None] + np.arange(int(drafting.most.max(initial=0)))
        places = np.minimum(places, scripts.tokens.shape[1] - 1)
        right = scripts.acceptances[rows] if self._acceptance is None else np.full(len(rows), self._acceptance)
        if np.isnan(right).any():
            raise InvalidInput(
                "the trace records no acceptance of drafts for all of its requests.",
                fix="give a probability: --speculate 4,0.7.",
            )
        wrong = _chances(scripts.seeds[rows][:, None], places) >= right[:, None]
        return Drafts(drafting.most.copy(), scripts.tokens[rows[:, None], places] + wrong)

    def ended(self, namespace: Namespace, tokens: Ids, num_cached: int) -> None:
        return

    def clear(self, namespace: Namespace | None) -> None:
        return


def _chances(seeds: Hashes, places: Lengths) -> npt.NDArray[np.float64]:
    """A number from 0 to 1 for each request and position."""
    mixed = mix_bits(seeds + places.astype(np.uint64) * ODD_STEP)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def drafts_of(results: Sequence[ReplayResult]) -> dict[str, Any] | None:
    """What the drafts of these engines brought together."""
    found = [(each.speculation, each.output_tokens) for each in results if each.speculation and each.output_tokens]
    if not found:
        return None
    counts = {name: sum(one[name] for one, _ in found) for name in ("drafts", "draft_tokens", "accepted_tokens")}
    steps = sum(num_tokens / one["tokens_per_step"] for one, num_tokens in found)
    return counts | {"tokens_per_step": sum(num_tokens for _, num_tokens in found) / steps}
