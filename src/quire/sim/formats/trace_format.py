"""TraceFormat: a kind of trace file, read line by line; and the types of fields that formats share."""

from __future__ import annotations

import lzma
import math
import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn, Protocol, TypeVar

import msgspec
from msgspec import Meta

from quire.errors import InvalidInput
from quire.sim.trace_request import Draft, Planned, Tokenize, TraceRequest, built

Found = TypeVar("Found")

MOST_TOKENS = 1 << 26
"""Tokens of one request. More is a mistake in the file, and would only fill the memory."""

Length = Annotated[int, Meta(ge=0, le=MOST_TOKENS)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Timestamp = Annotated[float, Meta(ge=0)]

ReadLine = Callable[[bytes, int], Draft]
"""The request on a line, given the line's number. Raises ValueError or MsgspecError for a bad line."""


class TraceRow(Protocol):
    """The fields of a line, as msgspec decodes them."""

    def draft(self, number: int, /) -> Draft:
        """The request, given the line's number."""


@dataclass(frozen=True, slots=True)
class TraceFormat:
    """A kind of trace file, with the name that users see."""

    name: str
    recognises: Callable[[bytes, dict[str, Any]], bool]
    """Whether a file is of this kind, given its first line, and that line's fields if it is a JSON object."""
    open: Callable[[Path], ReadLine]
    """How the lines of a file are read. Raises InvalidInput."""
    num_headers: int = 0
    has_text: bool = False
    """Whether it has text, which `Tokenize` turns into tokens."""

    def read(self, path: Path, tokenize: Tokenize) -> Iterator[Planned]:
        """Every request of the file. A request is read from the file again when it is built. Raises InvalidInput with
        the number of the first bad line."""
        read = self.open(path)
        arrivals: dict[str, float] = {}
        for line in lines(path):
            if line.number <= self.num_headers:
                continue
            entry = line.parsed(read)
            request = Planned.of(entry, tokenize)
            if request.lengths is not None and sum(request.lengths) > MOST_TOKENS:
                line.refuse(f"the request has {sum(request.lengths)} tokens, and may have at most {MOST_TOKENS}")
            if entry.after and arrivals.get(entry.after, math.inf) > entry.arrival:
                line.refuse(f"'after' names '{entry.after}', and no line before it has such a request that is earlier")
            if entry.request_id in arrivals:
                line.refuse(f"there was a request '{entry.request_id}' before")
            arrivals[entry.request_id] = entry.arrival
            yield request._replace(build=partial(_read_again, line, read, tokenize))


def rows_of(row: type[TraceRow]) -> Callable[[Path], ReadLine]:
    """How lines are read that are JSON objects with the fields of `row`."""
    decode = msgspec.json.Decoder(row).decode
    return lambda path: lambda text, number: decode(text).draft(number)


def _read_again(line: TraceLine, read: ReadLine, tokenize: Tokenize, arrival: float) -> TraceRequest:
    return built(line.parsed(read), tokenize, arrival)


@dataclass(frozen=True, slots=True)
class TraceLine:
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

    def parsed(self, parse: Callable[[bytes, int], Found]) -> Found:
        """What `parse` makes of its text and number. Raises InvalidInput with the number of the line and the defect."""
        try:
            return parse(self.text, self.number)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            self.refuse(str(error))

    def refuse(self, why: str) -> NoReturn:
        """Raises InvalidInput that names the line."""
        raise InvalidInput(f"{self.path} line {self.number}: {why.rstrip('.')}.", fix="mend or remove this line.")


def lines(path: Path) -> Iterator[TraceLine]:
    """The lines of a file that are not blank. Plain files stay on the disk; `.xz` files are unpacked in memory."""
    content = _content(path)
    start, number = 0, 0
    while start < len(content):
        end = content.find(b"\n", start)
        end = len(content) if end < 0 else end
        number += 1
        line = TraceLine(path, number, content, start, end)
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


def _content(path: Path) -> bytes | mmap.mmap:
    try:
        if path.suffix == ".xz":
            return lzma.decompress(path.read_bytes())
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if path.stat().st_size else b""
    except (OSError, lzma.LZMAError) as error:
        raise InvalidInput(f"{path} cannot be read: {error}.", fix="check the file.") from error
