"""HiSparseConfig: read from SGLang's names, and what is refused; frames of a hot buffer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.errors import InvalidInput
from quire.spec.hisparse import PAGE_BOUNDS, HiSparseConfig, HotBuffers


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, HiSparseConfig()),
        ({"device-buffer-size": 64, "top_k": 16}, HiSparseConfig(device_buffer_size=64, top_k=16)),
        (
            {"top_k": None, "host_to_device_ratio": 8, "swap_in_block_size": 960},
            HiSparseConfig(host_to_device_ratio=8),
        ),
        (
            {"selection": "page_bounds", "top-k": 512},
            HiSparseConfig(selection=PAGE_BOUNDS, top_k=512),
        ),
        ({"host_to_device_ratio": 1.5}, HiSparseConfig(host_to_device_ratio=1.5)),
    ],
)
def test_the_names_of_the_field_are_read(given: dict[str, Any], expected: HiSparseConfig) -> None:
    assert HiSparseConfig.parse(given) == HiSparseConfig.parse(json.dumps(given)) == expected
    assert HiSparseConfig.parse(expected) is expected


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("{", "not JSON"),
        ("[]", "this is a list"),
        ({"buffer": 64}, "'buffer' is not a setting"),
        ({"device_buffer_size": 64.0}, "not a whole number"),
        ({"device_buffer_size": True}, "not a whole number"),
        ({"device_buffer_size": 0}, "at least 1"),
        ({"top_k": -1}, "at least 1"),
        ({"host_to_device_ratio": 0.5}, "from 1 to 1e9"),
        ('{"host_to_device_ratio": NaN}', "from 1 to 1e9"),
        ({"host_to_device_ratio": float("inf")}, "from 1 to 1e9"),
        ({"host_to_device_ratio": 10**400}, "from 1 to 1e9"),
        ({"device_buffer_size": 32_766}, "at most so many"),
        ({"top_k": 10**400}, "at most so many"),
        ({"top_k": 1, "top-k": 2}, "given twice"),
        ({"selection": 1, "top_k": 512}, "not text"),
        ({"selection": "quest", "top_k": 512}, "'quest', which is not known"),
        ({"selection": "page_bounds"}, "lossy, and has no top_k"),
    ],
)
def test_other_values_are_refused_by_name(given: str | dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        HiSparseConfig.parse(given)


@pytest.mark.parametrize(("page", "buffer", "frames"), [(1, 64, 65), (16, 64, 5), (16, 63, 4), (64, 128, 3)])
def test_a_buffer_has_a_slot_more_for_the_newest_token(page: int, buffer: int, frames: int) -> None:
    assert HotBuffers(group=0, buffer_size=buffer, top_k=8).frames_per_row(page) == frames
