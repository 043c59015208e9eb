"""Mooncake traces: lengths, and the names of the blocks of 512 tokens that a prompt consists of.

    {"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2, ...]}

`timestamp` is in milliseconds. An id stands for a block and everything before it, so equal ids are equal prefixes; the
last block of a prompt may be cut short. Outputs are not named, and nothing else has their tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from quire.sim.formats.lines import lines, row_decoder
from quire.sim.formats.trace_format import Tokenize
from quire.sim.pieces import Piece, piece_key, tokens_of
from quire.sim.trace_request import Planned, TraceRequest
from quire.spec.ids import Ids

BLOCK_TOKENS = 512


class _Row(msgspec.Struct):
    timestamp: Annotated[float, Meta(ge=0)]
    input_length: Annotated[int, Meta(ge=1)]
    output_length: Annotated[int, Meta(ge=0)]
    hash_ids: list[Annotated[int, Meta(ge=0, le=2**31 - 1)]]


class Mooncake:
    """Reader of Mooncake traces."""

    name = "Mooncake"
    has_text = False

    def recognises(self, path: Path, line: bytes, fields: dict[str, object]) -> bool:
        """By its list of block ids."""
        return isinstance(fields.get("hash_ids"), list)

    def read(self, path: Path, tokenize: Tokenize) -> Iterator[Planned]:
        """The requests, each kept as an array of block ids until it is built."""
        rows = row_decoder(_Row)
        for line in lines(path):
            row = line.decode(rows)
            line.check_length("input_length and output_length", row.input_length + row.output_length)
            blocks = -(-row.input_length // BLOCK_TOKENS)
            if len(row.hash_ids) != blocks:
                has = f"'hash_ids' has {len(row.hash_ids)} blocks"
                line.refuse(f"{has}, and {row.input_length} tokens are {blocks} blocks of {BLOCK_TOKENS}")
            ids = np.array(row.hash_ids, dtype=np.int32)
            lengths = row.input_length, row.output_length
            yield Planned(row.timestamp / 1e3, partial(_request, str(line.number), ids, lengths), lengths)


def _request(request_id: str, ids: Ids, lengths: tuple[int, int], arrival: float) -> TraceRequest:
    pieces = [Piece(piece_key("mooncake", int(block)), BLOCK_TOKENS) for block in ids]
    output = Piece(piece_key("mooncake output", int(request_id)), lengths[1])
    return TraceRequest(request_id, tokens_of(pieces)[: lengths[0]], tokens_of([output]), arrival)
