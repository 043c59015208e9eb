"""Mix: the expected requests of a plan. It decides how a budget is split if pools grow by different things."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

from quire.errors import InvalidInput
from quire.spec.pages import pages_for

_MOST_LENGTHS = 1024
_LONGEST = 2**40  # tokens
_INPUT_NAMES = ("input_length", "input_len", "input_tokens", "prompt_tokens", "num_prompt_tokens", "ContextTokens")
_OUTPUT_NAMES = (
    "output_length",
    "output_len",
    "output_tokens",
    "completion_tokens",
    "num_output_tokens",
    "GeneratedTokens",
)


@dataclass(frozen=True, slots=True)
class Mix:
    """How often the expected requests have which length, prompt and output together: pairs of tokens and count."""

    counts: tuple[tuple[int, int], ...]
    source: str

    def __post_init__(self) -> None:
        if not self.counts or min(length for length, _ in self.counts) < 1:
            raise InvalidInput("the expected requests have no tokens.", fix="expect requests of at least one token.")

    @property
    def num_requests(self) -> int:
        """Requests counted."""
        return sum(count for _, count in self.counts)

    @property
    def mean(self) -> int:
        """Mean length in tokens, rounded up."""
        return -(-sum(length * count for length, count in self.counts) // self.num_requests)

    def window_share(self, kept: int, page_size: int) -> Fraction:
        """Tokens of a window pool per token of a full pool, if at most `kept` tokens of each request are in a window.

        Both are counted in whole pages. A cached prefix has its window as a running request does, so that it can be
        resumed; the share holds for both.
        """
        most = pages_for(kept, page_size)
        whole = [(pages_for(length, page_size), count) for length, count in self.counts]
        windows = sum(min(pages, most) * count for pages, count in whole)
        return Fraction(windows, sum(pages * count for pages, count in whole))

    def requests_per_token(self, page_size: int) -> Fraction:
        """Requests per token of a full pool, whose pages hold `page_size` tokens over all ranks."""
        tokens = sum(pages_for(length, page_size) * page_size * count for length, count in self.counts)
        return Fraction(self.num_requests, tokens)

    def clipped(self, context: int) -> Mix:
        """These requests, none longer than `context` tokens."""
        if self.counts[-1][0] <= context:
            return self
        short = tuple(pair for pair in self.counts if pair[0] < context)
        rest = self.num_requests - sum(count for _, count in short)
        return Mix((*short, (context, rest)), self.source)


def mix_of(lengths: Iterable[int], source: str) -> Mix:
    """The mix of requests of these lengths, in tokens. Raises InvalidInput if there are none, or one has no tokens.

    Beyond 1,024 different lengths, neighbours share their mean, since a search for what fits makes many plans.
    """
    counts = sorted(Counter(lengths).items())
    if len(counts) > _MOST_LENGTHS:
        size = -(-len(counts) // _MOST_LENGTHS)
        counts = [_together(counts[at : at + size]) for at in range(0, len(counts), size)]
    return Mix(tuple(counts), source)


def _together(counts: Sequence[tuple[int, int]]) -> tuple[int, int]:
    number = sum(count for _, count in counts)
    return -(-sum(length * count for length, count in counts) // number), number


def uniform(length: int, source: str) -> Mix:
    """Requests of one length."""
    return Mix(((length, 1),), source)


def read_trace(path: Path, limit: int = 1_000_000) -> Mix:
    """The mix of a recorded trace, one request per line: JSON objects or CSV with a header.

    Lengths are read from fields such as `input_length` and `output_length`; at most `limit` lines are read. Raises
    InvalidInput if the file cannot be read or names no lengths.
    """
    try:
        lengths = list(islice(_lengths(path), limit))
    except (OSError, ValueError, TypeError, OverflowError, RecursionError, csv.Error) as error:
        raise InvalidInput(
            f"the trace {path} cannot be read: {error}.", fix="give a JSON-lines or CSV file."
        ) from error
    if not lengths:
        raise InvalidInput(
            f"the trace {path} names no request lengths.",
            fix=f"give lines with {_INPUT_NAMES[0]} and {_OUTPUT_NAMES[0]}.",
        )
    return mix_of(lengths, f"{'the first ' if len(lengths) == limit else ''}{len(lengths):,} requests of {path.name}")


def _lengths(path: Path) -> Iterator[int]:
    with path.open(encoding="utf-8", newline="") as file:
        rows: Iterator[Any] = (
            csv.DictReader(file) if path.suffix == ".csv" else map(json.loads, filter(str.strip, file))
        )
        for number, row in enumerate(rows, start=1):
            if not isinstance(row, dict):
                raise ValueError(f"line {number} holds a {type(row).__name__}, not an object")
            prompt, output = _field(row, _INPUT_NAMES), _field(row, _OUTPUT_NAMES)
            if min(prompt, output) < 0 or prompt + output > _LONGEST:
                raise ValueError(f"line {number} has a request of {prompt} and {output} tokens")
            if prompt + output:
                yield prompt + output


def _field(row: dict[str, Any], names: Sequence[str]) -> int:
    value = next((row[name] for name in names if row.get(name) is not None), 0)
    return int(float(value))
