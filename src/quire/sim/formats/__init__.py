"""Formats of trace files. A new one is a file here and a line in `FORMATS`."""

from __future__ import annotations

from pathlib import Path

from quire.errors import InvalidInput
from quire.sim.formats.agent_text import AgentText
from quire.sim.formats.azure import Azure
from quire.sim.formats.lines import fields_of, lines
from quire.sim.formats.mooncake import Mooncake
from quire.sim.formats.ragpulse import RagPulse
from quire.sim.formats.request_log import RequestLog
from quire.sim.formats.token_trace import TokenTrace, write_trace
from quire.sim.formats.trace_format import Tokenize, TraceFormat, utf8_bytes

__all__ = ["FORMATS", "Tokenize", "TraceFormat", "format_of", "utf8_bytes", "write_trace"]

FORMATS: tuple[TraceFormat, ...] = (TokenTrace(), Mooncake(), AgentText(), RagPulse(), Azure(), RequestLog())


def format_of(path: Path) -> TraceFormat:
    """The format of the file or folder `path`. Raises InvalidInput where it is none that is known."""
    first = next((line.text for line in lines(path)), b"") if path.is_file() else b""
    fields = fields_of(first)
    for known in FORMATS:
        if known.recognises(path, first, fields):
            return known
    what = f"its first line begins with {first[:60]!r}" if first else "it has no first line"
    known_names = ", ".join(known.name for known in FORMATS)
    raise InvalidInput(f"{path} is no trace that is known: {what}.", fix=f"use one of: {known_names}.")
