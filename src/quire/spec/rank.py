"""Rank: how likely a cached frame is to be read again."""

from __future__ import annotations

from enum import IntEnum


class Rank(IntEnum):
    """The order in which frames of windows and states are reclaimed: lower ranks first."""

    PASSED = 0  # no next token reads it: a resume point only for prefixes that happen to end there
    MARKED = 1  # where a request is likely to begin: the end of a prompt
    USED = 2  # where a request has ended or begun, or where two prefixes diverge
