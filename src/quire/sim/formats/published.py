"""Formats of published traces: Mooncake, LMCache agents, RAGPulse and Azure; and lengths alone.

Mooncake names the blocks of 512 tokens of a prompt; a line has its time in milliseconds. An id represents a block and
everything before it, so equal ids are equal prefixes. The last block of a prompt may be cut short.

    {"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2, ...]}

LMCache's agent traces, `.jsonl` or `.jsonl.xz`, have the text of each call; times are in microseconds. Answers of tools
in between are part of the next input.

    {"timestamp": 1760428436442742, "input": "...", "output": "...", "session_id": "..."}

RAGPulse names the chunks that each prompt consists of, and files beside the trace have their lengths; times are in
seconds. An id represents a text at any place, so the same chunk after another one is not a shared prefix. The few
tokens that the prompt template adds between chunks (`input_length` counts them) are omitted.

    0_trace.jsonl      {"timestamp": "82", "output_length": 192, "hash_ids": {"sys_prompt": [8302, ...], ...}, ...}
    1_sys_prompt.jsonl {"sys_prompt_id": 8302, "token_length": 512}        and so on for the other kinds of chunks

Azure's traces have dates and lengths only, so no two requests share anything; so have lines of JSON:

    TIMESTAMP,ContextTokens,GeneratedTokens
    2023-11-16 18:17:03.9799600,4808,10

    {"input_length": 4808, "output_length": 10, "timestamp": 0}

If only the length of an output is known, it is unlike any other text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from quire.errors import InvalidInput
from quire.sim.formats.trace_format import (
    Length,
    ReadLine,
    Timestamp,
    TokenId,
    TraceFormat,
    iso_seconds,
    lines,
    rows_of,
)
from quire.sim.trace_request import Draft, Text, TextBlocks, TraceRequest

_BLOCK_TOKENS = 512


class _MooncakeRow(msgspec.Struct):
    timestamp: Timestamp
    input_length: Annotated[int, Meta(ge=1)]
    output_length: Annotated[int, Meta(ge=0)]
    hash_ids: list[TokenId]

    def draft(self, number: int) -> Draft:
        num_blocks = -(-self.input_length // _BLOCK_TOKENS)
        if len(self.hash_ids) != num_blocks:
            has = f"'hash_ids' has {len(self.hash_ids)} blocks"
            raise ValueError(f"{has}, and {self.input_length} tokens are {num_blocks} blocks of {_BLOCK_TOKENS}")
        prompt = TextBlocks("mooncake", self.hash_ids, _BLOCK_TOKENS, self.input_length)
        output = Text(("mooncake output", number), self.output_length)
        return TraceRequest(str(number), prompt, (output,), self.timestamp / 1e3)


class _AgentRow(msgspec.Struct):
    timestamp: Timestamp
    input: Annotated[str, Meta(min_length=1)]
    output: str
    session_id: str | int = ""

    def draft(self, number: int) -> Draft:
        session = str(self.session_id)
        return TraceRequest(str(number), self.input, self.output, self.timestamp / 1e6, session=session)


RAGPULSE_TRACE = "0_trace.jsonl"
_CHUNKS = {
    "sys_prompt": ("1_sys_prompt.jsonl", "sys_prompt_id"),
    "passages_ids": ("2_passages.jsonl", "passage_id"),
    "web_search": ("5_web_search.jsonl", "web_search_id"),
    "history": ("3_history.jsonl", "history_id"),
    "user_input": ("4_user_input.jsonl", "user_input_id"),
}
"""Kinds of chunks in their order in a prompt, the file with their lengths and the field of their ids in it."""


class _RagPulseRow(msgspec.Struct):
    timestamp: Timestamp
    output_length: Length
    hash_ids: dict[str, list[int]]
    session_id: str | int = ""


def _open_ragpulse(path: Path) -> ReadLine:
    """Lines of the trace in a folder with files of lengths."""
    lengths = {kind: _chunk_lengths(path.parent / name, field) for kind, (name, field) in _CHUNKS.items()}
    rows = msgspec.json.Decoder(_RagPulseRow, strict=False)  # its timestamps are in quotes

    def read(text: bytes, number: int) -> Draft:
        row = rows.decode(text)
        chunks = [(kind, chunk) for kind in _CHUNKS for chunk in row.hash_ids.get(kind, ())]
        for kind, chunk in chunks:
            if chunk not in lengths[kind]:
                raise ValueError(f"'{kind}' has chunk {chunk}, and {_CHUNKS[kind][0]} does not say how long it is")
        prompt = tuple(Text((kind, chunk), lengths[kind][chunk]) for kind, chunk in chunks)
        if not any(text.length for text in prompt):
            raise ValueError("the prompt has no tokens")
        output = Text(("ragpulse output", number), row.output_length)
        return TraceRequest(str(number), prompt, (output,), row.timestamp, session=str(row.session_id))

    return read


def _chunk_lengths(path: Path, field: str) -> dict[int, int]:
    """Tokens of each chunk of one kind, whose ids are in `field`."""
    if not path.is_file():
        raise InvalidInput(f"{path} is missing, and says how long chunks are.", fix="put it beside the trace.")
    decode = msgspec.json.Decoder(dict[str, Length]).decode
    found = {}
    for line in lines(path):
        row = line.parsed(lambda text, _: decode(text))
        if not {field, "token_length"} <= row.keys():
            line.refuse(f"'{field}' or 'token_length' is missing")
        found[row[field]] = row["token_length"]
    return found


_AZURE_HEADER = b"TIMESTAMP,ContextTokens,GeneratedTokens"


def _read_azure(text: bytes, number: int) -> Draft:
    columns = text.decode(errors="replace").strip().split(",")
    if len(columns) != 3:
        raise ValueError(f"it has {len(columns)} columns, and {_AZURE_HEADER.decode()} are 3")
    arrival, prompt_tokens, output_tokens = iso_seconds(columns[0]), int(columns[1]), int(columns[2])
    if prompt_tokens < 1 or output_tokens < 0:
        raise ValueError(f"{prompt_tokens} prompt and {output_tokens} output tokens are no request")
    return _unshared(number, prompt_tokens, output_tokens, arrival)


class _LengthsRow(msgspec.Struct):
    input_length: Annotated[int, Meta(ge=1)]
    output_length: Annotated[int, Meta(ge=0)] = 0
    timestamp: Timestamp = 0.0

    def draft(self, number: int) -> Draft:
        return _unshared(number, self.input_length, self.output_length, self.timestamp / 1e3)


def _unshared(number: int, prompt_tokens: int, output_tokens: int, arrival: float) -> Draft:
    """A request of these lengths, unlike any other."""
    prompt, output = Text(("azure", number), prompt_tokens), Text(("azure output", number), output_tokens)
    return TraceRequest(str(number), (prompt,), (output,), arrival)


MOONCAKE = TraceFormat(
    "Mooncake", lambda first, fields: isinstance(fields.get("hash_ids"), list), rows_of(_MooncakeRow)
)
LMCACHE_AGENT = TraceFormat(
    "LMCache agent",
    lambda first, fields: isinstance(fields.get("input"), str) and isinstance(fields.get("output"), str),
    rows_of(_AgentRow),
    has_text=True,
)
RAGPULSE = TraceFormat("RAGPulse", lambda first, fields: isinstance(fields.get("hash_ids"), dict), _open_ragpulse)
AZURE = TraceFormat("Azure CSV", lambda first, fields: first.strip() == _AZURE_HEADER, lambda path: _read_azure, 1)
LENGTHS = TraceFormat("lengths", lambda first, fields: "input_length" in fields, rows_of(_LengthsRow))
