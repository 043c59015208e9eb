"""Replays of several engines on one virtual time: some compute prompts for the others, or all of them do everything.

Requests go to the engine that has their session, else to the one with the fewest requests.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from quire.plan.budget import MemoryPlan
from quire.plan.step_cost import CostModel
from quire.sim.arrivals import Arrivals, Inbox
from quire.sim.peers import DecodePeers, PrefillEngine, Wires
from quire.sim.replay import Replay, ReplaySettings
from quire.sim.result import first_token_times, percentiles
from quire.sim.scripts import ScriptedRequest
from quire.sim.settings import SimulatedLink
from quire.sim.speculation import drafts_of
from quire.sim.together import turns
from quire.sim.trace_request import TraceRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class RolesResult:
    """What requests saw of these engines. Seconds are virtual ones. `hit_tokens` of the prompts were cached at the
    engine that answers; `received_tokens` were computed by a prefill engine. All engines computed `computed_tokens`,
    some twice where pages did not arrive, or a prefill engine lacked a prefix. `fallbacks` are prompts that a decode
    engine computed after all, by cause. `ttft_s` and `itl_s`: percentiles 50, 95 and 99 of the time to the first token,
    and between two steps that gave a request tokens: one each, or with speculation several. `speculation` has the
    drafts of the engines that answer, as `Speculator.statistics`; None without."""

    name: str
    prefill: int
    decode: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    hit_tokens: int
    computed_tokens: int
    received_tokens: int
    received_bytes: int
    asks: int
    fallbacks: dict[str, int]
    ttft_s: tuple[float, ...]
    itl_s: tuple[float, ...]
    seconds: float
    output_tokens_per_s: float
    speculation: dict[str, Any] | None
    digest: str

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that were cached at the engine that answers."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def computed_rate(self) -> float:
        """Computed tokens for each prompt token."""
        return self.computed_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self) | {"hit_rate": self.hit_rate, "computed_rate": self.computed_rate}


class Roles:
    """`num_prefill` engines compute prompts for `num_decode` others; without the first, these do everything. All have
    the same plan, costs and settings, with tiers. Used once."""

    def __init__(
        self,
        plan: MemoryPlan,
        cost: CostModel,
        settings: ReplaySettings,
        link: SimulatedLink,
        *,
        num_prefill: int,
        num_decode: int,
        progress: Callable[[int], None] = lambda ended: None,
    ) -> None:
        assert settings.tiers is not None, "pages travel between host memories"
        self._progress = progress
        self._num_ended = 0
        self._arrivals = Arrivals(())
        self._sessions: dict[str, int] = {}
        if num_prefill:  # engines with a role save and load always
            settings = replace(settings, tiers=settings.tiers.changed(load="always"))
        wires = Wires(link)
        self._servers = [PrefillEngine(f"prefill-{at}", wires) for at in range(num_prefill)]
        self._prefill = [Replay(plan, cost, settings) for _ in self._servers]
        for replay, server in zip(self._prefill, self._servers, strict=True):
            replay.begin(server)
            server.start(replay)
        self._inboxes = [Inbox[ScriptedRequest](self._ended) for _ in range(num_decode)]
        self._peers: list[DecodePeers] = []
        self._decode: list[Replay] = []
        for at, inbox in enumerate(self._inboxes):
            if num_prefill:
                peers = DecodePeers(f"decode-{at}", wires, self._servers)
                replay = Replay(plan, cost, settings, peers=peers, events=[peers.next_event])
                peers.start(replay)
                self._peers.append(peers)
            else:
                replay = Replay(plan, cost, settings)
            replay.begin(inbox)
            self._decode.append(replay)

    def run(self, trace: Iterable[TraceRequest]) -> RolesResult:
        """Replay until every request has ended. Raises WrongContent or AuditFailure if a check fails."""
        self._arrivals = Arrivals(trace)
        engines, answering = [*self._prefill, *self._decode], range(len(self._decode))
        for at in turns(engines, self._arrivals, self._route, lambda: not any(map(self._num_requests, answering))):
            if at < len(self._servers) and not engines[at].loop.is_busy:
                self._servers[at].serve()  # pages that were saved in an idle turn; other turns begin with it
        return self._result()

    def _route(self, request: ScriptedRequest) -> None:
        at = self._sessions.get(request.session)
        if at is None:
            counts = list(map(self._num_requests, range(len(self._decode))))
            at = counts.index(min(counts))
        if request.session:
            self._sessions[request.session] = at
        self._inboxes[at].push(request.arrived, request)

    def _num_requests(self, at: int) -> int:
        """Requests of a decode engine that wait, run or are on their way."""
        return len(self._inboxes[at]) + self._decode[at].scheduler.num_requests

    def _ended(self, request_id: str, now: float) -> None:
        self._arrivals.ended(request_id, now)
        self._num_ended += 1
        self._progress(self._num_ended)

    def _result(self) -> RolesResult:
        results = [engine.result() for engine in self._decode]
        behind = [engine.result() for engine in self._prefill]
        records = [record for result in results for record in result.records]
        prompt_tokens = sum(result.prompt_tokens for result in results)
        computed = sum(result.prompt_tokens - result.hit_tokens for result in (*results, *behind))
        hits = sum(result.hit_tokens for result in results)
        peer_hits = sum(peers.num_hits for peers in self._peers)
        fallbacks: Counter[str] = Counter()
        for peers in self._peers:
            fallbacks.update(peers.fallbacks)
        received = [peers.side.counts.totals() for peers in self._peers]
        seconds = max((record.finished or 0.0 for record in records), default=0.0)
        output_tokens = sum(record.output_tokens for record in records)
        digest = hashlib.sha256("".join(result.digest for result in (*results, *behind)).encode())
        gaps = np.concatenate([engine.recorder.gaps.all() for engine in self._decode])
        ttft, itl = percentiles(first_token_times(records)), percentiles(gaps)
        digest.update(repr((ttft, itl, sorted(fallbacks.items()))).encode())
        num_prefill, num_decode = len(self._prefill), len(self._decode)
        name = f"{num_prefill} prefill, {num_decode} decode" if num_prefill else f"{num_decode} engines"
        return RolesResult(
            name=name,
            prefill=num_prefill,
            decode=num_decode,
            requests=len(records),
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            hit_tokens=hits - peer_hits,
            computed_tokens=computed,
            received_tokens=sum(counts["received_tokens"] for counts in received),
            received_bytes=sum(counts["received_bytes"] for counts in received),
            asks=sum(counts["asks"] for counts in received),
            fallbacks=dict(fallbacks),
            ttft_s=ttft,
            itl_s=itl,
            seconds=seconds,
            output_tokens_per_s=output_tokens / seconds if seconds else 0.0,
            speculation=drafts_of(results),
            digest=digest.hexdigest(),
        )
