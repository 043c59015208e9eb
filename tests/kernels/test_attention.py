"""Paged attention against a slow reference: every mix of chunks, decodes, sharing, windows, caps and sinks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import UnsupportedModel
from quire.kernels import reference, tiles
from quire.kernels.batch import PagedBatch
from quire.kernels.page_arrays import shared_runs
from tests.covering import each_of, few
from tests.kernels.paged_case import PagedCase, Shape, both_backends  # noqa: F401
from tests.kernels.steps_case import check_steps

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@st.composite
def sequences(draw, *, shared: int) -> list[tuple[int, int]]:
    """Up to six sequences beyond a shared prefix: decodes mostly, and chunks that may start anywhere."""
    found = []
    for _ in range(draw(st.integers(1, 6))):
        context = shared + draw(st.integers(1, 60))
        new = 1 if draw(st.booleans()) else draw(st.integers(1, context))
        found.append((context, new))
    return found


@settings(max_examples=150)
@given(data=st.data(), page_size=st.sampled_from([1, 3, 16]), scattered=st.booleans(), seed=st.integers(0, 99))
def test_any_mix_equals_the_reference(data, page_size, scattered, seed):
    shared = data.draw(st.sampled_from([0, 0, 5, 40, 300]), label="shared")
    shape = Shape(
        kv_heads=data.draw(st.sampled_from([1, 2, 3]), label="kv_heads"),
        group=data.draw(st.sampled_from([1, 2, 4]), label="group"),
        value_dim=data.draw(st.sampled_from([8, 8, 4, 12]), label="value_dim"),
        dtype=data.draw(st.sampled_from(list(TOLERANCE)), label="dtype"),
    )
    mix = data.draw(sequences(shared=shared), label="sequences")
    case = PagedCase(mix, page_size=page_size, shared=shared, scattered=scattered, shape=shape, seed=seed)
    error = case.error(
        scale=data.draw(st.sampled_from([0.25, 1.0]), label="scale"),
        window=data.draw(st.sampled_from([0, None, 1, 2, 7, 33, 128, 1000]), label="window"),
        chunked=data.draw(st.booleans(), label="chunked"),
        softcap=data.draw(st.sampled_from([None, None, 5.0]), label="softcap"),
        sinks=data.draw(st.sampled_from([None, torch.linspace(-2, 3, shape.kv_heads * shape.group)]), label="sinks"),
    )
    assert error < TOLERANCE[shape.dtype]


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("window", "chunked"), [(0, False), (300, False), (300, True)])
def test_long_contexts_cross_every_size_limit(monkeypatch, scattered, dtype, window, chunked):
    """Several tiles of decodes and of a chunk, and scores that are computed in parts."""
    monkeypatch.setattr(reference, "MOST_TOKENS", 600)
    monkeypatch.setattr(reference, "MOST_PAIRS", 40_000)
    monkeypatch.setattr(reference, "MOST_SCORES", 50_000)
    monkeypatch.setattr(tiles, "WINDOW_ROWS", 64)
    mix = [(1400, 1), (700, 1), (690, 1), (30, 1), (64, 64), (900, 200), (1300, 2)]
    case = PagedCase(mix, page_size=16, shared=16, scattered=scattered, shape=Shape(dtype=dtype))
    assert case.error(scale=0.3, window=window, chunked=chunked) < TOLERANCE[dtype]


def test_prefix_of_a_prefix_is_shared_in_levels():
    """Two families of decodes below one system prompt, in rows that are not consecutive, and a chunk."""
    case = PagedCase([(700, 1), (650, 1), (640, 1), (660, 30), (900, 1)], page_size=16, shared=320)
    case.batch.frames[3, :36] = case.batch.frames[1, :36]
    for r in (1, 3):
        case.slots[r] = case._slots(case.batch.frames[r], case.sequences[r][0], 16)
    runs = case.batch.shared_runs(np.array([43, 40, 39, 39, 56]), "levels")
    assert [(members.tolist(), first, stop) for members, first, stop in runs] == [
        ([0, 1, 2, 3, 4], 0, 20),
        ([1, 3], 20, 36),
    ]
    assert case.error(scale=0.3) < 1e-5


def test_a_shared_run_is_long():
    case = PagedCase([(2112, 1)] * 16, page_size=16, shared=2048, scattered=False)
    assert case.error(scale=0.3) < 1e-5


@pytest.mark.parametrize("seed", few(range(60), 20))
def test_sequences_that_grow_share_come_and_go(seed, both_backends):  # noqa: F811
    check_steps(seed, both_backends)


def test_rows_do_not_depend_on_their_neighbours_beyond_rounding():
    alone = PagedCase([(300, 1)], page_size=16, seed=4)
    together = PagedCase([(300, 1), (300, 1), (90, 40)], page_size=16, shared=288, seed=4)
    together.keys[together.batch.frames[0]] = alone.keys[alone.batch.frames[0]]
    together.values[together.batch.frames[0]] = alone.values[alone.batch.frames[0]]
    together.query[0] = alone.query[0]
    assert (alone.attend(scale=0.3)[0] - together.attend(scale=0.3)[0]).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ({"scale": 0.3}, {"scale": 0.33}),
        ({"scale": 0.3, "window": 20}, {"scale": 0.3, "window": 21}),
        ({"scale": 0.3, "window": 20, "chunked": True}, {"scale": 0.3, "window": 21, "chunked": True}),
        ({"scale": 0.3, "window": 20, "chunked": True}, {"scale": 0.3, "window": 20}),
        ({"scale": 0.3, "softcap": 3.0}, {"scale": 0.3}),
        ({"scale": 0.3, "sinks": torch.ones(4)}, {"scale": 0.3}),
    ],
)
def test_the_comparison_notices_a_wrong_option(right, wrong):
    case = PagedCase([(90, 1), (70, 20)], page_size=16)
    assert (case.attend(**wrong).double() - case.expected(**right)).abs().max() > 1e-3


def shapes_of_tiles(case: PagedCase, window: int = 0) -> list[tuple[int, int]]:
    """Sequences and rows of each, by tile."""
    case.attend(scale=0.3, window=window)
    found = case.batch.derived(("seen", window, False), lambda batch: [])
    return [tuple(tile.rows.shape) for tile in found]


def test_a_few_rows_of_each_of_several_sequences_share_a_tile(both_backends):  # noqa: F811
    """Eight sequences with five new tokens cost as many calls as with one."""
    one = PagedCase([(90, 1)] * 8, page_size=16)
    case = PagedCase([(90 + extra, 5) for extra in range(8)], page_size=16, shape=Shape(group=3))
    assert case.error(scale=0.3) < 1e-5
    assert case.error(scale=0.3, window=40) < 1e-5
    if both_backends.calls["torch"]:
        assert (shapes_of_tiles(one), shapes_of_tiles(case), shapes_of_tiles(case, 40)) == (
            [(8, 1)],
            [(8, 5)],
            [(8, 5)],
        )


BINARY = [(row - 1) // 2 if row else -1 for row in range(15)]
FOUR_WIDE = [-1, *(row - 4 if row > 4 else 0 for row in range(1, 13))]  # three deep behind the first
CHAIN = list(range(-1, 8))


@each_of("past", [3, 60, 130, 300])
@each_of("page_size", [1, 4, 16, 64])
@each_of("tree", [BINARY, FOUR_WIDE, CHAIN])
def test_a_draft_sees_the_past_and_the_drafts_it_follows(tree, page_size, past):
    """Three sequences with different pasts; also within a window, where a position is a depth."""
    mix = [(past + extra + len(tree), len(tree)) for extra in (0, 1, 37)]
    case = PagedCase(mix, page_size=page_size, trees=[tree] * 3)
    assert case.error(scale=0.3) < 1e-5
    for window in (2, 33):
        assert case.error(scale=0.3, window=window) < 1e-5
    unmasked = PagedCase(mix, page_size=page_size)
    assert ((unmasked.attend(scale=0.3) - case.attend(scale=0.3)).abs().max() > 1e-2) == (tree is not CHAIN)


@pytest.mark.parametrize("shared", [0, 320])
def test_trees_beside_chunks_decodes_and_chains(shared):
    """A tree of more rows than are batched otherwise, behind a shared prefix or not; parts of the batch keep trees."""
    large = [(row - 1) // 3 if row else -1 for row in range(40)]
    trees = [BINARY, [-1], list(range(-1, 49)), list(range(-1, 14)), large, [-1, -1, 0]]
    mix = [(shared + 90 + 7 * len(tree), len(tree)) for tree in trees]
    case = PagedCase(mix, page_size=16, shared=shared, trees=trees)
    for window in (0, 50, 1100):
        assert case.error(scale=0.3, window=window) < 1e-5
    chosen = np.array([5, 0])
    rows, part = case.batch.part(chosen)
    assert part.parents.tolist() == [-1, -1, 0, *(parent + 3 if parent >= 0 else -1 for parent in BINARY)]
    assert part.positions().tolist() == case.batch.positions()[rows].tolist()


def test_trees_are_refused_in_chunks():
    case = PagedCase([(40, 3)], page_size=16, trees=[[-1, 0, 0]])
    with pytest.raises(UnsupportedModel, match="chunked attention"):
        case.attend(scale=0.3, window=8, chunked=True)


def test_a_step_without_rows_of_a_sequence():
    case = PagedCase([(20, 0), (30, 1)], page_size=16)
    assert case.error(scale=0.3) < 1e-5


def test_shared_runs_of_page_tables():
    frames = np.array([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6, 7], [8, 9, 9, 9]], dtype=np.int32)
    found = [
        (members.tolist(), first, stop) for members, first, stop in shared_runs(frames, np.array([4, 4, 4, 4]), 128)
    ]
    assert found == [([0, 1, 2], 0, 2)], "the third page of two rows saves 128 tokens: not worth a segment"
    found = [(m.tolist(), a, b) for m, a, b in shared_runs(frames, np.array([4, 4, 4, 4]), 256)]
    assert found == [([0, 1, 2], 0, 2), ([0, 1], 2, 3)]
    assert not list(shared_runs(frames, np.array([1, 0, 0, 4]), 1024)), "only full pages of the past count"


def test_batch_refuses_more_new_tokens_than_context():
    with pytest.raises(AssertionError, match="part of its context"):
        PagedBatch(
            query_starts=np.array([0, 3], dtype=np.int32),
            context_lens=np.array([2], dtype=np.int32),
            frames=np.ones((1, 1), dtype=np.int32),
            slots=np.zeros(3, dtype=np.int32),
            page_size=4,
        )
