"""AttentionBackend: which function computes the attention of an engine, why, and how often.

A backend computes every call that it can. Torch's operators compute the rest, which is counted by reason. Another
backend joins by a class with the methods of `NativeAttention`, and a reason for each call that it cannot compute.
"""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from quire.errors import InvalidInput
from quire.kernels.fields import KVFields, KVReader, LatentFields
from quire.kernels.native.attention import FORMATS, NativeAttention
from quire.kernels.native.library import native

_CPU = torch.device("cpu")

BackendWord = Literal["auto", "native", "torch"]


class AttentionBackend:
    """The backend that was `chosen`; auto is the compiled kernel where there is one. Counts calls by backend, and those
    that the kernel could not compute by reason."""

    def __init__(self, chosen: BackendWord = "auto", device: torch.device = _CPU) -> None:
        self._chosen = chosen
        self._device = device
        self.calls: Counter[str] = Counter()
        self.fallbacks: Counter[str] = Counter()

    @cached_property
    def _kernel(self) -> NativeAttention | None:
        library = None if self._chosen == "torch" else native().library
        return None if library is None else NativeAttention(library)

    def check(self) -> None:
        """Raise InvalidInput if the kernel was demanded, and is not there."""
        if self._chosen == "native" and (lacks := self._lacks()):
            raise InvalidInput(
                f"attention by native kernels is not possible: {lacks}",
                fix="leave --attention-backend out; torch's operators compute it then.",
            )

    def _lacks(self) -> str:
        """Why the kernel computes nothing; empty if it does."""
        if self._chosen == "torch":
            return "torch was chosen."
        if self._device.type != "cpu":
            return f"the native kernel is for the CPU, and the device is {self._device}."
        return native().reason

    def about(self) -> str:
        """A line for people: what computes attention, and why."""
        lacks = self._lacks()
        return f"torch's operators; {lacks}" if lacks else "native kernel, compiled for this CPU"

    def statistics(self) -> dict[str, Any]:
        """The line of `about`, calls by backend, and fallbacks by reason."""
        return {"backend": self.about(), "calls": dict(self.calls), "fallbacks": dict(self.fallbacks)}

    def kernel(self, query: Tensor, reader: KVReader) -> NativeAttention | None:
        """The kernel if it can compute a call; None for torch's operators. Counts the call."""
        reason = "" if self._chosen == "torch" else self._refused(query, reader)
        if reason:
            self.fallbacks[reason] += 1
        found = None if reason or self._kernel is None else self._kernel
        self.calls["native" if found else "torch"] += 1
        return found

    def _refused(self, query: Tensor, reader: KVReader) -> str:
        """Why the kernel cannot compute a call; empty if it can."""
        if query.device.type != "cpu":
            return "device"
        if self._kernel is None:
            return "no library"
        if not isinstance(reader, KVFields | LatentFields):
            return "expanded latents"
        if any(part is not None and part.stored is None for part in reader.parts()):
            return "frames in host memory"
        return "" if query.dtype in FORMATS else "dtype"


DEFAULT = AttentionBackend()
"""The backend of batches that no engine made."""
