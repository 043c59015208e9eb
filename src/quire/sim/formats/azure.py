"""Azure's published traces: when requests came and how long they were. No two of them share anything.

TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path

from quire.sim.formats.lines import Line, lines
from quire.sim.formats.trace_format import Tokenize
from quire.sim.pieces import Piece, piece_key
from quire.sim.trace_request import Planned, PlannedPieces

_HEADER = b"TIMESTAMP,ContextTokens,GeneratedTokens"


class Azure:
    """Reader of Azure's LLM inference traces."""

    name = "Azure CSV"
    has_text = False

    def recognises(self, path: Path, line: bytes, fields: dict[str, object]) -> bool:
        """By its header."""
        return line.strip() == _HEADER

    def read(self, path: Path, tokenize: Tokenize) -> Iterator[Planned]:
        """The requests, each with tokens of its own."""
        for line in islice(lines(path), 1, None):
            arrival, prompt_tokens, output_tokens = _row(line)
            prompt, output = (
                Piece(piece_key(part, line.number), length)
                for part, length in (("azure", prompt_tokens), ("azure output", output_tokens))
            )
            yield PlannedPieces(str(line.number), (prompt,), (output,), arrival=arrival).planned()


def _row(line: Line) -> tuple[float, int, int]:
    columns = line.text.decode(errors="replace").strip().split(",")
    if len(columns) != 3:
        line.refuse(f"it has {len(columns)} columns, and {_HEADER.decode()} are 3")
    try:
        when = datetime.fromisoformat(columns[0])
        lengths = int(columns[1]), int(columns[2])
    except ValueError as error:
        line.refuse(str(error))
    if lengths[0] < 1 or lengths[1] < 0:
        line.refuse(f"{lengths[0]} prompt and {lengths[1]} output tokens are no request")
    line.check_length("ContextTokens,GeneratedTokens", sum(lengths))
    when = when if when.tzinfo else when.replace(tzinfo=UTC)
    return when.timestamp(), *lengths
