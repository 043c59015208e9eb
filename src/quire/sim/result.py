"""ReplayResult: what a replay did, request by request and in sum."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from quire.observe.explain import Cause, Explanation
from quire.sim.occupancy import Occupancy
from quire.sim.scripted_request import ScriptedRequest
from quire.sim.tiers import TierUse


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request of a replay. Times are seconds of the virtual clock, None for what never came; `refused` says why it
    could never run, "" where it could. `evicted_pages` are those that the cache had evicted when it ended.
    `explanation` is that of its first admission, where the replay explains."""

    request_id: str
    prompt_tokens: int
    output_tokens: int
    hit_tokens: int
    preemptions: int
    evicted_pages: int
    end: str
    arrived: float
    admitted: float | None = None
    first_token: float | None = None
    finished: float | None = None
    refused: str = ""
    explanation: Explanation | None = None


@dataclass(slots=True)
class Ledger:
    """Collects records and the digest of a replay while it goes on."""

    records: list[RequestRecord] = field(default_factory=list)
    _digest: hashlib._Hash = field(default_factory=hashlib.sha256)

    def end(self, request: ScriptedRequest, evicted_pages: int) -> None:
        """A request has finished or was aborted."""
        record = RequestRecord(
            request_id=request.request_id,
            prompt_tokens=request.num_prompt_tokens,
            output_tokens=request.num_outputs,
            hit_tokens=max(0, request.num_cached),
            preemptions=request.num_preemptions,
            evicted_pages=evicted_pages,
            end=request.finish_reason or "",
            arrived=request.arrived,
            admitted=request.admitted,
            first_token=request.first_token,
            finished=request.finished,
            explanation=request.explanation,
        )
        self._add(record, request.output_tokens.tobytes())

    def refuse(self, request_id: str, prompt_tokens: int, evicted_pages: int, now: float, reason: str) -> None:
        """A request was refused when it came."""
        self._add(
            RequestRecord(
                request_id=request_id,
                prompt_tokens=prompt_tokens,
                output_tokens=0,
                hit_tokens=0,
                preemptions=0,
                evicted_pages=evicted_pages,
                end="refused",
                arrived=now,
                refused=reason,
            ),
            b"",
        )

    def digest(self, *totals: int) -> str:
        """Hex digest of all requests in the order of their ends, and of these totals."""
        found = self._digest.copy()
        found.update(repr(totals).encode())
        return found.hexdigest()

    def _add(self, record: RequestRecord, output: bytes) -> None:
        self.records.append(record)
        numbers = (record.hit_tokens, record.preemptions, record.evicted_pages, record.output_tokens)
        self._digest.update(f"{record.request_id!r} {record.end} {numbers}".encode())
        self._digest.update(output)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """A replay. `seconds` are virtual ones.

    `prompt_tokens` are those of all requests that could run, `refused_tokens` those of them whose request the pool can
    never hold: they count, and hit nothing. Requests whose client left before they ran count in neither.

    `manager_seconds` is the CPU time inside the scheduler and the cache, `wall_seconds` that of the whole replay on the
    clock. `digest` is equal for two replays that hit, evicted, preempted and drew the same, request by request.
    """

    policy: str
    page_size: int
    pool_tokens: int
    records: tuple[RequestRecord, ...]
    prompt_tokens: int
    refused_tokens: int
    hit_tokens: int
    evicted_tokens: int
    preemptions: int
    steps: int
    seconds: float
    manager_seconds: float
    wall_seconds: float
    digest: str
    checked: str
    occupancy: tuple[Occupancy, ...]
    tiers: TierUse | None = None
    """What the tiers below the device did, where there are any."""
    pool_note: str = ""
    """Why the pool has another size than was asked for, where it has."""

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that were found cached."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def tokens_by_cause(self) -> dict[str, int]:
        """What became of the prompt tokens, where the replay explained: with `refused_tokens` these are all."""
        found = dict.fromkeys(map(str, Cause), 0)
        for record in self.records:
            if record.explanation is not None:
                for reason in record.explanation.reasons:
                    found[reason.cause] += reason.tokens
        return found

    def count(self, end: str) -> int:
        """Requests that ended so: "length", "abort" or "refused"."""
        return sum(record.end == end for record in self.records)

    @property
    def output_tokens(self) -> int:
        """Tokens drawn for requests, those of aborted ones among them."""
        return sum(record.output_tokens for record in self.records)

    def first_token_seconds(self, percentiles: Sequence[float]) -> list[float]:
        """Percentiles of the time from a request's arrival to its first token; zeros where there was none."""
        found = [r.first_token - r.arrived for r in self.records if r.first_token is not None]
        return [float(value) for value in np.percentile(found, percentiles)] if found else [0.0] * len(percentiles)

    @property
    def mean_first_token_seconds(self) -> float:
        """The mean of the same; zero where there was none."""
        found = [r.first_token - r.arrived for r in self.records if r.first_token is not None]
        return sum(found) / len(found) if found else 0.0

    @property
    def output_rate(self) -> float:
        """Output tokens for each virtual second."""
        return self.output_tokens / self.seconds if self.seconds else 0.0
