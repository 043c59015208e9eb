"""LMCache agent traces: the calls that agents made, as text.

    {"timestamp": 1760428436442742, "input": "...", "output": "...", "session_id": "..."}

`timestamp` is in microseconds; `.jsonl` or `.jsonl.xz`. What tools answered in between is part of the next input.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from quire.sim.formats.lines import Line, lines, row_decoder
from quire.sim.formats.trace_format import Tokenize, utf8_bytes
from quire.sim.trace_request import Planned, TraceRequest


class _Row(msgspec.Struct):
    timestamp: Annotated[float, Meta(ge=0)]
    input: Annotated[str, Meta(min_length=1)]
    output: str
    session_id: str | int = ""


_ROWS = row_decoder(_Row)


class AgentText:
    """Reader of LMCache agent traces."""

    name = "LMCache agent"
    has_text = True

    def recognises(self, path: Path, line: bytes, fields: dict[str, object]) -> bool:
        """By its two texts."""
        return isinstance(fields.get("input"), str) and isinstance(fields.get("output"), str)

    def read(self, path: Path, tokenize: Tokenize) -> Iterator[Planned]:
        """The requests, whose text is read from the file again when they are built."""
        for line in lines(path):
            row = line.decode(_ROWS)
            lengths = (len(row.input.encode()), len(row.output.encode())) if tokenize is utf8_bytes else None
            yield Planned(row.timestamp / 1e6, partial(_request, line, tokenize), lengths)


def _request(line: Line, tokenize: Tokenize, arrival: float) -> TraceRequest:
    row = line.decode(_ROWS)
    return TraceRequest(
        str(line.number), tokenize(row.input), tokenize(row.output), arrival, session=str(row.session_id)
    )
