"""TraceFormat: the interface of a trace file's format; and the common parts: lines, types of fields, errors."""

from __future__ import annotations

import lzma
import mmap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from quire.errors import InvalidInput
from quire.sim.trace_request import Planned
from quire.spec.ids import Ids

Row = TypeVar("Row")

MOST_TOKENS = 1 << 26
"""Of one request. More is a mistake in the file, and would only fill the memory."""

Length = Annotated[int, Meta(ge=0, le=MOST_TOKENS)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Timestamp = Annotated[float, Meta(ge=0)]

Tokenize = Callable[[str], Ids]
"""Text to token ids, int32."""


@dataclass(frozen=True, slots=True)
class TraceFormat:
    """A kind of trace file, with the name that users see."""

    name: str
    recognises: Callable[[Path, bytes, dict[str, Any]], bool]
    """Whether a path is such a file, given its first line, and that line's fields if it is a JSON object."""
    read: Callable[[Path, Tokenize], Iterable[Planned]]
    """Every request of the file, in any order. Raises InvalidInput with the number of the first bad line."""
    has_text: bool = False
    """Whether it has text, which `Tokenize` turns into tokens."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line that is not blank, numbered from 1. Its text stays in the file until it is needed."""

    path: Path
    number: int
    _content: bytes | mmap.mmap
    _start: int
    _end: int

    @property
    def text(self) -> bytes:
        """Without the line's end."""
        return self._content[self._start : self._end]

    def decode(self, decoder: msgspec.json.Decoder[Row]) -> Row:
        """The row in it. Raises InvalidInput with the number of the line and the defect."""
        try:
            return decoder.decode(self.text)
        except (msgspec.MsgspecError, RecursionError) as error:
            self.refuse(str(error))

    def check_length(self, name: str, tokens: int) -> None:
        """Raises InvalidInput for a request of more than `MOST_TOKENS`."""
        if tokens > MOST_TOKENS:
            self.refuse(f"'{name}' is {tokens} tokens, and a request has at most {MOST_TOKENS}")

    def refuse(self, why: str) -> NoReturn:
        """Raises InvalidInput that names the line."""
        raise InvalidInput(f"{self.path} line {self.number}: {why.rstrip('.')}.", fix="mend or remove this line.")


def lines(path: Path) -> Iterator[Line]:
    """The lines of a file that are not blank. Plain files stay on the disk; `.xz` files are unpacked in memory."""
    content = _content(path)
    start, number = 0, 0
    while start < len(content):
        end = content.find(b"\n", start)
        end = len(content) if end < 0 else end
        number += 1
        line = Line(path, number, content, start, end)
        if line.text.strip():
            yield line
        start = end + 1


def fields_of(line: bytes) -> dict[str, Any]:
    """The fields of a line that is a JSON object; none for any other line."""
    try:
        found = msgspec.json.decode(line)
    except (msgspec.MsgspecError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def iso_seconds(date: str) -> float:
    """A date in ISO form, UTC where it names no zone. Raises ValueError."""
    when = datetime.fromisoformat(date)
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()


def utf8_bytes(text: str) -> Ids:
    """A token for each byte of `text`: needs no vocabulary, and equal prefixes of text are equal prefixes of tokens."""
    return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)


def _content(path: Path) -> bytes | mmap.mmap:
    try:
        if path.suffix == ".xz":
            return lzma.decompress(path.read_bytes())
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if path.stat().st_size else b""
    except (OSError, lzma.LZMAError) as error:
        raise InvalidInput(f"{path} cannot be read: {error}.", fix="check the file.") from error
