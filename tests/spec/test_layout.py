"""PageLayout: bytes, fingerprints, and what cannot be a layout."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import pytest

from quire.spec.kv_format import KV_FORMATS
from quire.spec.layout import PER_PAGE, DType, Field, PageLayout


def field(**changes: Any) -> Field:
    plain: dict[str, Any] = {"name": "k", "shape": (2, 8), "dtype": DType.BFLOAT16, "layers": (0, 1, 2)}
    return Field(**(plain | changes))


@pytest.mark.parametrize(
    ("changes", "page_size", "size"),
    [
        ({}, 1, 3 * 1 * 16 * 2),
        ({}, 16, 3 * 16 * 16 * 2),
        ({"dtype": DType.FLOAT8_E4M3}, 16, 3 * 16 * 16),
        ({"shape": ()}, 4, 3 * 4 * 2),
        ({"per": 4}, 16, 3 * 4 * 16 * 2),
        ({"per": PER_PAGE}, 16, 3 * 1 * 16 * 2),
        ({"layers": ()}, 16, 0),
        ({"layers": (5,), "dtype": DType.FLOAT32}, 2, 2 * 16 * 4),
    ],
)
def test_bytes_of_a_field(changes: dict[str, Any], page_size: int, size: int) -> None:
    assert field(**changes).bytes_per_frame(page_size) == size


def test_bytes_of_a_layout_are_those_of_its_fields() -> None:
    layout = PageLayout(4, (field(), field(name="v", shape=(2, 4)), field(name="scale", shape=(), per=PER_PAGE)))
    assert layout.bytes_per_frame == 3 * 4 * 16 * 2 + 3 * 4 * 8 * 2 + 3 * 2
    assert layout.bytes_per_token == layout.bytes_per_frame / 4 == 145.5


def test_latent_and_split_layouts_differ_only_in_data() -> None:
    """70 layers of a 576-wide latent, and 32 layers of 8 heads of 128, both in two bytes."""
    latent = PageLayout(64, (field(name="latent", shape=(576,), layers=tuple(range(70))),))
    split = PageLayout(16, tuple(field(name=name, shape=(8, 128), layers=tuple(range(32))) for name in "kv"))
    assert latent.bytes_per_token == 70 * 576 * 2
    assert split.bytes_per_token == 2 * 32 * 8 * 128 * 2


def test_equal_layouts_have_one_fingerprint() -> None:
    one, other = (PageLayout(4, (field(), field(name="v"))) for _ in range(2))
    assert one.fingerprint() == other.fingerprint()
    assert len(one.fingerprint()) == 64


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "v"},
        {"shape": (8, 2)},
        {"shape": (16,)},
        {"dtype": DType.FLOAT16},
        {"dtype": DType.FLOAT8_E5M2},
        {"layers": (0, 1)},
        {"layers": (0, 2, 1)},
        {"per": 2},
        {"per": PER_PAGE},
        {"kv_format": KV_FORMATS["mxfp8"]},
    ],
)
def test_every_part_of_a_field_changes_the_fingerprint(changes: dict[str, Any]) -> None:
    assert PageLayout(4, (field(**changes),)).fingerprint() != PageLayout(4, (field(),)).fingerprint()


def test_what_bytes_mean_changes_the_fingerprint() -> None:
    """Two fields of the same shapes and types, encoded in blocks of other sizes."""
    formats = [KV_FORMATS["fp4_e2m1"], replace(KV_FORMATS["fp4_e2m1"], block=32), KV_FORMATS["nvfp4"]]
    layouts = [PageLayout(4, (field(kv_format=kv_format),)) for kv_format in formats]
    assert len({layout.fingerprint() for layout in layouts}) == len(formats)


def test_page_size_and_order_change_the_fingerprint() -> None:
    k, v = field(), field(name="v")
    layouts = [
        PageLayout(4, (k, v)),
        PageLayout(4, (v, k)),
        PageLayout(8, (k, v)),
        PageLayout(4, (k,)),
        PageLayout(4, ()),
    ]
    assert len({layout.fingerprint() for layout in layouts}) == len(layouts)


def test_the_fingerprint_is_fixed_for_ever() -> None:
    """Stored pages carry it; a change here needs another version in the prefix."""
    fingerprint = PageLayout(4, (field(),)).fingerprint()
    assert fingerprint == "c29848ea15c30e075a48f7d211839e834a84a0ce3a31792c1122be3c493d63b3"


@pytest.mark.parametrize(
    ("page_size", "fields", "text"),
    [
        (0, (), "at least 1"),
        (-4, (), "at least 1"),
        (3, (field(per=2),), "does not divide a page of 3"),
        (2, (field(per=4),), "does not divide a page of 2"),
        (4, (field(), field(layers=(2,))), "layer 2 has two fields named 'k'"),
        (4, (field(layers=(1, 1)),), "layer 1 has two fields"),
    ],
)
def test_what_cannot_be_a_layout(page_size: int, fields: tuple[Field, ...], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        PageLayout(page_size, fields)


def test_one_name_may_have_two_shapes_in_different_layers() -> None:
    assert PageLayout(4, (field(layers=(0, 2)), field(layers=(1,), shape=(1, 8)))).bytes_per_frame == 4 * 2 * (
        2 * 16 + 8
    )


def test_a_layout_is_a_value() -> None:
    layout = PageLayout(4, (field(),))
    assert layout == PageLayout(4, (field(),))
    assert hash(layout) == hash(PageLayout(4, (field(),)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.page_size = 8  # type: ignore[misc]
