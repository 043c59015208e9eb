"""Room for engines on machines: what is refused before a start, and what a start waits for. Nothing here loads Ray."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from quire.errors import InvalidInput, NoServer
from quire.fleet.config import FleetConfig

_PLACE_S = 600.0
"""Seconds that Serve may look for a machine, while nothing else changes."""

_UNPLACED = "to be scheduled"  # in what Serve says of a deployment


def refuse_unplaced(fleet: FleetConfig, number: int, machines: Sequence[Mapping[str, float]], where: str) -> None:
    """Raises InvalidInput unless so many engines have room on machines with these resources."""
    takes = {name: amount for name, amount in (("GPU", fleet.gpus), ("CPU", fleet.cpus)) if amount}
    places = [
        min((_times(each.get(name, 0), amount) for name, amount in takes.items()), default=number) for each in machines
    ]
    if sum(places) < number:
        units = {"GPU": "GPUs", "CPU": "CPU cores"}
        needed = " and ".join(f"{number * amount:g} {units[name]}" for name, amount in takes.items())
        raise InvalidInput(
            f"{number} engines need {needed}, and {where} has room for {sum(places)}.",
            fix="give fewer engines, or a smaller --num-gpus or --num-cpus: 0.5 for two on one GPU.",
        )


def _times(whole: float, part: float) -> int:
    return math.floor(whole / part + 1e-9)


class Waiting:
    """A start that waits for replicas."""

    def __init__(self, now: float) -> None:
        self._states = ""
        self._since = now

    def look(self, deployments: Mapping[str, Any], now: float) -> str:
        """What to say of Serve's deployments by name. Raises NoServer if it finds no machine for too long."""
        states = [
            f"{name}: " + ", ".join(f"{number} {state.lower()}" for state, number in each.replica_states.items())
            for name, each in deployments.items()
        ]
        pending = [name for name, each in deployments.items() if _UNPLACED in each.message]
        said = "; ".join((*states, *(f"no machine has room for {name}" for name in pending)))
        if said != self._states or not pending:
            self._states, self._since = said, now
        if now - self._since > _PLACE_S:
            why = " ".join(deployments[name].message for name in pending)
            raise NoServer(
                f"the fleet has found no machine for {_PLACE_S:g} s: {why}",
                fix="add machines, or give fewer engines; `ray status` says what is free.",
            )
        return said
