"""Rows of a pool, plain and encoded: what is written is read, by every way of reading, and attention sees the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.kernels.attention import paged_attention
from quire.kernels.codec import encode
from quire.kernels.fields import KVFields, PagedField
from quire.kernels.terms import AttentionTerms
from quire.models.forward import paged_field
from quire.spec.kv_format import KV_FORMATS
from tests.changes import KERNELS, unless_changed
from tests.covering import each_of
from tests.kernels.paged_case import PagedCase, Shape, both_backends  # noqa: F401
from tests.kernels.stored_case import (
    ENCODED,
    FORMATS,
    PAGE,
    WIDTH,
    check_stored,
    copy_frame,
    pool_of,
    round_trip,
)

pytestmark = unless_changed(__name__, *KERNELS)


def read(stored: PagedField, frame: int) -> Tensor:
    """The rows of a frame."""
    return stored.gather(torch.arange(frame * PAGE, (frame + 1) * PAGE), torch.float32, "read")


SCALED = [name for name in ENCODED if FORMATS[name].scale is not None]


def test_rows_land_at_their_slots_and_nowhere_else():
    pool = torch.full((4, 3, 2, 5), torch.nan, dtype=torch.bfloat16)
    rows = torch.randn(2, 4, 5).transpose(0, 1)  # [4, 2, 5], not contiguous, as models give them
    slots = torch.tensor([7, 3, 11, 5])
    PagedField(pool).write(slots, rows)
    flat = pool.flatten(0, 1)
    assert torch.equal(flat[slots], rows.to(torch.bfloat16))
    others = [slot for slot in range(12) if slot not in slots.tolist()]
    assert flat[others].isnan().all()


def test_padding_may_share_the_sink():
    pool = torch.zeros(2, 4, 1, 1)
    PagedField(pool).write(torch.tensor([0, 0, 5]), torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1))
    assert pool[1, 1].item() == 3.0
    assert pool[0, 0].item() in (1.0, 2.0)


@each_of("seed", range(4 * len(FORMATS)))
def test_any_writes_reads_and_copies(seed):
    check_stored(seed)


@each_of("seed", range(2 * len(FORMATS)))
def test_rows_in_records_of_host_memory_are_the_same(seed):
    check_stored(seed, hosted=True)


def test_plain_rows_are_stored_in_place_and_written_as_they_are():
    """The usual cache costs nothing for the others: no copy of what kernels read, nor of what is new."""
    pool = torch.zeros(3, 4, 2, 8)
    stored = PagedField(pool)
    rows = torch.randn(2, 2, 8)
    assert stored.write(torch.tensor([4, 9]), rows) is rows
    assert stored.stored[0].data_ptr() == pool.data_ptr()


def test_a_plain_pool_of_another_dtype_rounds_what_is_new():
    stored = PagedField(torch.zeros(3, 4, 2, 8, dtype=torch.bfloat16))
    rows = torch.randn(2, 2, 8)
    new = stored.write(torch.tensor([4, 5]), rows)
    assert torch.equal(new, rows.bfloat16().float())
    assert torch.equal(new, stored.gather(torch.arange(4, 6), torch.float32, "read"))


@pytest.mark.parametrize("name", ENCODED)
def test_a_frame_takes_the_bytes_of_its_format(name):
    """Nothing is kept beside the pool: a fresh look at the tensors reads the same."""
    pool = pool_of(FORMATS[name])
    rows = torch.randn(PAGE, 2, WIDTH)
    slots = torch.arange(PAGE, 2 * PAGE)
    new = paged_field(pool, "v", 0).write(slots, rows)
    assert torch.equal(read(paged_field(pool, "v", 0), 1), new)
    assert not pool.layer("k", 0).float().any()
    assert not pool.layer("v", 0)[2:].float().any()


def test_a_format_that_has_scales_is_not_built_without():
    kv_format = KV_FORMATS["mxfp8"]
    frames = torch.zeros(3, 4, 2, WIDTH, dtype=torch.float8_e4m3fn)
    with pytest.raises(AssertionError, match="mxfp8 and its scales"):
        PagedField(frames, None, kv_format)


# -- attention


def encoded_case(
    name: str, seed: int = 3, dtype: torch.dtype = torch.float32
) -> tuple[PagedCase, PagedField, PagedField]:
    """Chunks and decodes over shared, scattered and consecutive pages, with keys of several sizes, and them encoded."""
    shape = Shape(key_dim=WIDTH, value_dim=WIDTH, dtype=dtype)
    mix = [(340, 1), (330, 1), (350, 40), (300, 1), (12, 12), (520, 1)]
    case = PagedCase(mix, page_size=16, shared=288, scattered=seed % 2 == 0, shape=shape, seed=seed)
    case.keys *= torch.exp2(torch.arange(16) % 5 - 2).view(16, 1, 1)
    pools = []
    for plain in (case.keys, case.values):
        numbers, scales = encode(plain, FORMATS[name])
        pools.append(PagedField(numbers, scales, FORMATS[name]))
    return case, *pools


def attend(case: PagedCase, keys: PagedField, values: PagedField, new: tuple[Tensor, Tensor], **options: Any):
    """Attention after the step's own rows were written."""
    fields = KVFields(keys, values)
    fields.write(case.new, *new)
    return paged_attention(case.query, fields, case.batch, AttentionTerms(scale=0.02, **options))


@each_of("name", ENCODED)
@each_of("dtype", [torch.float32, torch.bfloat16])
@each_of("window", [0, 100])
def test_attention_equals_that_over_what_was_stored(name, dtype, window, both_backends):  # noqa: F811
    """Encoded pools give what plain pools of the decoded numbers give, of new tokens and of old ones: bit for bit by
    torch's operators. The native kernel adds in another order, and does not round decoded numbers to bfloat16."""
    case, keys, values = encoded_case(name, dtype=dtype)
    new = tuple(torch.randn(len(case.new), 2, WIDTH).to(dtype) for _ in range(2))
    found = attend(case, keys, values, new, window=window)
    plain = [PagedField(round_trip(pool, FORMATS[name])) for pool in (case.keys, case.values)]
    expected = attend(case, *plain, tuple(round_trip(rows, FORMATS[name]) for rows in new), window=window)
    assert bool(found.isfinite().all())
    if both_backends.calls["native"]:
        assert (found - expected).abs().max() < {torch.float32: 1e-4, torch.bfloat16: 0.1}[dtype]
    else:
        assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ENCODED)
def test_a_token_read_later_is_the_one_that_was_new(name):
    """What a chunk computes with its own keys, a later step finds in the pool: results do not depend on the chunks."""
    case, keys, values = encoded_case(name)
    new = tuple(torch.randn(len(case.new), 2, WIDTH) for _ in range(2))
    returned = keys.write(case.new, new[0]), values.write(case.new, new[1])
    for stored, rows in zip((keys, values), returned, strict=True):
        assert torch.equal(stored.gather(case.new, torch.float32, "later"), rows)


@pytest.mark.parametrize("name", ENCODED)
def test_a_copied_page_gives_the_same_attention(name):
    """Scales travel with their page: frames moved elsewhere, all fields, byte by byte, are as good as the first."""
    pool = pool_of(FORMATS[name], frames=2 * 40, page=16)
    case = PagedCase([(300, 1), (200, 30)], page_size=16, shape=Shape(key_dim=WIDTH, value_dim=WIDTH), seed=1)
    slots = torch.unique(torch.cat([torch.from_numpy(one) for one in case.slots]))
    for field, plain in (("k", case.keys), ("v", case.values)):
        paged_field(pool, field, 0).write(slots, plain.flatten(0, 1)[slots] * 3)
    before = _attend_in(pool, case)
    frames = sorted({int(slot) // 16 for slot in slots})
    for frame in frames:
        copy_frame(pool, frame, frame + 40)
        pool.layer("k", 0)[frame], pool.layer("v", 0)[frame] = 0, 0
    case.batch.frames[case.batch.frames > 0] += 40
    case.batch = replace(case.batch)
    assert torch.equal(_attend_in(pool, case), before)


@pytest.mark.parametrize("name", SCALED)
def test_a_page_copied_without_its_scales_is_noticed(name):
    """The comparison above can fail: it is the scales that carry the size of the numbers."""
    pool = pool_of(FORMATS[name])
    rows = torch.randn(PAGE, 2, WIDTH) * 3
    stored = paged_field(pool, "k", 0)
    new = stored.write(torch.arange(PAGE, 2 * PAGE), rows)
    copy_frame(pool, 1, 2, without="k_scale")
    copy_frame(pool, 1, 3)
    assert torch.equal(read(stored, 3), new)
    assert (read(stored, 2) - new).norm() > new.norm() / 2


def _attend_in(pool, case: PagedCase) -> Tensor:
    fields = KVFields(paged_field(pool, "k", 0), paged_field(pool, "v", 0))
    return paged_attention(case.query, fields, case.batch, AttentionTerms(scale=0.05))


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
def test_a_device_stores_and_reads_what_the_cpu_does(name):
    here, there = pool_of(FORMATS[name]), pool_of(FORMATS[name], device="cuda")
    rows = torch.randn(5, 2, WIDTH, dtype=torch.bfloat16)
    slots = torch.tensor([4, 19, 7, 8, 25])
    found = paged_field(there, "k", 0).write(slots.cuda(), rows.cuda())
    assert torch.equal(found.cpu(), paged_field(here, "k", 0).write(slots, rows))
    for field in ("k", "k_scale"):
        if here.has(field, 0):
            assert torch.equal(_bits(there.layer(field, 0).cpu()), _bits(here.layer(field, 0)))
    gathered = paged_field(there, "k", 0).gather(slots.cuda(), torch.bfloat16, "k")
    assert torch.equal(gathered.cpu(), found.cpu())


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)
