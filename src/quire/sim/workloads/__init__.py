"""Generated workloads, by name. Each is a function that fills a draft; its other arguments are settings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from quire.errors import InvalidInput
from quire.sim.trace_request import Planned
from quire.sim.workloads.conversations import agents, alternating, chat, sessions
from quire.sim.workloads.namespaces import noisy_neighbour, rl_groups, same_text_other_namespace
from quire.sim.workloads.prefixes import match_unit, mixed_prefixes, rag_scan
from quire.sim.workloads.pressure import abort_storm, fillers, fits, near_capacity, over_commit, two_loads
from quire.sim.workloads.workload import Draft

__all__ = ["WORKLOADS", "make_workload"]

_CONVERSATIONS = (chat, sessions, alternating, agents)
_PREFIXES = (rag_scan, mixed_prefixes, match_unit)
_PRESSURE = (over_commit, two_loads, near_capacity, abort_storm, fillers, fits)
_NAMESPACES = (rl_groups, same_text_other_namespace, noisy_neighbour)

WORKLOADS: dict[str, Callable[..., None]] = {
    make.__name__.replace("_", "-"): make for make in (*_CONVERSATIONS, *_PREFIXES, *_PRESSURE, *_NAMESPACES)
}
"""Name to function; its docstring says what the workload is."""


def make_workload(source: str, seed: int) -> Iterator[Planned]:
    """The requests of a workload: `name`, or `name:setting=value,setting=value`. The same source and seed give the same
    requests everywhere. Raises InvalidInput for a setting it does not have."""
    name, _, settings = source.partition(":")
    draft = Draft(name, seed)
    make = WORKLOADS[name]
    make(draft, **_settings(name, make, settings))
    return (request.planned() for request in draft.requests)


def _settings(name: str, make: Callable[..., None], settings: str) -> dict[str, float]:
    known = {key: each.default for key, each in inspect.signature(make).parameters.items() if key != "draft"}
    found: dict[str, float] = {}
    for setting in filter(None, settings.split(",")):
        key, _, value = setting.partition("=")
        if key not in known:
            raise InvalidInput(f"workload '{name}' has no setting '{key}'.", fix=_known(known))
        try:
            found[key] = type(known[key])(value)
        except ValueError:
            why = f"setting '{key}' of workload '{name}' is not a number such as {known[key]}: '{value}'."
            raise InvalidInput(why, fix=_known(known)) from None
        if not 0 < found[key] < 1e9:
            raise InvalidInput(f"setting '{key}' of workload '{name}' is {value}.", fix="use a number above 0.")
    return found


def _known(known: dict[str, Any]) -> str:
    return "it has " + ", ".join(f"{key}={value}" for key, value in known.items()) + "."
