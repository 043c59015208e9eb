"""A replay that explains, as `quire explain` tells of it: one request, or all of them in sum."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from rich.table import Table
from rich.text import Text

from quire.cli.explain_table import causes_table, reasons_table, sequence_heading
from quire.errors import InvalidInput
from quire.observe.explain import Cause, Explanation
from quire.plan.budget import counted
from quire.sim.result import ReplayResult, RequestRecord
from quire.sim.trace_request import Trace

_MOST_LISTED = 10
_LOSSES = (Cause.EVICTED.value, Cause.GROUP.value, Cause.NAMESPACE.value)
"""Causes of tokens that a cache with more room, or without namespaces, would have hit."""


@dataclass(frozen=True, slots=True)
class Explained:
    """A trace and what its replay on the pools of `model` explained."""

    trace: Trace
    model: str
    result: ReplayResult

    def request(self, request_id: str) -> dict[str, Any]:
        """One request for machines. Raises InvalidInput for one that is not in the trace or was never admitted."""
        record, explanation = self._record(request_id)
        times = {"arrived": record.arrived, "admitted": record.admitted, "preemptions": record.preemptions}
        return self._setting() | {"request_id": request_id, "end": record.end} | times | explanation.to_dict()

    def summary(self) -> dict[str, Any]:
        """All requests for machines."""
        result = self.result
        totals = {
            "requests": len(result.records),
            "prompt_tokens": result.prompt_tokens,
            "hit_tokens": result.hit_tokens,
            "refused_tokens": result.refused_tokens,
            "tokens_by_cause": result.tokens_by_cause(),
            "tokens_by_group_detail": dict(self._tokens_by_group_detail()),
        }
        most = [
            {
                "request_id": record.request_id,
                "prompt_tokens": record.prompt_tokens,
                "hit_tokens": record.hit_tokens,
                "lost_tokens": sum(lost.values()),
                "lost_by_cause": dict(lost),
            }
            for record, lost in self._most_lost()
        ]
        return self._setting() | totals | {"most_lost": most}

    def request_tables(self, request_id: str) -> Iterator[Text | Table]:
        """One request for people. Raises as `request`."""
        record, explanation = self._record(request_id)
        yield self._heading()
        found = explanation.to_dict()
        yield sequence_heading(request_id, found)
        yield reasons_table(found)
        if record.preemptions:
            yield Text("\nThis is of its first admission; it was preempted and came back.", style="yellow")

    def summary_tables(self) -> Iterator[Text | Table]:
        """All requests for people."""
        yield self._heading()
        causes = self.result.tokens_by_cause()
        if self.result.refused_tokens:
            causes["refused"] = self.result.refused_tokens
        yield causes_table(causes)
        details = self._tokens_by_group_detail()
        if details:
            yield Text("")
        for detail, tokens in details.items():
            yield Text(f"{detail}: {counted(tokens, 'token')}.")
        most = self._most_lost()
        if not most:
            return
        yield Text("\nRequests that lost most of what had been cached:\n")
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
        table.add_column("request", overflow="fold")
        lost_to = [cause for cause in _LOSSES if causes[cause]]
        for name in ("prompt", "hit", *lost_to):
            table.add_column(name, justify="right", no_wrap=True)
        for record, lost in most:
            counts = (record.prompt_tokens, record.hit_tokens, *(lost[cause] for cause in lost_to))
            table.add_row(record.request_id, *(f"{count:,}" for count in counts))
        yield table

    def _setting(self) -> dict[str, Any]:
        result = self.result
        return {
            "trace": self.trace.name,
            "model": self.model,
            "policy": result.policy,
            "page_size": result.page_size,
            "pool_tokens": result.pool_tokens,
            "pool_note": result.pool_note,
        }

    def _heading(self) -> Text:
        result = self.result
        note = f"{result.pool_note}\n" if result.pool_note else ""
        return Text(
            f"{self.trace.source}: {counted(len(result.records), 'request')}. {self.model}, {result.policy}, "
            f"pages of {result.page_size}, {result.pool_tokens:,} tokens.\n{note}"
        )

    def _record(self, request_id: str) -> tuple[RequestRecord, Explanation]:
        records = {record.request_id: record for record in self.result.records}
        record = records.get(request_id)
        if record is None:
            near = get_close_matches(request_id, records, _MOST_LISTED, cutoff=0.0)
            raise InvalidInput(
                f"'{self.trace.name}' has no request '{request_id}' among {len(records):,}.",
                fix=f"name one of them, such as {', '.join(near[:3])}.",
            )
        if record.explanation is None:
            why = record.refused or "its client left while it waited."
            raise InvalidInput(
                f"request '{request_id}' was never admitted: {why}", fix="name another, or a larger pool."
            )
        return record, record.explanation

    def _most_lost(self) -> list[tuple[RequestRecord, Counter[str]]]:
        """The requests that lost most of what had been cached, and to what."""
        found: list[tuple[RequestRecord, Counter[str]]] = []
        for record in self.result.records:
            lost: Counter[str] = Counter()
            for reason in record.explanation.reasons if record.explanation is not None else ():
                if reason.cause in _LOSSES:
                    lost[reason.cause.value] += reason.tokens
            if lost:
                found.append((record, lost))
        return sorted(found, key=lambda entry: -entry[1].total())[:_MOST_LISTED]

    def _tokens_by_group_detail(self) -> Counter[str]:
        """Tokens that each group of layers cost, by what is said of it."""
        found: Counter[str] = Counter()
        for record in self.result.records:
            for reason in record.explanation.reasons if record.explanation is not None else ():
                if reason.cause is Cause.GROUP:
                    found[reason.detail] += reason.tokens
        return found
