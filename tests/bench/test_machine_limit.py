"""The rates of the machine are measured where it packs no bfloat16 too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bench.engine import machine_limit


def test_weights_that_the_machine_does_not_pack_are_multiplied_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without AVX-512 oneDNN refuses to pack bfloat16."""

    def refused(*_: Any) -> None:
        raise RuntimeError("bf16 path needs the cpu support")

    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", refused)
    for name, value in (("ROWS", (2,)), ("WIDE", (8,)), ("READ_BYTES", 1 << 12)):
        monkeypatch.setattr(machine_limit, name, value)
    found = machine_limit._measured("bfloat16")
    assert found["flops"] > 0 and found["bytes"] > 0
    with pytest.raises(RuntimeError, match="bf16 path"):
        machine_limit._measured("float32")  # it would be packed on every machine
