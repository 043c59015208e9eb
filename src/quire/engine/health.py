"""Health: whether requests can progress, and if not, why not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Whether requests can progress; if not, why not. `stuck` is what does not work meanwhile: lanes between tiers, the
    store, peers. Requests are answered without them."""

    healthy: bool
    reason: str = ""
    stuck: tuple[str, ...] = ()


def stuck(statistics: dict[str, Any]) -> Iterator[str]:
    """What does not work, by the last heartbeat, and why."""
    tiers, transfer = statistics.get("tiers") or {}, statistics.get("transfer") or {}
    for lane, seconds in tiers.get("stuck", {}).items():
        yield f"lane {lane}: something is in flight, and nothing has ended for {seconds:.0f} s"
    for kind in tiers.get("store_lost", ()):
        yield f"store: it answers no {kind}"
    for peer, problem in transfer.get("problems", {}).items():
        yield f"peer {peer}: {problem}"
