"""RAGPulse: retrieval requests, as ids of the chunks that their prompts were put together from.

    0_trace.jsonl      {"timestamp": "82", "output_length": 192, "hash_ids": {"sys_prompt": [8302, ...], ...}, ...}
    1_sys_prompt.jsonl {"sys_prompt_id": 8302, "token_length": 512}        and so on for the other kinds of chunks

`timestamp` is in seconds. An id stands for a text wherever it is, so the same chunk after another one is not a shared
prefix. The few tokens that the prompt template put between chunks (`input_length` counts them) are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from quire.errors import InvalidInput
from quire.sim.formats.lines import MOST_TOKENS, lines, row_decoder
from quire.sim.formats.trace_format import Tokenize
from quire.sim.pieces import Piece, num_tokens, piece_key
from quire.sim.trace_request import Planned, PlannedPieces

_TRACE = "0_trace.jsonl"
_CHUNKS = {
    "sys_prompt": ("1_sys_prompt.jsonl", "sys_prompt_id"),
    "passages_ids": ("2_passages.jsonl", "passage_id"),
    "web_search": ("5_web_search.jsonl", "web_search_id"),
    "history": ("3_history.jsonl", "history_id"),
    "user_input": ("4_user_input.jsonl", "user_input_id"),
}
"""Kinds of chunks in the order they have in a prompt, the file with their lengths and what it calls their ids."""

_Length = Annotated[int, Meta(ge=0, le=MOST_TOKENS)]


class _Chunks(msgspec.Struct):
    sys_prompt: list[int] = []
    passages_ids: list[int] = []
    web_search: list[int] = []
    history: list[int] = []
    user_input: list[int] = []


class _Row(msgspec.Struct):
    timestamp: Annotated[float, Meta(ge=0)]
    output_length: _Length
    hash_ids: _Chunks
    session_id: str | int = ""


class RagPulse:
    """Reader of RAGPulse, given its folder or the file of its requests."""

    name = "RAGPulse"
    has_text = False

    def recognises(self, path: Path, line: bytes, fields: dict[str, object]) -> bool:
        """By the file of requests in a folder, or by its chunk ids, which are by kind."""
        return (path / _TRACE).is_file() or isinstance(fields.get("hash_ids"), dict)

    def read(self, path: Path, tokenize: Tokenize) -> Iterator[Planned]:
        """The requests, each kept as the names of its chunks until it is built."""
        path = path / _TRACE if path.is_dir() else path
        chunks = {kind: _chunk_lengths(path.parent / name, field) for kind, (name, field) in _CHUNKS.items()}
        rows = row_decoder(_Row, strict=False)
        for line in lines(path):
            row = line.decode(rows)
            prompt = []
            for kind, lengths in chunks.items():
                for chunk in getattr(row.hash_ids, kind):
                    if chunk not in lengths:
                        line.refuse(f"'{kind}' has chunk {chunk}, and {_CHUNKS[kind][0]} does not say how long it is")
                    prompt.append(Piece(piece_key(kind, chunk), lengths[chunk]))
            if not num_tokens(prompt):
                line.refuse("the prompt has no tokens")
            line.check_length("hash_ids", num_tokens(prompt))
            output = Piece(piece_key("ragpulse output", line.number), row.output_length)
            request = PlannedPieces(
                str(line.number), tuple(prompt), (output,), arrival=row.timestamp, session=str(row.session_id)
            )
            yield request.planned()


def _chunk_lengths(path: Path, field: str) -> dict[int, int]:
    """Tokens of each chunk of one kind, whose ids are in `field`."""
    if not path.is_file():
        raise InvalidInput(f"{path} is missing, and says how long chunks are.", fix="put it beside the trace.")
    found = {}
    rows = row_decoder(dict[str, _Length])
    for line in lines(path):
        row = line.decode(rows)
        if not {field, "token_length"} <= row.keys():
            line.refuse(f"'{field}' or 'token_length' is missing")
        found[row[field]] = row["token_length"]
    return found
