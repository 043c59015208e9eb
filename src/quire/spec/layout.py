"""PageLayout: the named fields of one frame. A value; sizes, tensors, mirrors and fingerprints derive from it."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

from quire.spec.dtype import DType as DType
from quire.spec.kv_format import KVFormat

PER_PAGE = 0
"""`Field.per` of a field that has one entry per page, whatever the page size."""


def scales_of(name: str) -> str:
    """The name of the field that holds the scales of field `name`."""
    return f"{name}_scale"


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One named array of a frame.

    `layers` are the ordinals of the attention (or state) calls of one forward pass that own a copy: the pool keys its
    tensors by them, because several calls may share one module and one module may be called twice. `per` is the number
    of tokens one entry covers (1: one entry per token, 4: one per four, `PER_PAGE`: one per page). `kv_format` says how
    vectors are encoded, if they are: `shape` is then the stored shape, and their scales are in the field named
    `scales_of(name)` of the same layers, if the format has any.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    layers: tuple[int, ...]
    per: int = 1
    kv_format: KVFormat | None = None

    def entries(self, page_size: int) -> int:
        """Entries of one layer in one frame."""
        return 1 if self.per == PER_PAGE else page_size // self.per

    def bytes_per_frame(self, page_size: int) -> int:
        """Bytes of all layers of this field in one frame."""
        return len(self.layers) * self.entries(page_size) * math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class PageLayout:
    """The fields of a frame of `page_size` tokens.

    Several fields may share a name when their layers differ in shape (a model whose layers have different numbers of KV
    heads); a (name, layer) pair is unique.
    """

    page_size: int
    fields: tuple[Field, ...]

    def __post_init__(self) -> None:
        if self.page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {self.page_size}")
        seen: set[tuple[str, int]] = set()
        for field in self.fields:
            if field.per != PER_PAGE and self.page_size % field.per:
                raise ValueError(
                    f"field '{field.name}' has one entry per {field.per} tokens, which does not divide a page of "
                    f"{self.page_size}"
                )
            for layer in field.layers:
                if (field.name, layer) in seen:
                    raise ValueError(f"layer {layer} has two fields named '{field.name}'")
                seen.add((field.name, layer))

    @property
    def bytes_per_frame(self) -> int:
        """Bytes of one frame, all fields and layers."""
        return sum(field.bytes_per_frame(self.page_size) for field in self.fields)

    @property
    def bytes_per_token(self) -> float:
        """`bytes_per_frame / page_size`; not an integer if a field has one entry per page."""
        return self.bytes_per_frame / self.page_size

    def fingerprint(self) -> str:
        """Hex digest that two layouts share only if a frame of one can be read as a frame of the other."""
        digest = hashlib.sha256(b"quire-layout-2" + self.page_size.to_bytes(8, "little"))
        for f in self.fields:
            meaning = f.kv_format.identity if f.kv_format is not None else ""
            for part in (f.name, str(f.shape), f.dtype.value, str(f.layers), str(f.per), meaning):
                digest.update(len(part.encode()).to_bytes(8, "little") + part.encode())
        return digest.hexdigest()
