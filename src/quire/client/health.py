"""Health: whether requests can progress, and if not, why not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHealth:
    """Whether requests can progress; if not, why not. `stuck` is what does not work meanwhile: lanes between tiers, the
    store and peers, without which requests are answered, and memory that is released: they wait. The `detail` is the
    operator's: it may name requests."""

    healthy: bool
    reason: str = ""
    detail: str = ""
    stuck: tuple[str, ...] = ()

    def to_dict(self, *, for_operator: bool) -> dict[str, Any]:
        """The body of an answer. Others than the operator get no detail, and of what is stuck no more than its name."""
        if not self.healthy:
            detail = f" {self.detail}" if for_operator and self.detail else ""
            return {"status": "unhealthy", "reason": self.reason + detail}
        if not self.stuck:
            return {"status": "ok"}
        told = self.stuck if for_operator else tuple(each.partition(":")[0] for each in self.stuck)
        return {"status": "degraded", "stuck": list(told)}


def is_released(statistics: dict[str, Any]) -> bool:
    """Whether an operator has taken the KV memory, so that all requests wait."""
    return statistics.get("kv_asked_bytes") == 0


def stuck(statistics: dict[str, Any]) -> Iterator[str]:
    """What does not work, by the last heartbeat, and why."""
    tiers, transfer = statistics.get("tiers") or {}, statistics.get("transfer") or {}
    if is_released(statistics):
        yield "memory: it is released, and all requests wait until it is resumed"
    for lane, seconds in tiers.get("stuck", {}).items():
        yield f"lane {lane}: something is in flight, and nothing has ended for {seconds:.0f} s"
    for kind in tiers.get("store_lost", ()):
        yield f"store: it answers no {kind}"
    for peer, problem in transfer.get("problems", {}).items():
        yield f"peer {peer}: {problem}"
    for name, problem in transfer.get("failed_threads", {}).items():
        yield f"transfer {name}: its thread has failed: {problem}"
    if problem := (statistics.get("kv_events") or {}).get("problem"):
        yield f"events of the cache: {problem}"
