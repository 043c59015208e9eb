"""Plans of attention whose sizes follow from the number of rows alone: every key that a row sees is in one of its
parts, once, and so it is with pads and with runs that sequences share."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kernels.batch import PagedBatch
from quire.kernels.triton.tasks import Blocks, TaskPlan, plan_tasks
from tests.kernels.paged_case import PagedCase, Shape
from tests.kernels.triton.triton_case import check_case

PAGE = 4
BLOCKS = (
    Blocks(small=4, large=16, programs=2, wanted=8),
    Blocks(small=1, large=4, programs=1, wanted=40),
    Blocks(small=4, large=8, programs=8, wanted=1),
)


def decode(lengths: list[int], parents: list[int], depths: list[int], pads: int) -> PagedBatch:
    """Sequence i of `lengths[i]` tokens begins with `depths[i]` pages of sequence `parents[i]`."""
    width = max(-(-length // PAGE) for length in lengths)
    frames = np.zeros((len(lengths) + pads, width), dtype=np.int32)
    free = 1
    for at, length in enumerate(lengths):
        pages = -(-length // PAGE)
        frames[at, :pages] = np.arange(free, free + pages)
        free += pages
        shared = min(depths[at], (length - 1) // PAGE, (lengths[parents[at] % (at + 1)] - 1) // PAGE)
        frames[at, :shared] = frames[parents[at] % (at + 1), :shared]
    contexts = np.array(lengths + [1] * pads, dtype=np.int32)
    batch = PagedBatch.of(frames, contexts - 1, contexts, PAGE)
    batch.fixed = True
    return batch


def shapes(plan: TaskPlan) -> object:
    return [
        *((name, tensor.shape) for name, tensor in plan.arrays.items()),
        plan.num_small,
        plan.num_tasks,
        plan.num_parts,
    ]


def check_plan(batch: PagedBatch, window: int, blocks: Blocks) -> None:
    plan = plan_tasks(batch, window, blocks, torch.device("cpu"), chunked=False)
    rows = len(batch.context_lens)
    found = {name: tensor.numpy() for name, tensor in plan.arrays.items()}
    seen = [np.zeros(int(context), dtype=np.int64) for context in batch.context_lens]
    places: list[list[int]] = [[] for _ in range(rows)]
    for number, (at, count, first, stop, sequence) in enumerate(found["tasks"].reshape(-1, 5).tolist()):
        assert count <= (blocks.small if number < plan.num_small else blocks.large)
        for entry in range(at, at + count):
            row = int(found["task_rows"][entry])
            low, high = int(found["lows"][row]), int(found["highs"][row])
            begin, end = max(first, low), min(stop, high + 1)
            seen[row][begin:end] += 1
            pages = slice(begin // PAGE, -(-end // PAGE))
            assert begin >= end or (batch.frames[sequence, pages] == batch.frames[row, pages]).all()
            places[row].append(int(found["places"][entry]))
    for counted, context in zip(seen, batch.context_lens.tolist(), strict=True):
        low = max(0, context - window) if window else 0
        assert not counted[:low].any() and (counted[low:] == 1).all(), "each key once"
    merges = found["merges"].reshape(-1, 3).tolist()
    assert [row for row, _, _ in merges] == list(range(rows)), "every row has parts"
    used = [place for own in places for place in own]
    assert len(set(used)) == len(used) and max(used) < plan.num_parts and min(used) >= 0
    for row, first, count in merges:
        assert sorted(places[row]) == list(range(first, first + count))
    other = decode([7] * rows, [0] * rows, [0] * rows, 0)
    assert shapes(plan) == shapes(plan_tasks(other, window, blocks, torch.device("cpu"), chunked=False))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_key_is_read_once(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 900), min_size=1, max_size=12))
    many = st.lists(st.integers(0, 11), min_size=len(lengths), max_size=len(lengths))
    depths = data.draw(st.lists(st.integers(0, 200), min_size=len(lengths), max_size=len(lengths)))
    arrays = decode(lengths, data.draw(many), depths, data.draw(st.integers(0, 5)))
    check_plan(arrays, data.draw(st.sampled_from([0, 0, 33, 400])), data.draw(st.sampled_from(BLOCKS)))


def check_nested() -> None:
    """Prefixes of prefixes, which are more runs than there is space for."""
    rows = 9
    for blocks in BLOCKS:
        check_plan(
            decode([300 * rows] * rows, list(range(-1, rows - 1)), [70 * at for at in range(rows)], 2), 0, blocks
        )
        check_plan(decode([3, 500, 300, 2], [0, 0, 1, 0], [0, 0, 60, 0], 4), 0, blocks)


def test_runs_without_space_are_read_by_each() -> None:
    check_nested()


def test_kernels_compute_padded_plans() -> None:
    """By the interpreter, with NaN wherever nothing was written, but for the slot of the pads, which they write; rows
    of requests give what they give alone."""
    case = PagedCase([(70, 1), (33, 1), (5, 1)], page_size=16, shared=32, shape=Shape())
    whole = PagedCase([(70, 1), (33, 1), (5, 1)], page_size=16, shared=32, shape=Shape())
    for made in (case, whole):
        made.keys[0], made.values[0] = 0.5, 0.25
    case.batch = case.batch.padded(3)
    check_case(case, 8)
    more = PagedCase([(70, 1), (33, 1), (5, 1)], page_size=16, shared=32, shape=Shape())
    more.keys[0], more.values[0] = 0.5, 0.25
    backend = case.batch.backend
    whole.batch.backend = backend
    alone = whole.attend(scale=0.3)
    more.batch.backend = backend
    more.batch = more.batch.padded(5)
    more.new = torch.cat((more.new, torch.zeros(2, dtype=torch.int64)))
    heads = more.query.shape[1]
    more.query = torch.cat((more.query, torch.randn(2, heads, more.query.shape[2])))
    padded = more.attend(scale=0.3)
    assert (padded[:3] - alone).abs().max() < 1e-6
    assert (padded[3:] - 0.25).abs().max() < 1e-6
