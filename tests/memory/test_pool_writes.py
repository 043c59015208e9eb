"""No write lands in a copy: what layers write through a pool's fields is in the bytes of its frames.

A field is a strided view of frames. Torch copies such a view where an operator cannot describe it in one stride, and
what is written to the copy is lost without a word.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from quire.kernels.fields import SlotIndex, _Rows
from quire.kernels.moves import TORCH
from quire.memory.pool import Pool
from quire.models.forward import paged_field, slots_of
from quire.spec.layout import PER_PAGE, DType, Field, PageLayout, scales_of
from tests.changes import slow_unless_changed
from tests.memory.layouts import PAGE_SIZES, layouts

FRAMES = 4
PLACES = ((1, 0), (3, -1), (4, 0), (2, -1))
"""Frames, and entries in them, that are written."""


def entries_of(layout: PageLayout, name: str, layer: int) -> Iterator[tuple[Field, int, int]]:
    """The field of a layer, where its first entry lies in a frame, and the bytes of an entry: by the layout alone."""
    start = 0
    for field in layout.fields:
        size = math.prod(field.shape) * field.dtype.itemsize
        if field.name == name and layer in field.layers:
            yield field, start + field.layers.index(layer) * field.entries(layout.page_size) * size, size
        start += field.bytes_per_frame(layout.page_size)


def check_field(layout: PageLayout, field: Field, layer: int, rng: np.random.Generator) -> None:
    """Rows that are written are read again, in other frames' order too, and change the bytes of their entries alone."""
    pool = Pool(layout, FRAMES)
    entries = field.entries(layout.page_size)
    slots = torch.tensor([frame * entries + offset % entries for frame, offset in PLACES])
    changed = np.zeros((FRAMES + 1, layout.bytes_per_frame), dtype=np.bool_)
    for name in (field.name, scales_of(field.name)) if field.kv_format and field.kv_format.scale else (field.name,):
        for _, start, size in entries_of(layout, name, layer):
            for frame, offset in PLACES:
                at = start + offset % entries * size
                changed[frame, at : at + size] = True
    numbers = torch.from_numpy(rng.uniform(1.0, 2.0, (len(PLACES), *shape_of(field)))).float()
    if field.per == PER_PAGE:
        frames = torch.tensor([frame for frame, _ in PLACES])
        TORCH.write_states(pool.layer(field.name, layer), frames, numbers.to(pool.layer(field.name, layer).dtype))
        assert torch.equal(
            TORCH.read_states(pool.layer(field.name, layer), frames).float(),
            numbers.to(pool.layer(field.name, layer).dtype).float(),
        )
    else:
        stored = paged_field(pool, field.name, layer)
        written = stored.write(SlotIndex(slots), numbers)
        order = torch.from_numpy(rng.permutation(len(PLACES)))
        assert torch.equal(stored.gather(slots[order], torch.float32, "read"), written[order])
    found = pool.rows.numpy() != 0
    assert not (found & ~changed).any(), "a write changed the bytes of another entry"
    assert all(found[frame][changed[frame]].any() for frame, _ in PLACES), "a write is lost"


def shape_of(field: Field) -> tuple[int, ...]:
    """The numbers of an entry before they are encoded."""
    if field.kv_format is None:
        return field.shape
    return (*field.shape[:-1], field.shape[-1] * field.dtype.itemsize * 8 // field.kv_format.bits)


def check_layout(layout: PageLayout, rng: np.random.Generator) -> int:
    """All kinds of fields, each in its last layer."""
    names = {field.name for field in layout.fields}
    numbers = [field for field in layout.fields if not any(field.name == scales_of(name) for name in names)]
    for field in numbers:
        check_field(layout, field, field.layers[-1], rng)
    return len(numbers)


@slow_unless_changed("src/quire/memory/", "src/quire/kernels/", "src/quire/spec/", "tests/memory/")
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_no_write_of_a_quarter_of_layouts_is_lost(page_size: int) -> None:
    assert check_layouts(page_size, PAGE_SIZES.index(page_size)) > 80


@pytest.mark.slow
@pytest.mark.parametrize("first", range(4))
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_no_write_of_any_layout_is_lost(page_size: int, first: int) -> None:
    assert check_layouts(page_size, first) > 80


def check_layouts(page_size: int, first: int) -> int:
    """Every fourth layout whose frames are small, from this one on. How strides divide does not depend on heads."""
    rng = np.random.default_rng(page_size)
    found = list(layouts(page_size, (40 if page_size == 1 else 160) * 2**10))[first::4]
    return sum(check_layout(layout, rng) for _, layout in found)


def odd_layout() -> PageLayout:
    """Fields whose rows do not divide the distance of frames, of several widths."""
    widths = {"k": 8, "v": 5, "narrow": 1}
    return PageLayout(
        4,
        tuple(
            Field(name=name, shape=(width,), dtype=DType.BFLOAT16, layers=(0, 1, 2)) for name, width in widths.items()
        ),
    )


def test_rows_that_do_not_divide_a_frame_are_written_too() -> None:
    layout, rng = odd_layout(), np.random.default_rng(0)
    ratios = [_Rows(Pool(layout, 1).layer(field.name, 0))._flat is None for field in layout.fields]
    assert ratios == [False, True, False]
    assert check_layout(layout, rng) == 3


def test_places_are_those_of_each_field() -> None:
    """One derived array serves the fields of one ratio, and no other one."""
    pool = Pool(odd_layout(), FRAMES)
    places = SlotIndex(torch.tensor([5, 17]))
    for field in pool.layout.fields:
        for layer in field.layers:
            paged_field(pool, field.name, layer).write(places, torch.ones(2, field.shape[0]))
    assert len(places._found) == 2  # of "k" and of "narrow"
    written = pool.layer("narrow", 2).float().sum(-1)
    assert written[1, 1] == written[4, 1] == 1 and written.count_nonzero() == 2


def test_slots_are_moved_in_place() -> None:
    """Drafts that were right are moved by slot, in all fields and layers."""
    pool = Pool(odd_layout(), FRAMES)
    for field, tensor in pool.tensors:
        tensor[:, 2, 3] = float(len(field.name))
    TORCH.move(slots_of(pool), torch.tensor([11]), torch.tensor([4]))
    for field, tensor in pool.tensors:
        assert (tensor[:, 1, 0] == len(field.name)).all() and tensor.count_nonzero() == 2 * tensor[:, 1, 0].numel()
