"""Encoding and decoding against the code tables of the formats, written out here, and plain arithmetic over them."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from quire.errors import InvalidInput
from quire.kernels.codec import decode, encode
from quire.spec.kv_format import KV_FORMATS, KVFormat
from quire.spec.layout import DType
from tests.changes import KERNELS, unless_changed
from tests.covering import each_of

ROW_FP8 = KVFormat(name="row", element=DType.FLOAT8_E4M3, bits=8, block=128, scale=DType.FLOAT32)
COMPRESSED_FP8 = KVFormat(name="compressed", element=DType.FLOAT8_E4M3, bits=8, block=64, scale=DType.UINT8)
pytestmark = unless_changed(__name__, *KERNELS)

FORMATS = {**KV_FORMATS, ROW_FP8.name: ROW_FP8, COMPRESSED_FP8.name: COMPRESSED_FP8}
BLOCKED = [name for name, kv_format in FORMATS.items() if kv_format.block]
PLAIN_FP8 = ["fp8_e4m3", "fp8_e5m2"]
WIDTH = 128  # fits every format


def minifloat(exponent_bits: int, mantissa_bits: int, bias: int, *, num_special: int) -> list[float]:
    """The values without a sign, by code. The last `num_special` codes are not finite."""
    values = []
    for code in range(2 ** (exponent_bits + mantissa_bits) - num_special):
        exponent, mantissa = divmod(code, 2**mantissa_bits)
        fraction = mantissa / 2**mantissa_bits
        values.append(fraction * 2.0 ** (1 - bias) if exponent == 0 else (1 + fraction) * 2.0 ** (exponent - bias))
    return values


E4M3 = minifloat(4, 3, 7, num_special=1)
E5M2 = minifloat(5, 2, 15, num_special=4)
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def table(kv_format: KVFormat) -> list[float]:
    """Values of the elements without a sign, by code."""
    if kv_format.bits == 4:
        return E2M1
    return {DType.FLOAT8_E4M3: E4M3, DType.FLOAT8_E5M2: E5M2}[kv_format.element]


def nearest(value: float, values: list[float]) -> int:
    """Code of the nearest of `values`, the even code where two are; by looking at all of them."""
    return min(range(len(values)), key=lambda code: (abs(values[code] - value), code % 2))


def raw(tensor: Tensor) -> Tensor:
    """The bytes of `tensor`, to compare zeros and NaNs by their bits."""
    return tensor.contiguous().view(torch.uint8)


def same_bits(one: tuple[Tensor, Tensor | None], other: tuple[Tensor, Tensor | None]) -> bool:
    assert (one[1] is None) == (other[1] is None)
    return all(torch.equal(raw(a), raw(b)) for a, b in zip(one, other, strict=True) if a is not None and b is not None)


def round_trip(values: Tensor, kv_format: KVFormat, dtype: torch.dtype = torch.float32) -> Tensor:
    return decode(*encode(values, kv_format), kv_format, dtype)


def scattered(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers, each vector of its own size, from 2**-20 to 2**12."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.exp2(
        torch.randint(-20, 13, (*shape[:-1], 1), generator=generator).float()
    )


def wide(values: list[float]) -> Tensor:
    """One vector of `WIDTH` numbers that repeats `values`."""
    return torch.tensor(list(itertools.islice(itertools.cycle(values), WIDTH)), dtype=torch.float32)


# Float32 numbers of every size, with many that are near each other, equal, or between two codes.
NUMBERS = st.one_of(
    st.floats(width=32, min_value=-(2.0**127), max_value=2.0**127),
    st.floats(width=32, min_value=-8, max_value=8),
    st.floats(width=32, min_value=-(2.0**-126), max_value=2.0**-126),
    st.integers(-64, 64).map(lambda quarter: quarter / 4),
    st.integers(-120, 120).map(lambda step: step * 2.0**-11),
    st.integers(-120, 120).map(lambda step: step * 2.0**-137),
)
VECTORS = st.one_of(
    st.lists(NUMBERS, min_size=1, max_size=WIDTH).map(wide),
    st.tuples(st.integers(0, 2**32), st.integers(-140, 120)).map(
        lambda drawn: torch.randn(WIDTH, generator=torch.Generator().manual_seed(drawn[0])) * 2.0 ** drawn[1]
    ),
)


# -- error


def bound(values: Tensor, kv_format: KVFormat) -> Tensor:
    """The most by which each number may be off: half a step of its element, from the size of its block's largest."""
    size = values.double().abs()
    if kv_format.name in ("float32", "float16", "bfloat16"):
        info = torch.finfo(getattr(torch, kv_format.name))
        return torch.maximum(size * info.eps / 2, torch.tensor(info.smallest_normal * info.eps / 2))
    grid = table(kv_format)
    largest, half_step = grid[-1], grid[1] / 2
    relative = {448.0: 1 / 17, 57344.0: 1 / 9, 6.0: 1 / 5}[largest]
    if not kv_format.block:
        return torch.maximum((size * relative).clamp_min(half_step), size - largest)
    amax = size.unflatten(-1, (-1, kv_format.block)).amax(-1).repeat_interleave(kv_format.block, -1)
    least = {DType.UINT8: 2.0**-127, DType.FLOAT8_E4M3: 2.0**-9, DType.FLOAT32: 2.0**-126}[kv_format.scale]
    # A power of two is up to twice what the largest number, rounded, would need: 232 or 3.5 of it are never reached.
    fewest = {448.0: 232.0, 6.0: 3.5}[largest] if kv_format.scale is not DType.FLOAT32 else 448.0 * (1 - 2**-22)
    small = half_step * (amax / fewest).clamp_min(least)
    beyond = size - largest * 448 if kv_format.scale is DType.FLOAT8_E4M3 else torch.zeros(())
    return torch.maximum(torch.maximum(size * relative, small), beyond) * (1 + 2**-20)


@pytest.mark.parametrize("name", FORMATS)
@given(VECTORS)
def test_no_number_is_off_by_more_than_rounding(name: str, values: Tensor) -> None:
    kv_format = FORMATS[name]
    if name == "float16":
        values = values.clamp(-65504, 65504)
    error = (round_trip(values, kv_format).double() - values.double()).abs()
    assert bool((error <= bound(values, kv_format)).all())


@pytest.mark.parametrize("name", FORMATS)
@given(VECTORS)
def test_decoding_and_encoding_again_changes_nothing(name: str, values: Tensor) -> None:
    """Bit for bit, whichever scale a block has, so that what moves between formats and back does not drift."""
    kv_format = FORMATS[name]
    if name == "float16":
        values = values.clamp(-65504, 65504)
    once = encode(values, kv_format)
    assert same_bits(once, encode(decode(*once, kv_format, torch.float32), kv_format))


@pytest.mark.parametrize("name", ["fp8_e4m3", "mxfp8", "fp4_e2m1", "nvfp4", "compressed"])
def test_decoding_to_bfloat16_loses_nothing_more(name: str) -> None:
    """A code times a scale of these has few enough bits, so pages may be decoded and encoded without a drift."""
    values = scattered(200, WIDTH)
    once = encode(values, FORMATS[name])
    assert same_bits(once, encode(decode(*once, FORMATS[name], torch.bfloat16), FORMATS[name]))


def test_a_float32_scale_is_found_again_from_any_largest_number() -> None:
    """448 times a scale need not fit 24 bits; divided again it is still the scale that some number gave."""
    ones = torch.arange(0x3F800000, 0x40000000, 37, dtype=torch.int32).view(torch.float32).unsqueeze(1)
    kv_format = replace(ROW_FP8, block=1)
    once = encode(ones, kv_format)
    assert same_bits(once, encode(decode(*once, kv_format, torch.float32), kv_format))


# -- values that must survive


@pytest.mark.parametrize("name", PLAIN_FP8)
def test_every_fp8_code_survives(name: str) -> None:
    kv_format = FORMATS[name]
    sizes = torch.tensor(table(kv_format))
    values = torch.cat((sizes, -sizes))
    stored, scales = encode(values, kv_format)
    assert scales is None
    codes = list(range(len(sizes))) + [128 + code for code in range(len(sizes))]
    assert raw(stored).tolist() == codes
    assert torch.equal(raw(decode(stored, None, kv_format, torch.float32)), raw(values))


@pytest.mark.parametrize("name", ["mxfp8", "row", "compressed"])
def test_every_e4m3_code_survives_in_a_block_of_scale_one(name: str) -> None:
    kv_format = FORMATS[name]
    per_block = kv_format.block - 1  # the largest value of each block keeps its scale at 1
    signed = [*E4M3, *(-value for value in E4M3)]
    blocks = [[448.0, *signed[i : i + per_block]] for i in range(0, len(signed), per_block)]
    values = torch.tensor([block + [0.0] * (kv_format.block - len(block)) for block in blocks])
    stored, scales = encode(values, kv_format)
    assert scales is not None and scales.float().unique().tolist() == [127.0 if scales.dtype is torch.uint8 else 1.0]
    assert torch.equal(raw(decode(stored, scales, kv_format, torch.float32)), raw(values))
    assert set(raw(stored).flatten().tolist()) == set(range(256)) - {127, 255}


@pytest.mark.parametrize(("name", "one"), [("fp4_e2m1", 127), ("nvfp4", 0x38)])
def test_every_fp4_code_survives_and_two_share_a_byte(name: str, one: int) -> None:
    values = torch.tensor([*E2M1, *(-value for value in E2M1)])
    stored, scales = encode(values, FORMATS[name])
    assert scales is not None and raw(scales).tolist() == [one]
    assert stored.tolist() == [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
    assert torch.equal(raw(decode(stored, scales, FORMATS[name], torch.float32)), raw(values))


@pytest.mark.parametrize("name", ["fp4_e2m1", "nvfp4"])
def test_fp4_ties_go_to_the_even_mantissa(name: str) -> None:
    ties = {0.25: 0.0, 0.75: 1.0, 1.25: 1.0, 1.75: 2.0, 2.5: 2.0, 3.5: 4.0, 5.0: 4.0}
    below = {float(np.nextafter(np.float32(tie), np.float32(0))): low for tie, low in zip(ties, E2M1, strict=False)}
    above = {
        float(np.nextafter(np.float32(tie), np.float32(9))): high for tie, high in zip(ties, E2M1[1:], strict=True)
    }
    for cases in (ties, below, above):
        block = torch.tensor([6.0, *cases, *(-number for number in cases), 0.0])
        expected = [6.0, *cases.values(), *(-number for number in cases.values()), 0.0]
        assert round_trip(block, FORMATS[name]).tolist() == expected


# -- against plain arithmetic


def scale_by_search(amax: float, kv_format: KVFormat) -> float:
    """The scale of a block whose largest number is `amax`, found among all there are."""
    grid = table(kv_format)
    half_step_beyond = grid[-1] + (grid[-1] - grid[-2]) / 2
    if kv_format.scale is DType.UINT8:
        return min(2.0 ** (byte - 127) for byte in range(255) if half_step_beyond * 2.0 ** (byte - 127) >= amax)
    exact = float(np.float32(amax) / np.float32(grid[-1]))
    if kv_format.scale is DType.FLOAT32:
        return max(exact, 2.0**-126)
    code = max(1, nearest(exact, E4M3))
    return E4M3[2] if code == 1 and amax > half_step_beyond * E4M3[1] else E4M3[code]


@pytest.mark.parametrize("name", BLOCKED)
def test_blocks_match_a_search_of_the_code_table(name: str) -> None:
    kv_format = FORMATS[name]
    grid = table(kv_format)
    num_blocks = 8000 // kv_format.block
    values = scattered(num_blocks, kv_format.block, seed=1).to(torch.bfloat16)
    decoded = round_trip(values, kv_format)
    for block, found in zip(values.tolist(), decoded.tolist(), strict=True):
        scale = scale_by_search(max(abs(value) for value in block), kv_format)
        expected = [
            math.copysign(
                float(np.float32(grid[nearest(float(np.float32(abs(v)) / np.float32(scale)), grid)] * scale)), v
            )
            for v in block
        ]
        assert found == expected


@pytest.mark.parametrize(
    ("name", "most", "code"), [("mxfp8", 464.0, 127), ("fp4_e2m1", 7.0, 127), ("nvfp4", 7 * 2.0**-9, 1)]
)
def test_a_scale_serves_up_to_half_a_step_beyond_the_largest_element(name: str, most: float, code: int) -> None:
    values = torch.zeros(2, FORMATS[name].block)
    values[:, 1] = -torch.tensor([most, float(np.nextafter(np.float32(most), np.float32(512)))])
    _, scales = encode(values, FORMATS[name])
    assert scales is not None and raw(scales).flatten().tolist() == [code, code + 1]


@pytest.mark.parametrize("name", PLAIN_FP8)
def test_plain_fp8_matches_a_search_of_the_code_table(name: str) -> None:
    grid = table(FORMATS[name])
    values = scattered(20, WIDTH, seed=2).flatten()
    expected = [math.copysign(grid[nearest(abs(value), grid)], value) for value in values.tolist()]
    assert round_trip(values, FORMATS[name]).tolist() == expected


# -- unusual blocks


@pytest.mark.parametrize("name", FORMATS)
def test_zeros_are_exact_and_so_is_memory_never_written(name: str) -> None:
    kv_format = FORMATS[name]
    assert not round_trip(torch.zeros(3, WIDTH), kv_format).any()
    stored, scales = encode(torch.ones(3, WIDTH), kv_format)
    zeroed = decode(
        torch.zeros_like(stored), None if scales is None else torch.zeros_like(scales), kv_format, torch.float32
    )
    assert torch.equal(zeroed, torch.zeros(3, WIDTH))


@pytest.mark.parametrize("name", BLOCKED)
def test_a_block_is_scaled_by_its_own_outlier_only(name: str) -> None:
    kv_format = FORMATS[name]
    small = torch.full((2 * kv_format.block,), 2.0**-7)
    alone = round_trip(small, kv_format)
    small[3] = -1536.0  # six times a power of two: exact in every format
    decoded = round_trip(small, kv_format)
    assert decoded[3].item() == pytest.approx(-1536.0, rel=1e-6)
    assert torch.equal(decoded[kv_format.block :], alone[kv_format.block :])
    assert bool((alone > 0).all())


@pytest.mark.parametrize("name", BLOCKED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_largest_numbers_of_a_dtype_stay_finite(name: str, dtype: torch.dtype) -> None:
    values = torch.full((WIDTH,), torch.finfo(dtype).max, dtype=dtype)
    decoded = round_trip(values, FORMATS[name], dtype)
    assert bool(decoded.isfinite().all())
    least = 448 * 6 if name == "nvfp4" else torch.finfo(dtype).max * 0.9
    assert bool((decoded >= least).all())


@pytest.mark.parametrize(("name", "least"), [("mxfp8", 2.0**-136), ("row", 2.0**-135), ("fp4_e2m1", 2.0**-128)])
def test_denormals_survive_down_to_the_smallest_scale(name: str, least: float) -> None:
    values = torch.tensor([1.0, -3.0, 0.0, 2.0]).mul(least).repeat(32)
    assert torch.equal(round_trip(values, FORMATS[name]), values)
    assert not round_trip(values / 8, FORMATS[name]).any()


@each_of("step", range(1, 60))
def test_no_small_scale_of_nvfp4_costs_more_than_a_fifth(step: int) -> None:
    """Largest numbers around the subnormal scales, where a nearest scale would be zero or lose a third."""
    values = torch.zeros(16)
    values[5] = -step * 2.0**-10
    decoded = round_trip(values, FORMATS["nvfp4"])
    assert abs(decoded[5] - values[5]) <= max(abs(values[5]) / 5, 2.0**-11)


@pytest.mark.parametrize("name", PLAIN_FP8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_plain_fp8_saturates_and_keeps_nan(name: str, dtype: torch.dtype) -> None:
    largest = table(FORMATS[name])[-1]
    values = torch.tensor([65000.0, -65000.0, torch.inf, -torch.inf, torch.nan], dtype=dtype)
    decoded = round_trip(values, FORMATS[name])
    assert decoded[:4].tolist() == [largest, -largest, largest, -largest]
    assert bool(decoded[4].isnan())


@pytest.mark.parametrize("name", BLOCKED)
@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_a_number_no_scale_can_hold_makes_its_block_nan_and_no_other(name: str, broken: float) -> None:
    block = FORMATS[name].block
    values = torch.full((3, 2 * block), 6.0)
    values[1, 2] = broken
    decoded = round_trip(values, FORMATS[name], torch.bfloat16)
    assert bool(decoded[1, :block].isnan().all())
    decoded[1, :block] = 6
    assert torch.equal(decoded, torch.full_like(decoded, 6.0))


# -- shapes


@each_of("name", FORMATS)
@each_of("shape", [(WIDTH,), (5, WIDTH), (2, 3, 2 * WIDTH), (0, WIDTH), (4, 0)])
@each_of("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_result_takes_the_bytes_of_its_format(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    kv_format = FORMATS[name]
    stored, scales = encode(torch.ones(shape, dtype=dtype), kv_format)
    *leading, width = shape
    assert list(stored.shape) == [*leading, kv_format.stored_width(width)]
    assert stored.dtype is getattr(torch, kv_format.element.value)
    if kv_format.scale is None:
        assert scales is None
    else:
        assert scales is not None
        assert list(scales.shape) == [*leading, kv_format.scale_width(width)]
        assert scales.dtype is getattr(torch, kv_format.scale.value)
    decoded = decode(stored, scales, kv_format, dtype)
    assert decoded.dtype is dtype and decoded.shape == shape


@pytest.mark.parametrize(("name", "width"), [("mxfp8", 48), ("fp4_e2m1", 24), ("nvfp4", 31), ("row", 192)])
def test_a_width_that_does_not_fit_is_refused(name: str, width: int) -> None:
    with pytest.raises(InvalidInput, match=f"{width} numbers"):
        encode(torch.ones(2, width), FORMATS[name])


def test_rows_of_sparse_latent_attention_take_their_bytes() -> None:
    latent, rope = torch.randn(3, 512), torch.randn(3, 64).to(torch.bfloat16)
    stored, scales = encode(latent, ROW_FP8)
    assert [tensor[0].nbytes for tensor in (stored, scales, rope)] == [512, 16, 128]  # 656 together
    assert torch.equal(scales, latent.view(3, 4, 128).abs().amax(-1) / 448)
    stored, scales = encode(torch.randn(3, 128), ROW_FP8)
    assert [tensor[0].nbytes for tensor in (stored, scales)] == [128, 4]  # 132 together
    with pytest.raises(InvalidInput, match="100 numbers"):
        encode(torch.randn(3, 100), ROW_FP8)


def test_rows_of_compressed_attention_have_power_of_two_scales() -> None:
    latent = torch.randn(3, 448)
    stored, scales = encode(latent, COMPRESSED_FP8)
    assert [tensor[0].nbytes for tensor in (stored, scales)] == [448, 7]


@pytest.mark.parametrize("name", FORMATS)
def test_a_vector_is_stored_alike_in_any_batch(name: str) -> None:
    kv_format = FORMATS[name]
    values = scattered(4, 7, 2 * WIDTH, seed=3).transpose(0, 1)  # not contiguous, as models give them
    stored, scales = encode(values, kv_format)
    for part in [slice(2, 5), 6, (slice(None), 1), (3, 2), (slice(None), slice(None), slice(WIDTH, None))]:
        codes = encode(values[part], kv_format)
        expected = (stored[part], None if scales is None else scales[part])
        if isinstance(part, tuple) and len(part) == 3:
            expected = (stored.chunk(2, -1)[1], None if scales is None else scales.chunk(2, -1)[1])
        assert same_bits(codes, expected)
        decoded = decode(*expected, kv_format, torch.bfloat16)
        assert torch.equal(decoded, decode(stored, scales, kv_format, torch.bfloat16)[part])


@pytest.mark.parametrize("name", FORMATS)
def test_no_value_is_read_back_from_the_device(name: str) -> None:
    """Tensors of the meta device have none, so a read would raise."""
    values = torch.empty(3, WIDTH, device="meta")
    assert round_trip(values, FORMATS[name], torch.bfloat16).shape == values.shape
