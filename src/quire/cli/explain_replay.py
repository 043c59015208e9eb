"""A replay with explanations, as `quire explain` reports it: one request, or all of them in sum."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from quire.cli.explain import causes_picture, causes_table, reasons_table, sequence_heading, strip_picture
from quire.cli.report import Report, plain_table
from quire.errors import InvalidInput
from quire.observe.explain import Cause, Reason
from quire.plan.budget import counted
from quire.sim.result import ReplayResult, RequestRecord
from quire.sim.trace_request import Trace

_MOST_LISTED = 10
_LOSSES = (Cause.EVICTED.value, Cause.GROUP.value, Cause.NAMESPACE.value)
"""Causes of tokens that a cache with more room, or without namespaces, would have hit."""


def request_report(trace: Trace, result: ReplayResult, request_id: str) -> Report:
    """One request. Raises InvalidInput for one that is not in the trace or was never admitted."""
    records = {record.request_id: record for record in result.records}
    record = records.get(request_id)
    if record is None:
        near = get_close_matches(request_id, records, 3, cutoff=0.0)
        raise InvalidInput(
            f"'{trace.name}' has no request '{request_id}' among {len(records):,}.",
            fix=f"name one of them, such as {', '.join(near)}.",
        )
    if record.explanation is None:
        why = record.refused or "its client left while it waited."
        raise InvalidInput(f"request '{request_id}' was never admitted: {why}", fix="name another, or a larger pool.")
    times = {"arrived": record.arrived, "admitted": record.admitted, "preemptions": record.preemptions}
    found = {"request_id": request_id, "end": record.end} | times | record.explanation.to_dict()

    def shown() -> Iterator[RenderableType]:
        yield _heading(trace, result)
        yield sequence_heading(request_id, found)
        yield reasons_table(found)
        if record.preemptions:
            yield Text("\nThis is of its first admission; it was preempted and came back.", style="yellow")

    return Report(_setting(trace, result) | found, shown, pictures=lambda: [strip_picture(found, result.page_size)])


def summary_report(trace: Trace, result: ReplayResult) -> Report:
    """All requests: their tokens by cause, and the requests that lost most cached tokens."""
    details: Counter[str] = Counter()
    for record in result.records:
        for reason in _reasons(record):
            if reason.cause is Cause.GROUP:
                details[reason.detail] += reason.tokens
    lossy = [found for record in result.records if (found := _lost(record))["lost_tokens"]]
    data = _setting(trace, result) | {
        "requests": len(result.records),
        "prompt_tokens": result.prompt_tokens,
        "hit_tokens": result.hit_tokens,
        "refused_tokens": result.refused_tokens,
        "tokens_by_cause": result.tokens_by_cause(),
        "tokens_by_group_detail": dict(details),
        "most_lost": sorted(lossy, key=lambda found: -found["lost_tokens"])[:_MOST_LISTED],
    }
    return Report(
        data,
        lambda: _shown_summary(_heading(trace, result), data),
        pictures=lambda: [causes_picture(data["tokens_by_cause"])],
    )


def _shown_summary(heading: Text, data: Mapping[str, Any]) -> Iterator[RenderableType]:
    yield heading
    refused = {"refused": data["refused_tokens"]} if data["refused_tokens"] else {}
    yield causes_table(data["tokens_by_cause"] | refused)
    if details := data["tokens_by_group_detail"]:
        yield ""
    for detail, tokens in details.items():
        yield Text(f"{detail}: {counted(tokens, 'token')}.")
    if not data["most_lost"]:
        return
    yield "\nRequests that lost most of what had been cached:\n"
    lost_to = [cause for cause in _LOSSES if data["tokens_by_cause"][cause]]
    rows = []
    for found in data["most_lost"]:
        losses = (found["lost_by_cause"].get(cause, 0) for cause in lost_to)
        rows.append((found["request_id"], found["prompt_tokens"], found["hit_tokens"], *losses))
    yield plain_table(("request", "prompt", "hit", *lost_to), rows, wraps=("request",))


def _reasons(record: RequestRecord) -> tuple[Reason, ...]:
    return record.explanation.reasons if record.explanation is not None else ()


def _lost(record: RequestRecord) -> dict[str, Any]:
    """The cached tokens that a request lost, by cause."""
    lost: Counter[str] = Counter()
    for reason in _reasons(record):
        if reason.cause in _LOSSES:
            lost[reason.cause.value] += reason.tokens
    return {
        "request_id": record.request_id,
        "prompt_tokens": record.prompt_tokens,
        "hit_tokens": record.hit_tokens,
        "lost_tokens": lost.total(),
        "lost_by_cause": dict(lost),
    }


def _setting(trace: Trace, result: ReplayResult) -> dict[str, Any]:
    names = ("model", "policy", "page_size", "pool_tokens", "pool_note")
    return {"trace": trace.name} | {name: getattr(result, name) for name in names}


def _heading(trace: Trace, result: ReplayResult) -> Text:
    note = f"{result.pool_note}\n" if result.pool_note else ""
    return Text(
        f"{trace.source}: {counted(len(result.records), 'request')}. {result.model}, {result.policy}, "
        f"pages of {result.page_size}, {result.pool_tokens:,} tokens.\n{note}"
    )
