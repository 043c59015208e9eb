"""TraceFormat: what a kind of trace file has to say for itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import numpy as np

from quire.sim.trace_request import Planned
from quire.spec.ids import Ids

Tokenize = Callable[[str], Ids]
"""Text to token ids, int32."""


class TraceFormat(Protocol):
    """Reads one kind of trace file. Nothing outside the file of a format knows it, but the list of formats."""

    name: str
    """As it is listed to users."""
    has_text: bool
    """Whether it holds text, which `tokenize` turns into tokens."""

    def recognises(self, path: Path, line: bytes, fields: dict[str, object]) -> bool:
        """Whether `path` is such a file, given its first line and that line's fields, where it is a JSON object."""

    def read(self, path: Path, tokenize: Tokenize) -> Iterable[Planned]:
        """Every request of the file, in any order. Raises InvalidInput with the number of the first bad line."""


def utf8_bytes(text: str) -> Ids:
    """A token for each byte of `text`: needs no vocabulary, and shares what the text shares."""
    return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)
