"""Frames to the host and back, byte for byte, for every layout there is."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from quire.kernels.native.copies import native_copy_rows
from quire.memory.frame_copies import CpuFrames, FrameCopies, Frames, copy_runs
from quire.memory.host_pool import HostPool
from quire.memory.pool import Pool
from quire.memory.record import HEADER_BYTES, check_record
from quire.spec.group import GroupSpec
from quire.spec.kv_format import KV_FORMATS
from quire.spec.layout import PER_PAGE, DType, Field, PageLayout
from tests.changes import slow_unless_changed
from tests.memory.frame_bytes import assert_frames, fill, ids, payload, pieces_of
from tests.memory.layouts import PAGE_SIZES, layouts, specs

FRAMES = 7
ORDERS = (
    ([1, 2, 3, 4], [2, 3, 4, 5]),  # one run
    ([5, 1, 2, 7], [3, 6, 7, 1]),  # pieces, out of order
    ([2, 1], [1, 2]),
    ([6], [4]),
)


@contextmanager
def both(layout: PageLayout) -> Iterator[tuple[Pool, Pool, HostPool]]:
    with closing(HostPool([GroupSpec(name="g", layout=layout)], [FRAMES], threads=1)) as host:
        yield Pool(layout, FRAMES), Pool(layout, FRAMES), host


def check_round_trip(name: str, layout: PageLayout, order: tuple[list[int], list[int]], seed: int) -> None:
    """Out, sealed, checked and back, into other frames than they came from, without the library and by it."""
    for frames in (CpuFrames, partial(CpuFrames, copy=native_copy_rows())):
        check_round_trip_by(frames, name, layout, order, seed)


def check_round_trip_by(
    frames: Frames, name: str, layout: PageLayout, order: tuple[list[int], list[int]], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    device, records = order
    back = [int(frame) + 1 for frame in rng.permutation(FRAMES)[: len(device)]]
    with both(layout) as (first, second, host):
        fill(first, rng)
        source = pieces_of(first)
        before = host.rows(0).copy()
        out, into = (FrameCopies([pool], host, frames) for pool in (first, second))
        assert out.bytes_of(0) == 64 + layout.bytes_per_frame
        out.to_host(0, ids(device), ids(records))
        for frame, row in zip(device, records, strict=True):
            before[row, HEADER_BYTES : HEADER_BYTES + layout.bytes_per_frame] = np.frombuffer(
                payload(source, frame), dtype=np.uint8
            )
        assert np.array_equal(host.rows(0), before), name
        keys = [hashlib.sha256(bytes([row])).digest() for row in records]
        out.seal(0, ids(records), keys)
        assert into.defects(0, ids(records), keys) == [""] * len(records)
        assert all(check_record(host.rows(0)[row]) == "" for row in records)

        into.to_device(0, ids(back), ids(records))
        assert_frames(pieces_of(second), source, dict(zip(back, device, strict=True)), name)


def check_all(page_size: int, most: int, first: int = 0, step: int = 1) -> int:
    found = list(layouts(page_size, most))[first::step]
    for count, (name, layout) in enumerate(found, 1):
        check_round_trip(name, layout, ORDERS[count % len(ORDERS)], count)
    return len(found)


@slow_unless_changed("src/quire/memory/", "src/quire/spec/", "tests/memory/")
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_every_layout_goes_out_and_comes_back(page_size: int) -> None:
    """Each at one page size."""
    most = (40 if page_size == 1 else 160) * 2**10
    assert check_all(page_size, most, PAGE_SIZES.index(page_size), len(PAGE_SIZES)) > 45


@pytest.mark.slow
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_every_layout_goes_out_and_comes_back_large_ones_too(page_size: int) -> None:
    """Each at every page size."""
    assert check_all(page_size, 8 * 2**20) > 600


def test_all_kinds_of_fields_are_among_them() -> None:
    assert len(specs()) > 180
    fields = [field for size in (1, 256) for _, layout in layouts(size, 160 * 2**10) for field in layout.fields]
    assert {field.dtype for field in fields} >= {DType.BFLOAT16, DType.FLOAT8_E4M3, DType.FLOAT8_E5M2, DType.UINT8}
    assert {field.kv_format.name for field in fields if field.kv_format} >= {"mxfp8", "fp4_e2m1", "nvfp4"} & set(
        KV_FORMATS
    )
    assert any(field.name.endswith("_scale") for field in fields)
    assert {field.per for field in fields} >= {PER_PAGE, 1, 4, 128}


@st.composite
def odd_layouts(draw: st.DrawFn) -> PageLayout:
    """Fields of odd sizes: pieces that no wider word divides, some of many bytes, layers in any order."""
    page_size = draw(st.sampled_from((1, 2, 6)))
    fields = []
    for index in range(draw(st.integers(1, 3))):
        shape = draw(st.sampled_from(((), (1,), (3,), (5, 7), (8,), (2, 4), (9000,))))
        layers = tuple(draw(st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True)))
        dtype = draw(st.sampled_from((DType.UINT8, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT8_E4M3)))
        per = draw(st.sampled_from([PER_PAGE, *(per for per in (1, 2) if page_size % per == 0)]))
        fields.append(Field(name=f"f{index}", shape=shape, dtype=dtype, layers=layers, per=per))
    layout = PageLayout(page_size, tuple(sorted(fields, key=lambda field: -field.dtype.itemsize)))
    assume(layout.bytes_per_frame % layout.fields[0].dtype.itemsize == 0)  # others are refused
    return layout


@st.composite
def orders(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    count = draw(st.integers(0, FRAMES))
    frames = st.permutations(range(1, FRAMES + 1))
    device, host = draw(frames)[:count], draw(frames)[:count]
    return (sorted(device), sorted(host)) if draw(st.booleans()) else (device, host)


@slow_unless_changed("src/quire/memory/", "src/quire/spec/", "tests/memory/")
@settings(max_examples=150, deadline=None)
@given(odd_layouts(), orders(), st.integers(0, 1000))
def test_layouts_of_odd_sizes_and_frames_in_any_order(
    layout: PageLayout, order: tuple[list[int], list[int]], seed: int
) -> None:
    check_round_trip("odd", layout, order, seed)


@pytest.mark.parametrize("width", [2**16, 2**16 + 40, 2**16 - 24])
@pytest.mark.parametrize("offset", [0, 8])
def test_large_copies_are_those_of_runs(width: int, offset: int) -> None:
    """Beyond some megabytes the library writes past the cache, where rows begin with a line of it."""
    if (copy := native_copy_rows()) is None:
        pytest.skip("no compiled library")
    rng, count = np.random.default_rng(width + offset), 90
    stride = -(-(width + offset) // 64) * 64
    memory = rng.integers(256, size=(3, count * stride + 64), dtype=np.uint8)
    source, target, expected = (
        each[-each.ctypes.data % 64 :][: count * stride].reshape(count, stride) for each in memory
    )
    expected[:] = target
    sources, targets = (ids(rng.permutation(count)[:70].tolist()) for _ in range(2))
    within = np.s_[:, offset : offset + width]
    copy(source[within], target[within], sources, targets)
    copy_runs(source[within], expected[within], sources, targets)
    assert 70 * width > 4 << 20 and np.array_equal(target, expected)


def test_groups_have_records_of_their_own() -> None:
    groups = [
        GroupSpec(name=name, layout=PageLayout(2, (Field(name="k", shape=(size,), dtype=DType.UINT8, layers=layers),)))
        for name, size, layers in (("full", 40, (1, 3)), ("states", 100, (0,)))
    ]
    pools = [Pool(group.layout, 4) for group in groups]
    rng = np.random.default_rng(0)
    for pool in pools:
        fill(pool, rng)
    with closing(HostPool(groups, [4, 4])) as host:
        copies = FrameCopies(pools, host)
        for index in range(2):
            copies.to_host(index, ids([1, 2]), ids([3, 4]))
            copies.seal(index, ids([3, 4]), [b"a" * 32, b"b" * 32])
        for index in range(2):
            assert copies.defects(index, ids([3, 4, 3]), [b"a" * 32, b"b" * 32, b"b" * 32]) == ["", "", "key"]
            assert bytes(host.rows(index)[4])[64 : copies.bytes_of(index)] == payload(pieces_of(pools[index]), 2)
        copies.to_host(0, ids([4]), ids([3]))
        assert copies.defects(0, ids([3]), [b"a" * 32]) == ["digest"]


@pytest.mark.parametrize(
    ("device", "host"), [([0], [1]), ([1], [0]), ([8], [1]), ([1], [8]), ([-1], [1]), ([1, 2], [1])]
)
def test_frames_that_are_none_are_our_own_mistake(device: list[int], host: list[int]) -> None:
    layout = PageLayout(1, (Field(name="k", shape=(4,), dtype=DType.UINT8, layers=(0,)),))
    with both(layout) as (pool, _, records):
        copies = FrameCopies([pool], records)
        with pytest.raises(AssertionError):
            copies.to_host(0, ids(device), ids(host))
        with pytest.raises(AssertionError):
            copies.to_device(0, ids(device), ids(host))
