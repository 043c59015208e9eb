"""Lines of a trace file: found again without keeping what they say, and named when they are bad."""

from __future__ import annotations

import lzma
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec

from quire.errors import InvalidInput

Row = TypeVar("Row")

MOST_TOKENS = 1 << 26
"""Of one request. More is a mistake in the file, and would only fill the memory."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line that is not blank, numbered from 1."""

    path: Path
    number: int
    _content: bytes | mmap.mmap
    _start: int
    _end: int

    @property
    def text(self) -> bytes:
        """What it says, without the line's end."""
        return self._content[self._start : self._end]

    def decode(self, decoder: msgspec.json.Decoder[Row]) -> Row:
        """The row it holds. Raises InvalidInput with the number of the line and what is wrong with it."""
        try:
            return decoder.decode(self.text)
        except (msgspec.MsgspecError, RecursionError) as error:
            self.refuse(str(error))

    def check_length(self, name: str, tokens: int) -> None:
        """Refuses a request of more tokens than any could have."""
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


def row_decoder(row: type[Row], *, strict: bool = True) -> msgspec.json.Decoder[Row]:
    """A decoder of lines that are JSON; not strict, it takes a number in quotes for a number."""
    return msgspec.json.Decoder(row, strict=strict)


def fields_of(line: bytes) -> dict[str, Any]:
    """The fields of a line that is a JSON object, nothing for any other line."""
    try:
        found = msgspec.json.decode(line)
    except (msgspec.MsgspecError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _content(path: Path) -> bytes | mmap.mmap:
    try:
        if path.suffix == ".xz":
            return lzma.decompress(path.read_bytes())
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if path.stat().st_size else b""
    except (OSError, lzma.LZMAError) as error:
        raise InvalidInput(f"{path} cannot be read: {error}.", fix="check the file.") from error
