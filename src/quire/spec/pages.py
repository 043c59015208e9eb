"""Page arithmetic: tokens to whole pages, up and down. Every rounding to pages in Quire uses these two."""

from __future__ import annotations

ALL_TOKENS = 2**62
"""More tokens than any request has: no limit."""


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that `num_tokens` tokens occupy, the last one possibly in part."""
    return -(-num_tokens // page_size)


def floor_to_page(num_tokens: int, page_size: int) -> int:
    """The largest multiple of `page_size` that is at most `num_tokens`."""
    return num_tokens - num_tokens % page_size
