"""Proof: what an engine checks and records while it serves, and what it does about what it finds.

    canary      damaged pages of the device: who read them is computed again, and their frames are set aside
    laws        a few comparisons after each step
    audit       the whole cache in pieces: while the engine is idle, and when it is asked for
    history     how full the pools are and were, and what held memory when it was short

A law that does not hold is a defect: the engine admits no more requests, those that run end, and /health fails.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quire.cache import KVCache
from quire.cache.statistics import count_frames
from quire.canary import Canary
from quire.canary.auditor import Audit, Auditor
from quire.canary.containment import Containment
from quire.canary.finding import Finding, Reports
from quire.canary.laws import broken_law
from quire.engine.config import EngineConfig
from quire.engine.messages import Later
from quire.engine.runner import ModelRunner
from quire.errors import EngineDead, StepFailed
from quire.observe.history import History
from quire.offload import offload_of
from quire.scheduler.request import Request
from quire.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

MOST_TRIES = 3
"""Times that a request is computed again before it fails: damage that comes back is no accident."""

AUDIT_S = 8.0
"""Seconds that the answer to a demanded audit waits until the audit has ended."""

_PIECE_S = 0.001  # of an audit beside steps
_IDLE_PIECE_S = 0.005
_IDLE_AFTER_S = 1.0
_MOST_HOLDERS = 16


def share_of(text: str) -> float:
    """The share of time of a valid `canary` setting: 0 for off, math.inf for all."""
    return {"off": 0.0, "all": math.inf}[text] if text in ("off", "all") else float(text.removesuffix("%")) / 100


class Proof:
    """Of one engine. Layers from `first_draft` on are those of drafts."""

    def __init__(
        self, config: EngineConfig, cache: KVCache, scheduler: Scheduler, runner: ModelRunner, first_draft: int
    ) -> None:
        self.reports = Reports(Path(config.canary_reports) if config.canary_reports is not None else None)
        self.history = History()
        self.violation = ""
        self.num_recomputed = 0
        self.canary: Canary | None = None
        if share := share_of(config.canary):
            layers = {layer for pool in runner.pools for field in pool.layout.fields for layer in field.layers}
            drafts = [layer for layer in layers if layer >= first_draft]
            self.canary = runner.canary = Canary(cache.parts, runner.pools, share=share, except_for=drafts)
        self._cache, self._scheduler = cache, scheduler
        self._containment = Containment(cache.parts)
        tiers = offload_of(cache).tiers
        self.auditor = Auditor(cache.parts, self._state, tiers.hosts if tiers is not None else ())
        self._asked = 0  # audits that were asked for and have not begun
        self._tries = Counter[str]()
        self._steps = 0
        self._preempted = 0
        self._busy_at = time.monotonic()

    # -- beside steps

    @property
    def is_due(self) -> bool:
        """Whether a step should be made although there is no work."""
        if self._asked or self.auditor.is_running or self.history.is_due:
            return True
        if self.canary is not None and self.canary.is_due:
            return True
        return time.monotonic() - self._busy_at >= _IDLE_AFTER_S and self.auditor.is_due

    def check_admits(self) -> None:
        """Raises EngineDead if a law is broken."""
        if self.violation:
            error = EngineDead("no request is admitted: a law is broken.", fix="restart the server; its log has more.")
            error.detail = self.violation
            raise error

    def admitted(self, requests: Sequence[Request]) -> None:
        """These requests begin with the step that is made."""
        self._steps += 1
        if self.canary is not None:
            for request in requests:
                if request.kv is not None:
                    self.canary.admitted(request.kv, request.tokens)

    def look(self, *, idle: bool) -> list[Finding]:
        """After a step: what the canary has found since. With `idle` the step had no work."""
        if not self.violation and (law := broken_law(self._cache.parts)):
            self._break([law])
        self._observe()
        self._audit(idle=idle)
        if self.canary is None:
            return []
        self._containment.go_on()
        scheduler = self._scheduler
        if scheduler.lacks_room and not scheduler.num_running and self._containment.release_oldest():
            logger.warning("a quarantined frame is used again: a request fits in no other way")
        return self.canary.look()

    def contain(self, findings: Sequence[Finding], fail: Callable[[Request, Exception], Any]) -> list[Any]:
        """Compute requests again that read damaged pages, and take these out of the cache. No step is in flight.
        Returns the results of `fail`, for requests that were tried often enough."""
        self._containment.add(findings)
        readers = self._containment.readers([finding.page for finding in findings])
        requests = [request for request in self._scheduler.requests if request.kv is not None and request.kv in readers]
        failed = []
        for finding in findings:
            finding.readers = [request.request_id for request in requests]
        for request in requests:
            self._tries[request.request_id] += 1
            self._scheduler.compute_again(request, "is computed again: cached pages that it read were damaged")
            if self._tries[request.request_id] > MOST_TRIES:
                error = StepFailed(
                    f"cached pages that it read were damaged {MOST_TRIES + 1} times.",
                    fix="send the request again; the server's log has the canary's reports.",
                )
                failed.append(fail(request, error))
            else:
                self.num_recomputed += 1
        known = {request.request_id for request in self._scheduler.requests}
        for name in self._tries.keys() - known:
            del self._tries[name]
        self._cache.sessions.end_readers(readers)
        self._containment.go_on()
        for finding in findings:
            self.reports.add(finding)
        return failed

    # -- audits

    def audit(self) -> Later[dict[str, Any]]:
        """Audit the cache from now on: the result of the first audit that began after this call, or how far it is."""
        self._asked += 1
        first = self.auditor.num_audits + (2 if self.auditor.is_running else 1)

        def poll(waits: bool) -> dict[str, Any] | None:
            done = self.auditor.num_audits >= first
            return self._told(done) if done or not waits else None

        return Later(poll=poll, until_s=time.monotonic() + AUDIT_S)

    def _told(self, done: bool) -> dict[str, Any]:
        found = self.auditor.last if done else self.auditor.now
        return {
            "ended": done,
            **asdict(found if found is not None else Audit()),
            "violation": self.violation,
            "audits": self.auditor.num_audits,
            "whole_audits": self.auditor.num_whole,
            "canary": self._canary_statistics(),
            "findings": self.reports.to_dicts(),
        }

    def _audit(self, *, idle: bool) -> None:
        if not idle:
            self._busy_at = time.monotonic()
        rests = idle and time.monotonic() - self._busy_at >= _IDLE_AFTER_S
        if not self._asked and not self.auditor.is_running and not (rests and self.auditor.is_due):
            return
        done = self.auditor.advance(_IDLE_PIECE_S if idle else _PIECE_S)
        if done is not None:
            self._asked = 0
            if done.faults:
                self._break(done.faults)

    def _state(self) -> Hashable:
        cache = self._cache
        return (
            *(cache.num_changes, cache.tree.version, cache.pages.num_free_pages, cache.tree.num_pages),
            *(
                len(cache.rows.live),
                len(cache.fences.waiting),
                int(cache.rows.num_allocated.sum()),
                self.num_recomputed,
            ),
        )

    def _break(self, faults: Sequence[str]) -> None:
        """A law does not hold: admit no more requests, and keep what shows it."""
        if not self.violation:
            self.violation = f"an invariant of the cache is broken: {faults[0]}"
            logger.critical("%s; no request is admitted from now on", self.violation)
            evidence = {
                "faults": list(faults),
                "steps": self._steps,
                **self._holders(),
                "history": self.history.to_dict(),
            }
            self.reports.keep("violation", evidence)

    # -- history

    def _observe(self) -> None:
        history, scheduler = self.history, self._scheduler
        for group in self._cache.groups:
            history.mark("device", group.name, "used", group.num_frames - group.num_free - group.num_evictable)
        preempted, self._preempted = self._preempted, scheduler.num_preemptions
        if scheduler.num_preemptions > preempted:
            history.short(f"{scheduler.num_preemptions - preempted} requests were preempted", self._holders)
        elif scheduler.lacks_room:
            history.short(scheduler.waiting[0].wait_reason, self._holders)
        if history.is_due:
            tiers = offload_of(self._cache).tiers
            waiting = self._cache.fences.waiting
            found = {"device": {group.name: _states(count_frames(group, waiting)) for group in self._cache.groups}}
            if tiers is not None:
                found["host"] = tiers.statistics()["host"]
            history.sample(found, {"running": scheduler.num_running, "waiting": len(scheduler.waiting)})

    def _holders(self) -> dict[str, Any]:
        """What holds memory now: requests with most pages first, other holds, and what nothing holds."""
        rows, tree = self._cache.rows, self._cache.tree
        live = sorted(rows.live.values(), key=lambda kv: -rows.allocated(kv))
        held = [
            {
                "request": kv.label,
                "pages": len(rows.page_ids(kv)),
                "cached_pages": kv.lease.num_pages,
                "tokens": rows.committed(kv),
                "session": kv.is_held,
            }
            for kv in live[:_MOST_HOLDERS]
        ]
        retention = offload_of(self._cache).retention
        return {
            "requests": held,
            "num_requests": len(live) - self._cache.sessions.num_held,
            "num_sessions": self._cache.sessions.num_held,
            "holds": self._cache.parts.holds.summary(retention.num_pinned),
            "retained_pages": retention.num_pages,
            "evictable_pages": tree.num_evictable,
            "free_pages": self._cache.pages.num_free_pages,
            "frames": {
                group.name: _states(count_frames(group, self._cache.fences.waiting)) for group in self._cache.groups
            },
        }

    def statistics(self) -> dict[str, Any]:
        """Counters and gauges: of the `canary`, None without one; a `violation`, "" for none; the `highest` marks."""
        return {
            "canary": self._canary_statistics(),
            "violation": self.violation,
            "audits": self.auditor.num_audits,
            "whole_audits": self.auditor.num_whole,
            "highest": self.history.highest(),
            "shortages": self.history.num_shortages,
        }

    def _canary_statistics(self) -> dict[str, Any] | None:
        if self.canary is None:
            return None
        quarantined = self._containment.num_quarantined
        return {
            **self.canary.statistics(),
            "quarantined_frames": quarantined,
            "recomputed_requests": self.num_recomputed,
        }


def _states(counts: Any) -> dict[str, int]:
    return {
        state: getattr(counts, state) for state in ("free", "private", "cached", "evictable", "moving", "quarantined")
    }
