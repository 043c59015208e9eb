"""Mix: the requests a plan expects. It decides how a budget is split where pools grow by different things."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from quire.errors import InvalidInput
from quire.spec.pages import pages_for

_INPUT_NAMES = ("input_length", "input_len", "prompt_tokens", "num_prompt_tokens", "ContextTokens")
_OUTPUT_NAMES = ("output_length", "output_len", "completion_tokens", "num_output_tokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class Mix:
    """Lengths of the expected requests, prompt and output together, in tokens; each is as likely as the others."""

    lengths: tuple[int, ...]
    source: str

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 1:
            raise InvalidInput("the expected requests have no tokens.", fix="expect requests of at least one token.")

    @property
    def mean(self) -> int:
        """Mean length in tokens, rounded up."""
        return -(-sum(self.lengths) // len(self.lengths))

    def window_share(self, kept: int, page_size: int) -> Fraction:
        """Tokens of a window pool per token of a full pool, when of each request at most `kept` tokens are in a window.

        Both are counted in whole pages. A cached prefix keeps its window as a running request does, so that it can be
        resumed; the share holds for both.
        """
        whole = [pages_for(length, page_size) for length in self.lengths]
        most = pages_for(kept, page_size)
        return Fraction(sum(min(pages, most) for pages in whole), sum(whole))

    def requests_per_token(self, page_size: int) -> Fraction:
        """Requests per token of a full pool."""
        return Fraction(len(self.lengths), sum(pages_for(length, page_size) * page_size for length in self.lengths))

    def clipped(self, context: int) -> Mix:
        """The same requests, none longer than `context` tokens."""
        return Mix(tuple(min(length, context) for length in self.lengths), self.source)


def uniform(length: int, source: str) -> Mix:
    """Requests of one length."""
    return Mix((length,), source)


def read_trace(path: Path, limit: int = 100_000) -> Mix:
    """The mix of a recorded trace, one request per line: JSON objects or CSV with a header.

    Lengths are read from fields such as `input_length` and `output_length`; at most `limit` lines are read. Raises
    InvalidInput where the file cannot be read or names no lengths.
    """
    try:
        lengths = [length for _, length in zip(range(limit), _lengths(path), strict=False)]
    except (OSError, UnicodeDecodeError, ValueError, csv.Error) as error:
        raise InvalidInput(
            f"the trace {path} cannot be read: {error}.", fix="give a JSON-lines or CSV file."
        ) from error
    if not lengths:
        raise InvalidInput(
            f"the trace {path} names no request lengths.",
            fix=f"give lines with {_INPUT_NAMES[0]} and {_OUTPUT_NAMES[0]}.",
        )
    return Mix(tuple(lengths), f"{len(lengths):,} requests of {path.name}")


def _lengths(path: Path) -> Iterator[int]:
    with path.open(encoding="utf-8", newline="") as file:
        rows: Iterator[Any] = (
            csv.DictReader(file) if path.suffix == ".csv" else map(json.loads, filter(str.strip, file))
        )
        for row in rows:
            if not isinstance(row, dict):
                raise ValueError(f"a line holds a {type(row).__name__}, not an object")
            length = _field(row, _INPUT_NAMES) + _field(row, _OUTPUT_NAMES)
            if length > 0:
                yield length


def _field(row: dict[str, Any], names: Sequence[str]) -> int:
    value = next((row[name] for name in names if row.get(name) is not None), 0)
    return int(float(value))
