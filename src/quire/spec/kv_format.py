"""KVFormat: how keys, values and latents are stored: the element type, and the scales of those that are quantised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quire.errors import InvalidInput
from quire.spec.dtype import DType


@dataclass(frozen=True, slots=True, kw_only=True)
class KVFormat:
    """One way to store a vector of numbers.

    `bits` is the size of one number, without its share of a scale. `block` numbers along the last axis share one scale
    of type `scale`; 0: there are no scales. Four-bit numbers are stored two to an `element`, the first in the
    low half. Sources: OCP Microscaling Formats 1.0 (blocks of 32, power-of-two scales), NVIDIA's NVFP4 (blocks of 16,
    an E4M3 scale).
    """

    name: str
    element: DType
    bits: int
    block: int = 0
    scale: DType | None = None

    @property
    def encodes(self) -> bool:
        """Whether numbers have to be encoded and decoded, not only converted."""
        return self.bits <= 8

    @property
    def identity(self) -> str:
        """A description of the bytes, without the name: two formats that differ here cannot read each other."""
        return f"{self.element.value}/{self.bits}/{self.block}/{self.scale.value if self.scale is not None else ''}"

    def stored_width(self, width: int) -> int:
        """Elements for a vector of `width` numbers. Raises InvalidInput if blocks do not fit."""
        per_element = self.element.itemsize * 8 // self.bits
        if width % max(per_element, self.block):
            raise InvalidInput(
                f"a vector of {width} numbers cannot be stored as {self.name}: it has blocks of "
                f"{max(per_element, self.block)}.",
                fix="use fp8_e4m3, or the model's own dtype.",
            )
        return width // per_element

    def scale_width(self, width: int) -> int:
        """Scales of a vector of `width` numbers."""
        return width // self.block if self.block else 0


def plain_format(dtype: DType) -> KVFormat:
    """The format that stores elements of `dtype` unchanged."""
    return KVFormat(name=dtype.value, element=dtype, bits=dtype.itemsize * 8)


KV_FORMATS: Mapping[str, KVFormat] = {
    "float32": plain_format(DType.FLOAT32),
    "float16": plain_format(DType.FLOAT16),
    "bfloat16": plain_format(DType.BFLOAT16),
    "fp8_e4m3": KVFormat(name="fp8_e4m3", element=DType.FLOAT8_E4M3, bits=8),
    "fp8_e5m2": KVFormat(name="fp8_e5m2", element=DType.FLOAT8_E5M2, bits=8),
    "mxfp8": KVFormat(name="mxfp8", element=DType.FLOAT8_E4M3, bits=8, block=32, scale=DType.UINT8),
    "fp4_e2m1": KVFormat(name="fp4_e2m1", element=DType.UINT8, bits=4, block=16, scale=DType.UINT8),
    "nvfp4": KVFormat(name="nvfp4", element=DType.UINT8, bits=4, block=16, scale=DType.FLOAT8_E4M3),
}
"""Formats by the name a user gives. `UINT8` scales are exponents of two (E8M0): the scale is `2 ** (byte - 127)`."""

_OTHER_NAMES = {
    "fp32": "float32",
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "fp8": "fp8_e4m3",
    "fp4": "fp4_e2m1",
}


def kv_format(name: str, model_dtype: DType) -> KVFormat:
    """The format called `name`; "auto" is the model's own dtype. Raises InvalidInput for another name."""
    if name == "auto":
        return plain_format(model_dtype)
    found = KV_FORMATS.get(_OTHER_NAMES.get(name, name))
    if found is None:
        raise InvalidInput(
            f"'{name}' is not a KV dtype.", fix=f"use auto, {', '.join(sorted({*KV_FORMATS, *_OTHER_NAMES}))}."
        )
    return found
