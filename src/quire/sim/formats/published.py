"""Formats of published traces: Mooncake, LMCache agents, RAGPulse and Azure.

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

Azure's traces have dates and lengths only, so no two requests share anything:

    TIMESTAMP,ContextTokens,GeneratedTokens
    2023-11-16 18:17:03.9799600,4808,10

If only the length of an output is known, it is unlike any other text.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from quire.errors import InvalidInput
from quire.sim.formats.trace_format import (
    Length,
    Line,
    Timestamp,
    TokenId,
    Tokenize,
    TraceFormat,
    iso_seconds,
    lines,
    utf8_bytes,
)
from quire.sim.synthetic_text import Text, text_seed, tokens_of
from quire.sim.trace_request import Planned, TraceRequest
from quire.spec.ids import Ids

# -- Mooncake

_BLOCK_TOKENS = 512


class _MooncakeRow(msgspec.Struct):
    timestamp: Timestamp
    input_length: Annotated[int, Meta(ge=1)]
    output_length: Annotated[int, Meta(ge=0)]
    hash_ids: list[TokenId]


_MOONCAKE_ROWS = msgspec.json.Decoder(_MooncakeRow)


def _read_mooncake(path: Path, tokenize: Tokenize) -> Iterator[Planned]:
    """Each request is an array of block ids until it is built."""
    for line in lines(path):
        row = line.decode(_MOONCAKE_ROWS)
        line.check_length("input_length and output_length", row.input_length + row.output_length)
        blocks = -(-row.input_length // _BLOCK_TOKENS)
        if len(row.hash_ids) != blocks:
            has = f"'hash_ids' has {len(row.hash_ids)} blocks"
            line.refuse(f"{has}, and {row.input_length} tokens are {blocks} blocks of {_BLOCK_TOKENS}")
        ids = np.array(row.hash_ids, dtype=np.int32)
        lengths = row.input_length, row.output_length
        yield Planned(row.timestamp / 1e3, partial(_mooncake_request, line.number, ids, lengths), lengths)


def _mooncake_request(number: int, ids: Ids, lengths: tuple[int, int], arrival: float) -> TraceRequest:
    blocks = [Text(text_seed("mooncake", block), _BLOCK_TOKENS) for block in ids.tolist()]
    output = Text(text_seed("mooncake output", number), lengths[1])
    return TraceRequest(str(number), tokens_of(blocks)[: lengths[0]], tokens_of([output]), arrival)


# -- LMCache agents


class _AgentRow(msgspec.Struct):
    timestamp: Timestamp
    input: Annotated[str, Meta(min_length=1)]
    output: str
    session_id: str | int = ""


_AGENT_ROWS = msgspec.json.Decoder(_AgentRow)


def _read_agents(path: Path, tokenize: Tokenize) -> Iterator[Planned]:
    for line in lines(path):
        row = line.decode(_AGENT_ROWS)
        lengths = (len(row.input.encode()), len(row.output.encode())) if tokenize is utf8_bytes else None
        yield Planned(row.timestamp / 1e6, partial(_agent_request, line, tokenize), lengths)


def _agent_request(line: Line, tokenize: Tokenize, arrival: float) -> TraceRequest:
    row = line.decode(_AGENT_ROWS)
    prompt, output = tokenize(row.input), tokenize(row.output)
    return TraceRequest(str(line.number), prompt, output, arrival, session=str(row.session_id))


# -- RAGPulse

_RAGPULSE_TRACE = "0_trace.jsonl"
_CHUNKS = {
    "sys_prompt": ("1_sys_prompt.jsonl", "sys_prompt_id"),
    "passages_ids": ("2_passages.jsonl", "passage_id"),
    "web_search": ("5_web_search.jsonl", "web_search_id"),
    "history": ("3_history.jsonl", "history_id"),
    "user_input": ("4_user_input.jsonl", "user_input_id"),
}
"""Kinds of chunks in their order in a prompt, the file with their lengths and the field of their ids in it."""


class _ChunkIds(msgspec.Struct):
    sys_prompt: list[int] = []
    passages_ids: list[int] = []
    web_search: list[int] = []
    history: list[int] = []
    user_input: list[int] = []


class _RagPulseRow(msgspec.Struct):
    timestamp: Timestamp
    output_length: Length
    hash_ids: _ChunkIds
    session_id: str | int = ""


def _read_ragpulse(path: Path, tokenize: Tokenize) -> Iterator[Planned]:
    """The requests of the folder, or of the file in it."""
    path = path / _RAGPULSE_TRACE if path.is_dir() else path
    chunks = {kind: _chunk_lengths(path.parent / name, field) for kind, (name, field) in _CHUNKS.items()}
    rows = msgspec.json.Decoder(_RagPulseRow, strict=False)  # its timestamps are in quotes
    for line in lines(path):
        row = line.decode(rows)
        prompt = []
        for kind, lengths in chunks.items():
            for chunk in getattr(row.hash_ids, kind):
                if chunk not in lengths:
                    line.refuse(f"'{kind}' has chunk {chunk}, and {_CHUNKS[kind][0]} does not say how long it is")
                prompt.append(Text(text_seed(kind, chunk), lengths[chunk]))
        num_tokens = sum(text.length for text in prompt)
        if not num_tokens:
            line.refuse("the prompt has no tokens")
        line.check_length("hash_ids", num_tokens)
        output = Text(text_seed("ragpulse output", line.number), row.output_length)
        yield Planned.of_texts(str(line.number), prompt, output, row.timestamp, session=str(row.session_id))


def _chunk_lengths(path: Path, field: str) -> dict[int, int]:
    """Tokens of each chunk of one kind, whose ids are in `field`."""
    if not path.is_file():
        raise InvalidInput(f"{path} is missing, and says how long chunks are.", fix="put it beside the trace.")
    found = {}
    rows = msgspec.json.Decoder(dict[str, Length])
    for line in lines(path):
        row = line.decode(rows)
        if not {field, "token_length"} <= row.keys():
            line.refuse(f"'{field}' or 'token_length' is missing")
        found[row[field]] = row["token_length"]
    return found


# -- Azure

_AZURE_HEADER = b"TIMESTAMP,ContextTokens,GeneratedTokens"


def _read_azure(path: Path, tokenize: Tokenize) -> Iterator[Planned]:
    for line in islice(lines(path), 1, None):
        columns = line.text.decode(errors="replace").strip().split(",")
        if len(columns) != 3:
            line.refuse(f"it has {len(columns)} columns, and {_AZURE_HEADER.decode()} are 3")
        try:
            arrival, prompt_tokens, output_tokens = iso_seconds(columns[0]), int(columns[1]), int(columns[2])
        except ValueError as error:
            line.refuse(str(error))
        if prompt_tokens < 1 or output_tokens < 0:
            line.refuse(f"{prompt_tokens} prompt and {output_tokens} output tokens are no request")
        line.check_length("ContextTokens,GeneratedTokens", prompt_tokens + output_tokens)
        prompt = Text(text_seed("azure", line.number), prompt_tokens)
        output = Text(text_seed("azure output", line.number), output_tokens)
        yield Planned.of_texts(str(line.number), [prompt], output, arrival)


MOONCAKE = TraceFormat("Mooncake", lambda path, first, fields: isinstance(fields.get("hash_ids"), list), _read_mooncake)
LMCACHE_AGENT = TraceFormat(
    "LMCache agent",
    lambda path, first, fields: isinstance(fields.get("input"), str) and isinstance(fields.get("output"), str),
    _read_agents,
    has_text=True,
)
RAGPULSE = TraceFormat(
    "RAGPulse",
    lambda path, first, fields: (path / _RAGPULSE_TRACE).is_file() or isinstance(fields.get("hash_ids"), dict),
    _read_ragpulse,
)
AZURE = TraceFormat("Azure CSV", lambda path, first, fields: first.strip() == _AZURE_HEADER, _read_azure)
