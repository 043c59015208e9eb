"""HiSparseConfig: latents in host memory, as asked for, by SGLang's names; and HotBuffers, as the plan decides.

The latents are those of models with an indexer. With `PAGE_BOUNDS`, an option of Quire, keys and values of plain
attention are in their place: rows that decode read the pages that bounds of their keys select, which is lossy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.errors import InvalidInput
from quire.spec.json_object import NUMBER, TEXT, WHOLE, Kind, read_fields
from quire.spec.pages import pages_for

_EXAMPLE = 'write it as {"device_buffer_size": 4096}, or {} for planned sizes.'
PAGE_BOUNDS = "page_bounds"
MOST_BUFFER_TOKENS = 2**15 - 3
"""Tokens of the largest hot buffer: the numbers of its slots are 16 bits wide."""
_MOST_RATIO = 10**9
_WITHOUT_EFFECT = "swap_in_block_size"  # threads of another engine's copy kernel
_KINDS: Mapping[str, Kind] = {
    "device_buffer_size": WHOLE, "host_to_device_ratio": NUMBER, "top_k": WHOLE, "selection": TEXT,
    _WITHOUT_EFFECT: WHOLE,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class HiSparseConfig:
    """Latents of sparse attention in host memory, with a hot buffer on the device for each running request.

    `device_buffer_size` is the tokens of one hot buffer. `host_to_device_ratio` is the tokens in host memory per token
    of all hot buffers. `top_k`, if given, must be the number of tokens that the model's indexer selects. None: the
    planner chooses. With `selection` `PAGE_BOUNDS`, for models without an indexer, a row that decodes reads whole pages
    of at most `top_k` tokens. Raises InvalidInput for a number out of range and an unknown selection.
    """

    device_buffer_size: int | None = None
    host_to_device_ratio: float | None = None
    top_k: int | None = None
    selection: str | None = None

    def __post_init__(self) -> None:
        if self.selection not in (None, PAGE_BOUNDS):
            raise InvalidInput(
                f"hisparse with the selection '{self.selection}', which is not known.",
                fix=f"use '{PAGE_BOUNDS}', or leave it out for the model's own indexer.",
            )
        if self.selection is not None and self.top_k is None:
            raise InvalidInput(
                f"hisparse selects by {self.selection}, which is lossy, and has no top_k: the tokens that a row reads.",
                fix='give one, such as "top_k": 2048.',
            )
        for name in ("device_buffer_size", "top_k"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidInput(f"hisparse with {name} {value}: it must be at least 1.", fix=f"raise {name}.")
            if value is not None and value > MOST_BUFFER_TOKENS:
                raise InvalidInput(
                    f"hisparse with a {name} above {MOST_BUFFER_TOKENS:,}: a hot buffer has at most so many tokens.",
                    fix=f"lower {name}.",
                )
        ratio = self.host_to_device_ratio
        if ratio is not None and not 1 <= ratio <= _MOST_RATIO:
            raise InvalidInput(
                "a host_to_device_ratio that is no number from 1 to 1e9: host memory has every token.",
                fix="give one from 1 on, such as 8, or leave it out.",
            )

    @classmethod
    def parse(cls, given: HiSparseConfig | str | Mapping[str, Any]) -> HiSparseConfig:
        """The configuration itself, or in JSON text or a mapping, by names of these fields; a null counts as absent.

        Raises InvalidInput for an unknown name and a value of another type.
        """
        if isinstance(given, HiSparseConfig):
            return given
        found = read_fields(given, "hisparse", _KINDS, fix=_EXAMPLE)
        found.pop(_WITHOUT_EFFECT, None)
        return cls(**found)


class Resident:
    """A plan without hot buffers: all frames are on the device."""

    __slots__ = ()

    @property
    def groups(self) -> tuple[int, ...]:
        """Groups whose frames are in host memory."""
        return ()

    @property
    def identity(self) -> tuple[bytes, ...]:
        """What keys of pages have beside the model: with lossy attention, what decoding rows compute depends on it."""
        return ()

    def frames_per_row(self, page_size: int) -> int:
        """Device frames of one request's buffer."""
        return 0

    def slot_table_bytes(self, context: int) -> int:
        """Bytes on the host of the tables that say which slot of one request and index has which of `context`
        tokens."""
        return 0


RESIDENT = Resident()


@dataclass(frozen=True, slots=True, kw_only=True)
class HotBuffers(Resident):
    """The hot buffers that a plan has decided on.

    `group` is the index of the group of latents, whose frames are in host memory. Each running request has a buffer of
    `buffer_size` tokens and a slot for its newest token. The model's indexer selects `top_k` tokens; if `lossy`, bounds
    of pages select as many, and the group is that of keys and values.
    """

    group: int
    buffer_size: int
    top_k: int
    lossy: bool = False

    @property
    def contents(self) -> str:
        """What is in host memory, in messages."""
        return "keys and values" if self.lossy else "latents"

    @property
    def groups(self) -> tuple[int, ...]:
        return (self.group,)

    @property
    def identity(self) -> tuple[bytes, ...]:
        return (str(self.top_k).encode(),) if self.lossy else ()

    def frames_per_row(self, page_size: int) -> int:
        return pages_for(self.buffer_size + 1, page_size)

    def slot_table_bytes(self, context: int) -> int:
        # A position, a stamp and two places in the order for each slot, and a slot for each token.
        return (4 + 2) * (self.buffer_size + 3) + 2 * 2 * self.buffer_size + 8 + 2 + 2 * (context + 1)
