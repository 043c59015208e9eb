"""Rows against entries of their own: tiles, selected entries and the merging of parts, against slow references."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kernels import tiles
from quire.kernels.attention import attend_selected, attend_tile, merge_attention, paged_attention_lse
from quire.kernels.backend import AttentionBackend
from quire.kernels.batch import PagedBatch
from quire.kernels.fields import LatentFields, PagedField
from quire.kernels.terms import AttentionTerms
from quire.kernels.tiles import SelectingRows, tiles_of

HEADS, FIRST, SECOND = 3, 5, 3


def batch_of(sequences: list[tuple[int, int]], page_size: int, seed: int) -> PagedBatch:
    """Sequences (context, new) on frames in a random order."""
    pages = [-(-context // page_size) for context, _ in sequences]
    order = iter((np.random.default_rng(seed).permutation(sum(pages)) + 1).tolist())
    frames = np.zeros((len(pages), max(pages)), dtype=np.int32)
    for r, count in enumerate(pages):
        frames[r, :count] = [next(order) for _ in range(count)]
    starts, stops = np.array([(context - new, context) for context, new in sequences]).T
    return PagedBatch.of(frames, starts, stops, page_size)


@st.composite
def steps(draw) -> list[tuple[int, int]]:
    found = []
    for _ in range(draw(st.integers(1, 5))):
        context = draw(st.integers(1, 40))
        found.append((context, 1 if draw(st.booleans()) else draw(st.integers(0, context))))
    return found


@settings(max_examples=80)
@given(sequences=steps(), per=st.sampled_from([1, 4]), pairs=st.sampled_from([1, 50, 10_000]), seed=st.integers(0, 9))
def test_every_row_sees_its_complete_entries_once(sequences, per, pairs, seed):
    batch = batch_of(sequences, 8, seed)
    before, tiles.MAX_PAIRS = tiles.MAX_PAIRS, pairs
    try:
        found = tiles_of(batch, np.arange(len(sequences)), per, torch.device("cpu"))
    finally:
        tiles.MAX_PAIRS = before
    seen = {}
    for tile in found:
        slots = tile.slots.view(len(tile.rows), tile.width)
        for i, rows in enumerate(tile.rows.tolist()):
            for j, row in enumerate(rows):
                assert row not in seen
                seen[row] = (int(tile.positions[i, j]), slots[i][tile.visible[i, j]].tolist())
    row = 0
    for r, (context, new) in enumerate(sequences):
        for position in range(context - new, context):
            entries = range((position + 1) // per)
            wanted = [int(batch.frames[r, e * per // 8]) * (8 // per) + e % (8 // per) for e in entries]
            if wanted:
                assert seen.pop(row) == (position, wanted)
            else:
                assert seen.pop(row, (position, [])) == (position, [])
            row += 1
    assert not seen


def pool_of(num_slots: int, page: int = 1) -> tuple[LatentFields, torch.Tensor]:
    torch.manual_seed(0)
    first, second = (torch.randn(num_slots // page, page, width) for width in (FIRST, SECOND))
    return LatentFields(PagedField(first), PagedField(second)), torch.cat((first, second), -1).flatten(0, 1)


def slow(query: torch.Tensor, rows: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Of one row `[heads, dim]` over tokens `[n, dim]` whose key is their value, in float64."""
    scores = query.double() @ rows.double().T * scale
    return scores.softmax(-1) @ rows.double(), scores.logsumexp(-1)


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("word", ["torch", "native"])
def test_selected_tokens_equal_the_reference(word, count):
    """Natively if a group is one row. Each call is counted where it was computed."""
    backend = AttentionBackend(word)
    tokens, rows = pool_of(50)
    query = torch.randn(3, count, HEADS, FIRST + SECOND)
    index = torch.randint(0, 50, (3, 7))
    hidden = torch.rand(3, count, 7) < 0.5
    hidden[1, 0] = True
    out, lse = attend_tile(query, tokens, index.flatten(), hidden, AttentionTerms(scale=0.4), backend)
    alone = word == "native" and count == 1
    assert backend.calls == {"native" if alone else "torch": 1}
    assert backend.fallbacks == ({"rows that read the same entries": 1} if word == "native" and count > 1 else {})
    for group in range(3):
        for row in range(count):
            if hidden[group, row].all():
                assert not out[group, row].any()
                assert (lse[group, row] == -torch.inf).all()
                continue
            wanted, wanted_lse = slow(query[group, row], rows[index[group][~hidden[group, row]]], 0.4)
            assert (out[group, row] - wanted).abs().max() < 1e-5
            assert (lse[group, row] - wanted_lse).abs().max() < 1e-5


@pytest.mark.parametrize("word", ["torch", "native"])
def test_rows_read_what_they_selected(word):
    batch = batch_of([(30, 3), (9, 1), (20, 20)], 4, 1)
    selecting = SelectingRows(batch, np.array([0, 2]), 1, torch.device("cpu"))
    assert selecting.rows.tolist() == [0, 1, 2, *range(4, 24)]
    tokens, rows = pool_of(80, 4)
    query = torch.randn(23, HEADS, FIRST + SECOND)
    positions = torch.randint(0, 20, (23, 6))
    hidden = torch.rand(23, 6) < 0.3
    hidden[:, 0] = False
    slots = selecting.slots_of(positions)
    for row in range(23):
        owner = 0 if row < 3 else 2
        assert slots[row].tolist() == [int(batch.frames[owner, p // 4]) * 4 + p % 4 for p in positions[row].tolist()]
    out, _ = attend_selected(query, tokens, slots, hidden, AttentionTerms(scale=0.4), AttentionBackend(word))
    for row in range(23):
        wanted, _ = slow(query[row], rows[slots[row][~hidden[row]]], 0.4)
        assert (out[row] - wanted).abs().max() < 1e-5


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0, 2.0])])
@pytest.mark.parametrize("word", ["torch", "native"])
def test_parts_merge_to_one_attention(sinks, word):
    """A window and chosen tokens, of rows some of which choose none."""
    batch = batch_of([(30, 3), (9, 1), (20, 20)], 4, 1)
    batch.backend = AttentionBackend(word)
    tokens, rows = pool_of(80, 4)
    query = torch.randn(24, HEADS, FIRST + SECOND)
    window = paged_attention_lse(query, tokens, batch, AttentionTerms(scale=0.4, window=5))
    slots, hidden = torch.randint(0, 80, (24, 6)), torch.rand(24, 6) < 0.5
    hidden[::2] = True
    chosen = attend_selected(query, tokens, slots, hidden, AttentionTerms(scale=0.4), batch.backend)
    merged = merge_attention([window, chosen], sinks)
    positions, owners = batch.positions(), np.repeat([0, 1, 2], [3, 1, 20])
    for row in range(24):
        near = range(max(0, int(positions[row]) - 4), int(positions[row]) + 1)
        read = [int(batch.frames[owners[row], p // 4]) * 4 + p % 4 for p in near] + slots[row][~hidden[row]].tolist()
        wanted, lse = slow(query[row], rows[read], 0.4)
        if sinks is not None:
            wanted = wanted * torch.sigmoid(lse - sinks).unsqueeze(-1)
        assert (merged[row] - wanted).abs().max() < 1e-5
