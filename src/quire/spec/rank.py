"""Rank: what a cached frame is good for."""

from __future__ import annotations

from enum import IntEnum


class Rank(IntEnum):
    """What a cached frame is good for where frames go before their pages; lower ranks are reclaimed first."""

    PASSED = 0  # no next token reads it: a resume point only for prefixes that end by chance right there
    MARKED = 1  # where a request may well begin again: the end of a prompt
    USED = 2  # where one ended, or began, or where two prefixes part
