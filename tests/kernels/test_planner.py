"""Plans that are kept between steps: the same answers as fresh ones, and no work where nothing changed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.kernels import planner
from quire.kernels.batch import PagedBatch
from quire.kernels.planner import AttentionPlanner
from tests.covering import few
from tests.kernels.paged_case import PagedCase
from tests.kernels.planner_case import check_plans

CPU = torch.device("cpu")


@pytest.mark.parametrize("seed", few(range(60), 20))
def test_a_kept_plan_answers_like_a_fresh_one_and_like_the_definition(seed: int) -> None:
    check_plans(seed)


class Decodes:
    """Sequences on scattered pages of 16 tokens that grow by a token per step."""

    def __init__(self, contexts: list[int], *, window: int = 0, rows: int = 1) -> None:
        self.contexts = np.array(contexts, dtype=np.int32)
        self.rows = rows
        self.window = window
        pages = max(contexts) // 16 + 10
        order = np.random.default_rng(3).permutation(np.arange(1, len(contexts) * pages + 1))
        self.frames = order.reshape(len(contexts), pages).astype(np.int32)
        self.planner = AttentionPlanner()

    def batch(self) -> PagedBatch:
        count = len(self.contexts)
        return PagedBatch(
            query_starts=np.arange(count + 1, dtype=np.int32) * self.rows,
            context_lens=self.contexts.copy(),
            frames=self.frames,
            slots=np.zeros(count * self.rows, dtype=np.int32),
            page_size=16,
            planner=self.planner,
        )

    def step(self) -> planner.StepPlan:
        self.contexts += 1
        return self.batch().plan(self.window, CPU)


@pytest.mark.parametrize("window", [0, 200])
def test_a_step_appends_to_the_plan_of_the_step_before(window: int) -> None:
    """The plan is the same object over a page's end, and of its slots one per sequence is another."""
    decodes = Decodes([260, 310, 411, 514], window=window)
    before = decodes.step()
    for _ in range(2):
        slots = [segment.source.index.clone() for segment in before.segments]
        plan = decodes.step()
        assert plan is before
        changed = sum(
            int((old != segment.source.index).sum()) for old, segment in zip(slots, plan.segments, strict=True)
        )
        assert changed == len(decodes.contexts)


@pytest.mark.parametrize(("window", "together"), [(1000, [4]), (1500, [2, 2]), (2040, [2, 2])])
def test_drafts_behind_a_window_are_batched(window: int, together: list[int]) -> None:
    """As many sequences together as fit, and not each with segments of its own."""
    plan = Decodes([2600, 3110, 4110, 5140], window=window, rows=5).step()
    assert [segment.batched for segment in plan.segments] == together


def test_one_changed_page_changes_one_sequence() -> None:
    """The others keep what they gather alone, tensor by tensor."""
    decodes = Decodes([3000, 3000, 3000])
    before = {id(segment.source.index) for segment in decodes.step().segments if not segment.batched}
    decodes.frames[1, 20] = decodes.frames.max() + 1
    after = {id(segment.source.index) for segment in decodes.step().segments if not segment.batched}
    assert len(before) == len(after) == 6
    assert len(before & after) == 4


def test_who_leaves_takes_only_its_own_segments_along() -> None:
    decodes = Decodes([3000, 3000, 3000])
    gathers = {id(segment.source.index) for segment in decodes.step().segments if not segment.batched}
    decodes.contexts, decodes.frames = decodes.contexts[:2], decodes.frames[:2]
    left = {id(segment.source.index) for segment in decodes.step().segments if not segment.batched}
    assert len(left) == 4
    assert left < gathers


def test_two_batches_of_one_planner_ask_in_turns() -> None:
    """A plan is that of the batch that asks, whatever batch came before."""
    cases = [PagedCase([(300 + at, 1), (90, 1)], page_size=16, seed=at) for at in range(2)]
    shared = AttentionPlanner()
    for case in cases:
        case.batch.planner = shared
    for case in cases * 3:
        assert case.error(scale=0.3) < 1e-5


def test_a_plan_of_too_many_slots_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "MAX_CACHED_SLOTS", 2000)
    small, large = Decodes([900]), Decodes([1500, 1500])
    assert small.step() is small.step()
    assert large.step() is not large.step()
    assert not large.planner._plans
