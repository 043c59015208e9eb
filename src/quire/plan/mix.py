"""Mix: the expected requests of a plan. It decides how a budget is split if pools grow by different things."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from quire.errors import InvalidInput
from quire.spec.pages import pages_for

_MOST_LENGTHS = 1024


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

    def in_turns(self, most: int) -> Mix:
        """These requests, each that is longer than `most` tokens as several that are not."""
        counts = Counter[int]()
        for length, count in self.counts:
            turns = -(-length // most)
            counts[-(-length // turns)] += count * turns
        return Mix(tuple(sorted(counts.items())), self.source)


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
