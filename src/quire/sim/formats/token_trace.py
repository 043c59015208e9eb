"""Token traces: the tokens themselves, one request a line. `write_trace` writes them, and any server can log them.

    {"prompt_token_ids": [5, 6, 7], "output_token_ids": [8, 9], "timestamp": 1500, "session": "s1"}

`timestamp` is in milliseconds. Every other field of a `TraceRequest` may be there too, under its own name, with
`adapter` and `salt` for the namespace and `think` in milliseconds. Fields of other names are ignored, unless the first
line has one that looks like a misspelt name of these.
"""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from quire.sim.formats.trace_format import ReadLine, Timestamp, TokenId, TraceFormat, fields_of, lines, rows_of
from quire.sim.trace_request import Draft, Trace, TraceRequest
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
    calls_tool: bool | None = None

    def draft(self, number: int) -> Draft:
        return TraceRequest(
            request_id=str(number if self.request_id == "" else self.request_id),
            prompt=self.prompt_token_ids,
            output=self.output_token_ids,
            arrival=_seconds(self.timestamp),
            session=str(self.session),
            namespace=Namespace(adapter=self.adapter, salt=self.salt),
            after=str(self.after),
            think=_seconds(self.think),
            priority=self.priority,
            abort_after=self.abort_after,
            acceptance=self.acceptance,
            calls_tool=self.calls_tool,
        )


def _open(path: Path) -> ReadLine:
    """Refuses an unknown field in the first line whose name is similar to that of a missing one."""
    first = next(lines(path))
    fields = fields_of(first.text)
    missing = [name for name in _Row.__struct_fields__ if name not in fields]
    for name in fields.keys() - set(_Row.__struct_fields__):
        for likely in get_close_matches(name.lower(), missing, 1, cutoff=0.75):
            first.refuse(f"'{name}' is no field of a token trace, and nearly '{likely}'; write that, or another name")
    return rows_of(_Row)(path)


TOKEN_TRACE = TraceFormat("token trace", lambda first, fields: "prompt_token_ids" in fields, _open)


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
                calls_tool=request.calls_tool,
            )
            file.write(msgspec.json.encode(row) + b"\n")


def _seconds(milliseconds: float) -> float:
    """Rounded to the microsecond, so that written times are read back unchanged."""
    return round(milliseconds / 1e3, 6)
