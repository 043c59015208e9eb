"""Ending: how an output ended, if that is known."""

from __future__ import annotations

from enum import StrEnum


class Ending(StrEnum):
    """An output calls tools, whose results the next turn brings; or it answers; or it has reached its limit."""

    TOOL = "tool"
    ANSWER = "answer"
    LENGTH = "length"
