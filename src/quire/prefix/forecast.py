"""Forecast: when a policy expects a path to be used again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Forecast:
    """`kind` says in words what the policy takes a path for. `chance` is that of a use within nine hours, and half of
    such uses come within `seconds` from now."""

    kind: str
    chance: float
    seconds: float
