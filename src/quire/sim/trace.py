"""open_trace: a trace from a file or from a generated workload."""

from __future__ import annotations

from pathlib import Path

from quire.errors import InvalidInput
from quire.sim.formats import FORMATS, Tokenize, format_of, utf8_bytes
from quire.sim.trace_request import Trace, TraceRequest
from quire.sim.workloads import WORKLOADS, make_workload

__all__ = ["Trace", "TraceRequest", "open_trace"]


def open_trace(
    source: str, *, limit: int | None = None, seed: int = 0, tokenize: Tokenize = utf8_bytes, text: str = "utf8"
) -> Trace:
    """The trace in the file or folder `source`, or the workload of that name, `chat` or `chat:requests=500,rate=2` say.

    `limit` keeps the first requests to arrive. `seed` is for workloads; `tokenize` is for files of text, and `text` is
    what the trace calls it. Raises InvalidInput where there is no such thing, and for the first bad line of a file.
    """
    if limit is not None and limit < 1:
        raise InvalidInput(f"a trace of {limit} requests has nothing to replay.", fix="use a limit of at least 1.")
    path = Path(source)
    if path.exists():
        found = format_of(path)
        planned = found.read(path, tokenize)
        counted = f", tokens of its text: {text}" if found.has_text else ""
        trace = Trace(path.name, f"{found.name} trace {source}{counted}", planned, limit=limit)
    elif source.partition(":")[0] in WORKLOADS:
        trace = Trace(source, f"workload {source}, seed {seed}", make_workload(source, seed), limit=limit)
    else:
        raise InvalidInput(f"there is no trace file or workload '{source}'.", fix=_what_there_is())
    if not len(trace):
        raise InvalidInput(f"'{source}' has no requests.", fix="add at least one line.")
    return trace


def _what_there_is() -> str:
    formats = ", ".join(found.name for found in FORMATS)
    return f"name a file ({formats}) or a workload ({', '.join(WORKLOADS)})."
