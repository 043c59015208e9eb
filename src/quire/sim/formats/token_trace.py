"""Token traces: the tokens themselves, one request a line. `write_trace` writes them, and any server can log them.

    {"prompt_token_ids": [5, 6, 7], "output_token_ids": [8, 9], "timestamp": 1500, "session": "s1"}

`timestamp` is in milliseconds. Every other field of a `TraceRequest` may be there too, under its own name, with
`adapter` and `salt` for the namespace and `think` in milliseconds. Fields of other names are ignored, unless the first
line has one that looks like a misspelt name of these.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from quire.sim.formats.trace_format import Line, Timestamp, TokenId, Tokenize, TraceFormat, fields_of, lines
from quire.sim.trace_request import Planned, Trace, TraceRequest
from quire.spec.events import Namespace

_Id = str | int  # 7 is "7"


class _Row(msgspec.Struct, omit_defaults=True):
    prompt_token_ids: Annotated[list[TokenId], Meta(min_length=1)]
    output_token_ids: list[TokenId]
    timestamp: Timestamp = 0.0
    session: _Id = ""
    request_id: _Id = ""
    after: _Id = ""
    think: Timestamp = 0.0
    adapter: str = ""
    salt: str = ""
    priority: int = 0
    abort_after: Annotated[int, Meta(ge=0)] | None = None
    acceptance: Annotated[float, Meta(ge=0, le=1)] | None = None


_ROWS = msgspec.json.Decoder(_Row)


def _read(path: Path, tokenize: Tokenize) -> Iterator[Planned]:
    """The tokens of a request are read from the file again when it is built."""
    arrivals: dict[str, float] = {}
    for line in lines(path):
        if not arrivals:
            _refuse_misspelt(line)
        row = line.decode(_ROWS)
        lengths = len(row.prompt_token_ids), len(row.output_token_ids)
        line.check_length("prompt_token_ids", sum(lengths))
        after = str(row.after)
        if after and arrivals.get(after, math.inf) > row.timestamp:
            line.refuse(f"'after' names '{after}', and no line before this one has such a request that is earlier")
        request_id = _request_id(row, line)
        if request_id in arrivals:
            line.refuse(f"there was a request '{request_id}' before")
        arrivals[request_id] = row.timestamp
        yield Planned(_seconds(row.timestamp), partial(_request, line), lengths)


TOKEN_TRACE = TraceFormat("token trace", lambda path, first, fields: "prompt_token_ids" in fields, _read)


def _refuse_misspelt(line: Line) -> None:
    """Refuses an unknown field whose name is similar to that of a missing one."""
    fields = fields_of(line.text)
    missing = [name for name in _Row.__struct_fields__ if name not in fields]
    for name in fields.keys() - set(_Row.__struct_fields__):
        for likely in get_close_matches(name.lower(), missing, 1, cutoff=0.75):
            line.refuse(f"'{name}' is no field of a token trace, and nearly '{likely}'; write that, or another name")


def _request_id(row: _Row, line: Line) -> str:
    return str(line.number if row.request_id == "" else row.request_id)


def _request(line: Line, arrival: float) -> TraceRequest:
    row = line.decode(_ROWS)
    return TraceRequest(
        request_id=_request_id(row, line),
        prompt=np.array(row.prompt_token_ids, dtype=np.int32),
        output=np.array(row.output_token_ids, dtype=np.int32),
        arrival=arrival,
        session=str(row.session),
        namespace=Namespace(adapter=row.adapter, salt=row.salt),
        after=str(row.after),
        think=_seconds(row.think),
        priority=row.priority,
        abort_after=row.abort_after,
        acceptance=row.acceptance,
    )


def write_trace(trace: Trace, path: Path) -> None:
    """Writes `trace` to `path` as a token trace, from which `open_trace` creates the same requests again."""
    with path.open("wb") as file:
        for request in trace:
            row = _Row(
                prompt_token_ids=request.prompt.tolist(),
                output_token_ids=request.output.tolist(),
                timestamp=round(request.arrival * 1e3, 3),
                session=request.session,
                request_id=request.request_id,
                after=request.after,
                think=round(request.think * 1e3, 3),
                adapter=request.namespace.adapter,
                salt=request.namespace.salt,
                priority=request.priority,
                abort_after=request.abort_after,
                acceptance=request.acceptance,
            )
            file.write(msgspec.json.encode(row) + b"\n")


def _seconds(milliseconds: float) -> float:
    """Rounded to the microsecond, so that written times are read back unchanged."""
    return round(milliseconds / 1e3, 6)
