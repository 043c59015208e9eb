"""Rank: how likely a cached frame is to be read again."""

from __future__ import annotations

from enum import IntEnum


class Rank(IntEnum):
    """The order in which frames of windows and states are reclaimed: lower ranks first."""

    PASSED = 0  # no next token reads it: a resume point only for prefixes that end by chance right there
    MARKED = 1  # where a request may well begin again: the end of a prompt
    USED = 2  # where one ended, or began, or where two prefixes part
