"""Parts of a loop that check and record memory while it serves.

    HistoryPart    how full the pools are and were, and what held memory when it was short
    AuditPart      laws after each step; the whole cache in pieces, while the engine is idle and when it is asked for
    CanaryPart     damaged pages of the device: their readers are computed again, and their frames are set aside

A law that does not hold is a defect: the loop admits no more requests, those that run end, and /health fails.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from quire.cache import KVCache
from quire.cache.audit import Audit, Auditor, broken_law
from quire.cache.statistics import count_frames
from quire.canary.canary import Canary
from quire.canary.containment import Containment
from quire.canary.finding import Finding, Reports
from quire.counters import Section, counter, gauge, statistics_of
from quire.errors import EngineDead, StepFailed
from quire.loop import End, ForwardPart, Loop, Part
from quire.observe.history import History, Occupancy
from quire.offload import offload_of
from quire.scheduler.request import Request
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.step import Step

logger = logging.getLogger(__name__)

MOST_TRIES = 3
"""Times that a request is computed again before it fails: damage that comes back is no accident."""

_PIECE_S = 0.001  # a slice of an audit beside steps
_IDLE_PIECE_S = 0.005
_IDLE_AFTER_S = 1.0
_MOST_HOLDERS = 16
_STATES = ("free", "private", "cached", "evictable", "moving", "quarantined", "released")


@dataclass(frozen=True, kw_only=True)
class HistoryCounters:
    """The `highest` marks, with their times, and shortages."""

    highest: list[dict[str, Any]]
    highest_frames: dict[tuple[str, str, str], int] = gauge(
        'The most frames of a group in a tier that were in a state at once; "used" ones cannot be evicted.',
        "tier",
        "group",
        "state",
        start=dict,
        name="frames_highest",
    )
    shortages: int = counter("Steps after which memory was short: a request waited for pages, or was preempted.")


class HistoryPart(Part):
    """The history of one cache. `lower` has the frames of lower tiers, by tier."""

    def __init__(self, cache: KVCache, scheduler: Scheduler, lower: Callable[[], Occupancy] = dict) -> None:
        self.history = History()
        self._cache, self._scheduler, self._lower = cache, scheduler, lower
        self._preempted = 0

    @property
    def is_due(self) -> bool:
        return self.history.is_due

    def after_step(self, *, idle: bool) -> None:
        history, scheduler = self.history, self._scheduler
        for group in self._cache.groups:
            history.mark("device", group.name, "used", group.num_held)
        preempted, self._preempted = self._preempted, scheduler.num_preemptions
        if scheduler.num_preemptions > preempted:
            history.short(f"{scheduler.num_preemptions - preempted} requests were preempted", self.holders)
        elif scheduler.lacks_room:
            history.short(scheduler.waiting[0].wait_reason, self.holders)
        if history.is_due:
            requests = {"running": scheduler.num_running, "waiting": len(scheduler.waiting)}
            history.sample({"device": self._frames(), **self._lower()}, requests)

    def holders(self) -> dict[str, Any]:
        """What holds memory now: requests with most pages first, other holds, and what nothing holds."""
        cache, rows, tree = self._cache, self._cache.rows, self._cache.tree
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
        retention = offload_of(cache).retention
        return {
            "requests": held,
            "num_requests": len(live) - cache.sessions.num_held,
            "num_sessions": cache.sessions.num_held,
            "holds": cache.parts.holds.summary(retention.num_pinned),
            "retained_pages": retention.num_pages,
            "evictable_pages": tree.num_evictable,
            "free_pages": cache.pages.num_free_pages,
            "frames": self._frames(),
        }

    def _frames(self) -> Mapping[str, Mapping[str, int]]:
        waiting = self._cache.fences.waiting
        counts = {group.name: count_frames(group, waiting) for group in self._cache.groups}
        return {name: {state: getattr(each, state) for state in _STATES} for name, each in counts.items()}

    def counters(self) -> list[Section]:
        history = self.history
        counted = HistoryCounters(
            highest=history.highest(), highest_frames=dict(history.marks), shortages=history.num_shortages
        )
        return [("", counted)]


@dataclass(frozen=True, kw_only=True)
class AuditCounters:
    """Audits, and the `violation` that one has found, "" for none."""

    violation: str = gauge("1 after an invariant of the cache was broken.", start="", name="invariant_broken")
    audits: int = counter("Audits of the whole cache, in pieces beside steps.")
    whole_audits: int = counter("Of these, audits during which nothing changed, so that lost pages would have shown.")


class AuditPart(Part):
    """Laws and audits of one cache."""

    def __init__(self, cache: KVCache, history: HistoryPart, reports: Reports) -> None:
        self.auditor = Auditor(cache.parts, self._state)
        self.violation = ""
        self.reports = reports
        self.beside: Sequence[Part] = ()
        """Parts whose counters an answer to `demand` has too."""
        self._cache, self._history = cache, history
        self._loop: Loop | None = None
        self._demands = 0  # audits that were asked for and have not begun
        self._num_ends = 0
        self._busy_at = time.monotonic()

    def attach(self, loop: Loop) -> None:
        self._loop = loop

    @property
    def is_due(self) -> bool:
        if self._demands or self.auditor.is_running:
            return True
        return time.monotonic() - self._busy_at >= _IDLE_AFTER_S and self.auditor.is_due

    def after_step(self, *, idle: bool) -> None:
        if not self.violation and (law := broken_law(self._cache.parts)):
            self._break([law])
        if not idle:
            self._busy_at = time.monotonic()
        rests = idle and time.monotonic() - self._busy_at >= _IDLE_AFTER_S
        if not self._demands and not self.auditor.is_running and not (rests and self.auditor.is_due):
            return
        done = self.auditor.advance(_IDLE_PIECE_S if idle else _PIECE_S)
        if done is not None:
            self._demands = 0
            if done.faults:
                self._break(done.faults)

    def ended(self, request: Request, end: End, error: Exception | None) -> None:
        self._num_ends += 1

    def demand(self) -> Callable[[bool], dict[str, Any] | None]:
        """Audit the cache from now on. Returns a function: the result of the first audit that began after this call. If
        its argument is True it returns None until that audit has ended, else how far it is."""
        self._demands += 1
        first = self.auditor.num_audits + (2 if self.auditor.is_running else 1)

        def poll(waits: bool) -> dict[str, Any] | None:
            done = self.auditor.num_audits >= first
            return self._answer(done) if done or not waits else None

        return poll

    def _answer(self, done: bool) -> dict[str, Any]:
        found = self.auditor.last if done else self.auditor.now
        answer = {
            "ended": done,
            **asdict(found if found is not None else Audit()),
            "findings": self.reports.to_dicts(),
        }
        return answer | statistics_of(section for part in (self, *self.beside) for section in part.counters())

    def _state(self) -> Hashable:
        """Changes with each edit of the cache, and with holds: transfers begin and end while nothing runs."""
        cache, tree = self._cache, self._cache.tree
        return (
            *(cache.num_changes, tree.version, cache.pages.num_free_pages, tree.num_pages, tree.num_below),
            *(tree.num_releases, tree.num_protected, tree.num_shared),
            *(len(cache.rows.live), len(cache.fences.waiting), int(cache.rows.num_allocated.sum()), self._num_ends),
        )

    def _break(self, faults: Sequence[str]) -> None:
        """A law does not hold: admit no more requests, and keep what shows it."""
        if self.violation:
            return
        self.violation = f"an invariant of the cache is broken: {faults[0]}"
        logger.critical("%s; no request is admitted from now on", self.violation)
        assert self._loop is not None
        error = EngineDead("no request is admitted: a law is broken.", fix="restart the server; its log has more.")
        error.detail = self.violation
        self._loop.halt(error)
        evidence = {
            "faults": list(faults),
            "steps": self._loop.num_steps,
            **self._history.holders(),
            "history": self._history.history.to_dict(),
        }
        self.reports.keep("violation", evidence)

    def counters(self) -> list[Section]:
        audits = self.auditor
        return [("", AuditCounters(violation=self.violation, audits=audits.num_audits, whole_audits=audits.num_whole))]


class CanaryPart(Part, ForwardPart):
    """The canary of one cache, and what is done about its findings."""

    def __init__(self, canary: Canary, cache: KVCache, scheduler: Scheduler, reports: Reports) -> None:
        self.canary = canary
        self.reports = reports
        self.num_recomputed = 0
        self._cache, self._scheduler = cache, scheduler
        self._containment = Containment(cache.parts)
        self._tries = Counter[str]()
        self._loop: Loop | None = None

    def attach(self, loop: Loop) -> None:
        self._loop = loop

    @property
    def is_due(self) -> bool:
        return self.canary.is_due

    def scheduled(self, step: Step) -> None:
        for request in step.admitted:
            if request.kv is not None:
                self.canary.admitted(request.kv, request.tokens)

    def before_forward(self, step: Step, running: Any) -> None:
        new = () if step.is_decode else step.requests
        self.canary.launched(step.positions, step.batch.serials, step.counts, new, running.batches)

    def moved(self, step: Step, batches: Sequence[Any], sources: Any, targets: Any) -> None:
        for group, batch in enumerate(batches):
            self.canary.moved(group, batch.slots[sources], batch.slots[targets])

    def after_step(self, *, idle: bool) -> None:
        self._containment.go_on()
        scheduler, waits = self._scheduler, self._cache.resizing.is_shrinking  # then no frame is short for good
        if scheduler.lacks_room and not scheduler.num_running and not waits and self._containment.release_oldest():
            logger.warning("a quarantined frame is used again: a request fits in no other way")
        if findings := self.canary.look():
            assert self._loop is not None
            self._loop.drain()
            self._contain(findings, self._loop)

    def _contain(self, findings: Sequence[Finding], loop: Loop) -> None:
        """Compute requests again that read damaged pages, and take these out of the cache. Those that were tried often
        enough fail. No step is in flight."""
        self._containment.add(findings)
        readers = self._containment.readers([finding.page for finding in findings])
        requests = [request for request in self._scheduler.requests if request.kv is not None and request.kv in readers]
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
                loop.fail(request, error)
            else:
                self.num_recomputed += 1
        self._cache.sessions.end_readers(readers)
        self._containment.go_on()
        for finding in findings:
            self.reports.add(finding)

    def ended(self, request: Request, end: End, error: Exception | None) -> None:
        self._tries.pop(request.request_id, None)

    def counters(self) -> list[Section]:
        quarantined, recomputed = self._containment.num_quarantined, self.num_recomputed
        counted = replace(self.canary.counters(), quarantined_frames=quarantined, recomputed_requests=recomputed)
        return [("canary", counted)]
