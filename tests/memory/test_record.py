"""Records: golden bytes, and that every change of a record, or of its identity, is noticed and named."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from quire.memory.record import HEADER_BYTES, RecordFormat, Records, check_record
from quire.spec.layout import DType, Field, PageLayout
from quire.spec.record_size import record_stride
from tests.covering import each_of

KEY = bytes(range(100, 132))


def rows_of(payload_bytes: int, num_frames: int, seed: int = 0) -> Records:
    return np.random.default_rng(seed).integers(0, 256, (num_frames + 1, record_stride(payload_bytes)), dtype=np.uint8)


def key_of(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


# -- golden vectors: records written by one version are read by the next


@pytest.mark.parametrize(
    ("part", "layout", "payload", "key", "header"),
    [
        (
            3,
            bytes(range(16)),
            bytes(range(100)),
            KEY,
            "51555231030000006400000000000000000102030405060708090a0b0c0d0e0f"
            "6465666768696a6b6c6d6e6f70717273078658a036cbd96ae3d12234a19c41d3",
        ),
        (
            0,
            b"\xab" * 16,
            bytes(4096),
            bytes(32),
            "51555231000000000010000000000000abababababababababababababababab"
            "0000000000000000000000000000000008778d3721c2d16d0a79c909afa7c21a",
        ),
    ],
)
def test_golden_headers(part: int, layout: bytes, payload: bytes, key: bytes, header: str) -> None:
    form = RecordFormat(part, layout, len(payload))
    rows = rows_of(len(payload), 2)
    rows[1, HEADER_BYTES : form.num_bytes] = np.frombuffer(payload, dtype=np.uint8)
    form.seal(rows, np.array([1], dtype=np.int32), [key])
    assert bytes(rows[1, :HEADER_BYTES]).hex() == header


def test_the_format_of_a_layout_is_that_of_its_fingerprint() -> None:
    layout = PageLayout(16, (Field(name="k", shape=(2, 8), dtype=DType.BFLOAT16, layers=(0, 1)),))
    form = RecordFormat.of(7, layout)
    assert form == RecordFormat(7, bytes.fromhex(layout.fingerprint())[:16], 1024)
    assert form.num_bytes == 1088


# -- what is sealed is whole, and stays so


@given(st.integers(0, 300), st.lists(st.integers(1, 12), unique=True, max_size=8), st.integers(0, 2**32))
def test_sealed_rows_have_no_defects_and_nothing_else_is_touched(size: int, frames: list[int], seed: int) -> None:
    form = RecordFormat(1, b"l" * 16, size)
    rows = rows_of(size, 12, seed)
    before = rows.copy()
    keys = [key_of(frame) for frame in frames]
    form.seal(rows, np.array(frames, dtype=np.int32), keys)
    assert form.defects(rows, np.array(frames, dtype=np.int32), keys) == [""] * len(frames)
    for frame in range(13):
        start = HEADER_BYTES if frame in frames else 0
        assert np.array_equal(rows[frame, start:], before[frame, start:])
    assert all(check_record(rows[frame]) == "" for frame in frames)
    assert all(check_record(bytes(rows[frame, : form.num_bytes])) == "" for frame in frames)


_DEFECT_OF_BYTE = ["magic"] * 4 + ["group"] * 2 + ["magic"] * 2 + ["length"] * 8 + ["layout"] * 16
_DEFECT_OF_BYTE += ["key"] * 16 + ["digest"] * 16


@each_of("byte", range(HEADER_BYTES + 200))
def test_every_bit_counts(byte: int) -> None:
    """One bit after another: what is wrong is named by where it is, and the record alone says that it is not whole."""
    form = RecordFormat(2, b"layout of sixtee", 200)
    rows = rows_of(200, 3)
    frames = np.array([3, 1], dtype=np.int32)
    keys = [key_of(3), key_of(1)]
    form.seal(rows, frames, keys)
    expected = _DEFECT_OF_BYTE[byte] if byte < HEADER_BYTES else "digest"
    for bit in range(8):
        rows[1, byte] ^= 1 << bit
        assert form.defects(rows, frames, keys) == ["", expected]
        alone = {"magic": ("magic",), "length": ("length", "digest")}.get(expected, ("digest",))
        assert check_record(rows[1]) in alone
        rows[1, byte] ^= 1 << bit
    assert form.defects(rows, frames, keys) == ["", ""]


def test_flags_of_a_later_version_are_not_guessed_at() -> None:
    """A record that is whole, but says something that this version does not know."""
    form = RecordFormat(1, b"l" * 16, 10)
    rows = rows_of(10, 1)
    form.seal(rows, np.array([1], dtype=np.int32), [KEY])
    rows[1, 6] = 1
    seed = xxhash.xxh3_64_intdigest(bytes(rows[1, :48]))
    rows[1, 48:64] = np.frombuffer(xxhash.xxh3_128_digest(bytes(rows[1, 64:74]), seed), dtype=np.uint8)
    assert check_record(rows[1]) == "magic"
    assert form.defects(rows, np.array([1], dtype=np.int32), [KEY]) == ["magic"]


def test_bytes_behind_the_payload_do_not_count() -> None:
    form = RecordFormat(0, b"l" * 16, 10)
    rows = rows_of(10, 1)
    form.seal(rows, np.array([1], dtype=np.int32), [KEY])
    rows[1, form.num_bytes :] ^= 255
    assert form.defects(rows, np.array([1], dtype=np.int32), [KEY]) == [""]


def test_another_pages_record_is_another_key_also_with_the_same_payload() -> None:
    form = RecordFormat(0, b"l" * 16, 64)
    rows = rows_of(64, 2)
    rows[2] = rows[1]
    frames = np.array([1, 2], dtype=np.int32)
    form.seal(rows, frames, [key_of(1), key_of(2)])
    assert form.defects(rows, frames[::-1], [key_of(1), key_of(2)]) == ["key", "key"]
    assert not np.array_equal(rows[1, 48:64], rows[2, 48:64])


def test_a_header_on_anothers_payload_is_noticed() -> None:
    """Also where the digest goes with the payload: it is seeded by the header above it."""
    form = RecordFormat(0, b"l" * 16, 64)
    rows = rows_of(64, 2)
    frames = np.array([1, 2], dtype=np.int32)
    keys = [key_of(1), key_of(2)]
    form.seal(rows, frames, keys)
    rows[1, 48:] = rows[2, 48:]
    assert form.defects(rows, frames, keys) == ["digest", ""]
    assert check_record(rows[1]) == "digest"


def test_other_groups_layouts_and_lengths() -> None:
    form = RecordFormat(1, b"l" * 16, 64)
    rows = rows_of(64, 1)
    frame = np.array([1], dtype=np.int32)
    form.seal(rows, frame, [KEY])
    assert RecordFormat(2, b"l" * 16, 64).defects(rows, frame, [KEY]) == ["group"]
    assert RecordFormat(1, b"m" * 16, 64).defects(rows, frame, [KEY]) == ["layout"]
    assert RecordFormat(1, b"l" * 16, 63).defects(rows, frame, [KEY]) == ["length"]
    rows[1] = 0
    assert form.defects(rows, frame, [KEY]) == ["magic"]
    assert check_record(rows[1]) == "magic"


@pytest.mark.parametrize("size", [0, 1, 47, 63, 64, 163])
def test_a_record_cut_short_is_a_wrong_length(size: int) -> None:
    form = RecordFormat(1, b"l" * 16, 100)
    rows = rows_of(100, 1)
    form.seal(rows, np.array([1], dtype=np.int32), [KEY])
    assert check_record(bytes(rows[1, :size])) == "length"
    assert check_record(bytes(rows[1, :164])) == ""


def test_a_frame_without_a_row_is_never_read() -> None:
    form = RecordFormat(1, b"l" * 16, 64)
    rows = rows_of(64, 2)
    for frame in (-1, 3):
        with pytest.raises(AssertionError):
            form.defects(rows, np.array([frame], dtype=np.int32), [KEY])
        with pytest.raises(AssertionError):
            form.seal(rows, np.array([frame], dtype=np.int32), [KEY])
    with pytest.raises(ValueError, match="shorter"):
        form.seal(rows, np.array([1, 2], dtype=np.int32), [KEY])
