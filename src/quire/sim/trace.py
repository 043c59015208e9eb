"""open_trace: a trace from a file or from a generated workload."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from quire.errors import InvalidInput
from quire.sim.formats.published import AZURE, LENGTHS, LMCACHE_AGENT, MOONCAKE, RAGPULSE, RAGPULSE_TRACE
from quire.sim.formats.request_log import REQUEST_LOG
from quire.sim.formats.token_trace import TOKEN_TRACE, write_trace
from quire.sim.formats.trace_format import TraceFormat, fields_of, lines
from quire.sim.trace_request import Planned, Tokenize, Trace, TraceRequest, utf8_bytes
from quire.sim.workloads import WORKLOADS, is_workload, make_workload

__all__ = ["FORMATS", "Trace", "TraceRequest", "open_trace", "write_trace"]

FORMATS = (TOKEN_TRACE, MOONCAKE, LMCACHE_AGENT, RAGPULSE, AZURE, REQUEST_LOG, LENGTHS)


def open_trace(source: str, *, limit: int | None = None, seed: int = 0, tokenize: Tokenize = utf8_bytes) -> Trace:
    """The trace in the file or folder `source`, or the workload of that name, for example `chat` or
    `chat:requests=500,rate=2`, or of tenants: `noisy:9,quiet:1`.

    `limit` keeps the first requests to arrive. `seed` is for workloads, `tokenize` for files of text. Raises
    InvalidInput if there is no such file or workload, and for the first bad line of a file.
    """
    if limit is not None and limit < 1:
        raise InvalidInput(f"a trace of {limit} requests has nothing to replay.", fix="use a limit of at least 1.")
    path = Path(source)
    if path.exists():
        file = path / RAGPULSE_TRACE if (path / RAGPULSE_TRACE).is_file() else path
        found = _format_of(file)
        about = f"{found.name} trace {source}"
        about += ", tokens of its text: utf8" if found.has_text and tokenize is utf8_bytes else ""
        trace = Trace(path.name, about, found.read(file, tokenize), limit=limit)
    elif is_workload(source):
        drafts = make_workload(source, seed)
        planned = (Planned.of(draft, tokenize) for draft in drafts)
        trace = Trace(source, f"workload {source}, seed {seed}", planned, limit=limit)
    else:
        near = get_close_matches(source.partition(":")[0], WORKLOADS, 1)
        known = f"use {near[0]}, or " if near else ""
        known += f"name a file ({_format_names()}) or a workload ({', '.join(WORKLOADS)}), "
        known += "or tenants and their parts (noisy:9,quiet:1)."
        raise InvalidInput(f"there is no trace file or workload '{source}'.", fix=known)
    if not len(trace):
        raise InvalidInput(f"'{source}' has no requests.", fix="add at least one line.")
    return trace


def _format_of(path: Path) -> TraceFormat:
    first = next((line.text for line in lines(path)), b"") if path.is_file() else b""
    fields = fields_of(first)
    for known in FORMATS:
        if known.recognises(first, fields):
            return known
    what = f"its first line begins with {first[:60]!r}" if first else "it has no first line"
    raise InvalidInput(f"{path} is no trace that is known: {what}.", fix=f"use one of: {_format_names()}.")


def _format_names() -> str:
    return ", ".join(known.name for known in FORMATS)
