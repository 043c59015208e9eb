"""AttentionBackend: which function computes the attention of an engine, why, and how often.

    device   auto is                  which needs
    CPU      the native kernel        a C++ compiler, once
    CUDA     the Triton kernels       triton, and compute capability 8.0

A backend computes every call that it can. Torch's operators compute the rest, which is counted by reason. Another
backend joins by a class with the methods of `AttentionKernel`, and a reason for each call that it cannot compute.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

from quire.counters import counter, gauge
from quire.errors import InvalidInput
from quire.kernels.fields import KVFields, KVReader, PagedField, Writer
from quire.kernels.moves import TORCH, Moves
from quire.kernels.native.attention import FORMATS, NativeAttention
from quire.kernels.native.library import native
from quire.kernels.terms import AttentionTerms
from quire.spec.kv_format import KVFormat

if TYPE_CHECKING:
    from quire.kernels.batch import PagedBatch

_CPU = torch.device("cpu")
_LEAST_CAPABILITY = (8, 0)
_TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_WIDEST = 512  # numbers of a field of one head, up to which tiles fit into the shared memory of all devices


@dataclass(frozen=True)
class AttentionCounters:
    """What computes attention."""

    backend: str = ""
    threads: int = gauge("Threads of the engine's process that compute steps.", name="compute_threads")
    calls: dict[str, int] = counter(
        "Calls of attention by what computed them.", "backend", start=dict, name="attention_calls"
    )
    fallbacks: dict[str, int] = counter(
        "Calls of attention that the kernel of the device could not compute, by reason.",
        "reason",
        start=dict,
        name="attention_fallbacks",
    )


BackendWord = Literal["auto", "native", "torch", "triton"]


class AttentionKernel(Protocol):
    """Attention that reads pages in place. One signature for all devices: host arrays of the batch say where pages are.
    `parts` are those of a reader."""

    def pages(
        self,
        query: Tensor,
        parts: Sequence[PagedField | None],
        batch: PagedBatch,
        terms: AttentionTerms,
        *,
        keep_lse: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """`paged_attention` of `query` `[T, heads, key_dim]`; `paged_attention_lse` with `keep_lse`."""

    def selected(
        self, query: Tensor, parts: Sequence[PagedField | None], slots: Tensor, hidden: Tensor, terms: AttentionTerms
    ) -> tuple[Tensor, Tensor]:
        """`attend_selected`."""


class AttentionBackend:
    """The backend that was `chosen`; auto is the kernel of the device where there is one. Counts calls by backend, and
    those that the kernel could not compute by reason."""

    def __init__(self, chosen: BackendWord = "auto", device: torch.device = _CPU) -> None:
        self._chosen = chosen
        self._device = device
        self._word = ("triton" if device.type == "cuda" else "native") if chosen == "auto" else chosen
        self.calls: Counter[str] = Counter()
        self.fallbacks: Counter[str] = Counter()

    @cached_property
    def _kernel(self) -> AttentionKernel | None:
        if self._lacks():
            return None
        if self._word == "triton":
            from quire.kernels.triton.attention import TritonAttention

            return TritonAttention(self._device)
        library = native().library
        return None if library is None else NativeAttention(library)

    @cached_property
    def writer(self) -> Writer | None:
        """What writes new rows to their slots; None for torch's operators."""
        if self._word != "triton" or self._lacks():
            return None
        from quire.kernels.triton.write import write_rows

        return write_rows

    @cached_property
    def moves(self) -> Moves:
        """What copies numbers on the device."""
        if self._word != "triton" or self._lacks():
            return TORCH
        from quire.kernels.triton.moves import TritonMoves

        return TritonMoves()

    def check(self) -> None:
        """Raise InvalidInput if a kernel was demanded, and is not there."""
        if self._chosen in ("native", "triton") and (lacks := self._lacks()):
            raise InvalidInput(
                f"attention by {self._chosen} kernels is not possible: {lacks}",
                fix="leave --attention-backend out: then the fastest that is there is taken.",
            )

    def _lacks(self) -> str:
        """Why the kernel computes nothing; empty if it does."""
        if self._word == "torch":
            return "torch was chosen."
        if self._word == "triton":
            return _triton_lacks(self._device)
        if self._device.type != "cpu":
            return f"the native kernel is for the CPU, and the device is {self._device}."
        return native().reason

    def about(self) -> str:
        """A line for people: what computes attention, and why."""
        if lacks := self._lacks():
            slow = "" if self._chosen == "torch" else " They are slower, most of all where sequences share a prefix."
            return f"torch's operators; {lacks}{slow}"
        if self._word == "native":
            return "native kernel, compiled for this CPU"
        return f"Triton kernels, compiled for {_name_of(self._device)} when they are first used"

    def counters(self) -> AttentionCounters:
        """Counters and gauges now; `backend` is the line of `about`."""
        return AttentionCounters(self.about(), torch.get_num_threads(), dict(self.calls), dict(self.fallbacks))

    def native(self, calls: int) -> NativeAttention | None:
        """The native kernel, for so many calls on plain fields, which are counted; None if another one computes."""
        found = self._kernel if self._chosen != "torch" and self._word == "native" else None
        if not isinstance(found, NativeAttention):
            return None
        self.calls[self._word] += calls
        return found

    def kernel(self, query: Tensor, reader: KVReader, *, refused: str = "") -> AttentionKernel | None:
        """The kernel if it can compute a call; None for torch's operators. Counts the call. `refused` is the reason of
        a caller whose call the kernel has no function for."""
        reason = "" if self._chosen == "torch" else self._refused(query, reader) or refused
        if reason:
            self.fallbacks[reason] += 1
        found = None if reason or self._kernel is None else self._kernel
        self.calls[self._word if found else "torch"] += 1
        return found

    def _refused(self, query: Tensor, reader: KVReader) -> str:
        """Why the kernel cannot compute a call; empty if it can."""
        if query.device.type != self._device.type:
            return "device"
        if self._kernel is None:
            return "no library"
        if not isinstance(reader, KVFields):
            return "expanded latents"
        if self._word == "native":
            return "" if query.dtype in FORMATS else "dtype"
        parts = [part for part in reader.parts() if part is not None]
        if any(part.on_host for part in parts):
            return "frames in host memory"
        if query.dtype not in _TRITON_DTYPES:
            return "dtype"
        return "head size" if max(_width(part.stored[0], part.stored[2]) for part in parts) > _WIDEST else ""


def _triton_lacks(device: torch.device) -> str:
    """Why Triton kernels cannot run on a device; empty if they can."""
    if find_spec("triton") is None:
        return "triton is not installed (pip install 'quire-kv[gpu]')."
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        return ""
    if device.type != "cuda":
        return f"Triton kernels are for CUDA, and the device is {device}."
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        return (
            f"Triton kernels need compute capability 8.0, and {_name_of(device)} has {'.'.join(map(str, capability))}."
        )
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "Triton needs a C compiler, gcc or clang, to launch kernels, and there is none."
    return ""


def _width(rows: Tensor, kv_format: KVFormat | None) -> int:
    """Numbers of a row of one head as it is stored."""
    return rows.shape[-1] * (2 if kv_format is not None and kv_format.bits == 4 else 1)


def _name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the interpreter on the CPU"


DEFAULT = AttentionBackend()
"""The backend of batches that no engine made."""
