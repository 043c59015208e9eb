"""Formats of trace files. A new one is a `TraceFormat` in a file here and an entry of `FORMATS`."""

from __future__ import annotations

from pathlib import Path

from quire.errors import InvalidInput
from quire.sim.formats.published import AZURE, LMCACHE_AGENT, MOONCAKE, RAGPULSE
from quire.sim.formats.request_log import REQUEST_LOG
from quire.sim.formats.token_trace import TOKEN_TRACE, write_trace
from quire.sim.formats.trace_format import Tokenize, TraceFormat, fields_of, lines, utf8_bytes

__all__ = ["FORMATS", "Tokenize", "TraceFormat", "format_of", "utf8_bytes", "write_trace"]

FORMATS = (TOKEN_TRACE, MOONCAKE, LMCACHE_AGENT, RAGPULSE, AZURE, REQUEST_LOG)


def format_of(path: Path) -> TraceFormat:
    """The format of the file or folder `path`. Raises InvalidInput where no format recognises it."""
    first = next((line.text for line in lines(path)), b"") if path.is_file() else b""
    fields = fields_of(first)
    for known in FORMATS:
        if known.recognises(path, first, fields):
            return known
    what = f"its first line begins with {first[:60]!r}" if first else "it has no first line"
    known_names = ", ".join(known.name for known in FORMATS)
    raise InvalidInput(f"{path} is no trace that is known: {what}.", fix=f"use one of: {known_names}.")
