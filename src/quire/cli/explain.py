"""`quire explain`: why no more of a prompt was cached, for a request of a trace or of a live server."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from quire.cli.lookups import LoggedLookups, lookups_report
from quire.cli.replay import ReplayedCache, ReplayedEngine
from quire.cli.report import PageOutput, Report, drafts_remark, plain_table
from quire.cli.server import Server, ServerAddress
from quire.errors import InvalidInput
from quire.plan.budget import counted
from quire.settings.setting import option_names, setting

_MEANINGS = {
    "hit": "reused",
    "last_token": "cached, and computed again: the last token, with its page",
    "logprobs": "cached, and computed again for log-probabilities of the prompt",
    "room": "cached, and computed again since it left its request no room",
    "slower": "cached below the device, and faster to compute than to load",
    "group": "cached, but a group of layers could not go on from there",
    "peer": "asked of a prefill engine, and computed here",
    "evicted": "was cached and had to make room",
    "namespace": "cached for another adapter or salt only",
    "page": "less than a page in common",
    "new": "never seen behind this prefix",
    "refused": "of requests that this pool can never hold",
}
_RESPONSE = re.compile("(cmpl|chatcmpl)-|(msg|resp)_")
_MOST_EVICTIONS = 8  # rows of a table
_MOST_NAMES = 2  # requests named in one of them
_STYLES = {"hit": "green", "evicted": "red", "group": "yellow", "peer": "yellow", "namespace": "yellow"}


class Explained(PageOutput):
    """The requests to explain."""

    source: str | None = setting(
        None, "A trace's file or folder, or a workload; with --url, a request's id.", argument=True, metavar="TRACE"
    )
    request: str | None = setting(None, "A request's id; without one, a summary.", argument=True, metavar="REQUEST_ID")


def explain(asked: Explained, cache: ReplayedCache, where: ServerAddress, logged: LoggedLookups) -> Report:
    """Say of every prompt token whether it was reused, and if not, why: evicted (for which request, when), never
    seen, less than a page, cached for another adapter or salt, or given up by a group of layers.

    A trace is replayed, on the virtual clock of `quire replay`. A server keeps its last 1,000 sequences, by the id of
    the response or of one of its sequences; without an id it tells of all its prompt tokens. Exit codes: 0 done,
    2 bad input, or an unknown request.

    [dim]Example:[/dim] quire explain sessions --pool-tokens 1/8

    [dim]Example:[/dim] quire explain sessions s27.0 --pool-tokens 1/8

    [dim]Example:[/dim] quire explain --url http://127.0.0.1:8000 chatcmpl-0123

    [dim]Example:[/dim] quire explain --lookups /var/log/quire-tier.jsonl --store /var/cache/quire
    """
    if logged.lookups is not None:
        _refuse_replays(asked, cache, "--lookups reads a log")
        if where.url is not None:
            raise InvalidInput("--lookups reads a log, and asks no server.", fix="leave out --url.")
        return lookups_report(logged.lookups, logged.lookups_store, asked.source)
    if logged.lookups_store is not None:
        raise InvalidInput("--store tells more of a log of lookups.", fix="name the log with --lookups.")
    if where.url is not None:
        _refuse_replays(asked, cache, "--url asks a server")
        server = Server(where.url, where.api_key)
        return _server_report(server) if asked.source is None else _sequences_report(server, asked.source)
    if asked.source is None:
        raise InvalidInput("nothing to explain.", fix="name a trace or a workload, or a server with --url.")
    return _replay(asked.source, asked.request, cache)


def _refuse_replays(asked: Explained, cache: ReplayedCache, instead: str) -> None:
    """Raise InvalidInput for options that only a replay has. `instead` says what is explained."""
    if asked.request is not None:
        raise InvalidInput(f"{instead}, which has no traces.", fix="give it one argument, a request's id, or none.")
    given = [
        option_names(ReplayedCache, name)[0] for name in ReplayedCache.model_fields if name in cache.model_fields_set
    ]
    if given:
        option = instead.partition(" ")[0]
        raise InvalidInput(
            f"{', '.join(given)}: for replays of traces; {instead}, which has its own settings.",
            fix=f"leave them out, or leave out {option} and name a trace.",
        )


def _server_report(server: Server) -> Report:
    statistics = server.ask("/v1/cache/statistics")
    if "processes" in statistics:  # a router: what its engines say that answer clients
        statistics = _sum_of(
            [each["answer"] for each in statistics["processes"] if each["role"] != "prefill" and each["status"] == 200]
        )
    causes: dict[str, int] = statistics["explained_tokens"]
    if not causes:
        raise InvalidInput("this server does not explain.", fix="start it without --no-explain.")
    found = {name: statistics[name] for name in ("prompt_tokens", "hit_tokens")} | {"tokens_by_cause": causes}
    shown: list[RenderableType] = [Text(f"{server.url}: {found['prompt_tokens']:,} prompt tokens since its start.\n")]
    shown.append(causes_table(causes))
    if (drafts := statistics.get("speculation")) is not None:
        found["speculation"] = drafts
        shown.append(Text(f"\nSpeculation: {drafts_remark(drafts)}."))
    if (limited := statistics.get("chunk_budget", {})).get("why"):
        found["chunk_budget"] = limited
        shown.append(Text(f"\nBeside requests that decode, at last: {limited['why']}."))
    return Report(found, lambda: shown, pictures=lambda: [causes_picture(causes)])


def _sum_of(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Statistics of several engines in one, as far as the report reads them."""
    found: dict[str, Any] = {name: sum(part[name] for part in parts) for name in ("prompt_tokens", "hit_tokens")}
    causes = [cause for part in parts for cause in part["explained_tokens"]]
    found["explained_tokens"] = {
        cause: sum(part["explained_tokens"].get(cause, 0) for part in parts) for cause in dict.fromkeys(causes)
    }
    return found


def _sequences_report(server: Server, request_id: str) -> Report:
    answer = server.ask(f"/v1/cache/explain/{quote(request_id, safe='')}")

    def shown() -> Iterator[RenderableType]:
        for explanation in answer["explanations"]:
            yield sequence_heading(explanation["sequence"], explanation)
            yield reasons_table(explanation)
            yield ""

    return Report(answer, shown, pictures=lambda: map(strip_picture, answer["explanations"]))


def _replay(source: str, request_id: str | None, cache: ReplayedCache) -> Report:
    from quire.cli.explain_replay import request_report, summary_report
    from quire.cli.replay_grid import grid_of
    from quire.cli.replay_table import progress_bar
    from quire.sim.comparison import replay_one
    from quire.sim.trace import open_trace

    grid = grid_of(cache, ReplayedEngine(), explain=True)
    if _RESPONSE.match(source) and not Path(source).exists():
        fix = f"ask its server: quire explain --url http://127.0.0.1:8000 {source}."
        raise InvalidInput(f"'{source}' is the id of a server's response, not a trace.", fix=fix)
    trace = open_trace(source, limit=cache.limit, seed=cache.trace_seed)
    with progress_bar(len(trace)) as progress:
        result = replay_one(trace, grid, progress)
    return summary_report(trace, result) if request_id is None else request_report(trace, result, request_id)


# -- tables


def reasons_table(explanation: Mapping[str, Any]) -> Table:
    """A row for each reason of an explanation (`Explanation.to_dict`), in the order of the prompt. Neighbouring
    evictions share one if they were for the same request, or if there would be too many. What the policy expects is
    said in the first of neighbours that it expects alike."""
    rows, before = [], ""
    for reason in merged_evictions(explanation["reasons"]):
        start, tokens, cause = reason["start"], reason["tokens"], reason["cause"]
        remark = forecast_remark(reason)
        detail = Text(reason.get("detail", _MEANINGS[cause]) + remark * (remark != before))
        before = remark
        rows.append((start, start + tokens - 1, tokens, Text(cause, _STYLES.get(cause, "")), detail))
    return plain_table(("from", "to", "tokens", "cause", "detail"), rows, left=("cause", "detail"), wraps=("detail",))


def forecast_remark(reason: Mapping[str, Any]) -> str:
    """What the eviction policy takes a prefix for, and when it expects it back; "" if it does not know."""
    if "kind" not in reason:
        return ""
    return f"; {reason['kind']}: {reason['chance']:.0%} come again, half of them within {reason['expected_s']:,.0f} s"


def merged_evictions(reasons: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The reasons with neighbouring evictions put together: those for the same request, then, while there are more than
    `_MOST_EVICTIONS`, the two that are fewest tokens together."""
    rows = [list(same) for _, same in groupby(reasons, key=lambda reason: reason.get("by") or reason["start"])]
    while sum(map(_is_eviction, rows)) > _MOST_EVICTIONS:
        pairs = [at for at in range(len(rows) - 1) if _is_eviction(rows[at]) and _is_eviction(rows[at + 1])]
        if not pairs:
            break
        at = min(pairs, key=lambda at: _tokens(rows[at]) + _tokens(rows[at + 1]))
        rows[at : at + 2] = [rows[at] + rows[at + 1]]
    return [row[0] if len(row) == 1 else _together(row) for row in rows]


def _together(reasons: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """One row for several evictions: from the latest to the earliest, and the requests that caused them."""
    ages = sorted(reason["seconds_ago"] for reason in reasons)
    latest, earliest = f"{ages[0]:.1f}", f"{ages[-1]:.1f}"
    when = latest if latest == earliest else f"{latest} to {earliest}"
    causes = {reason["by"]: None for reason in reasons}
    names = list(dict.fromkeys(name.partition(" and ")[0] for name in causes))
    said = ", ".join(names[:_MOST_NAMES])
    if len(causes) == 1:
        said = reasons[0]["by"]
    elif any(" and " in name for name in causes):  # for several requests at once, of which only the first is named
        said += " and others"
    elif len(names) > _MOST_NAMES:
        said += f" and {len(names) - _MOST_NAMES} more"
    return {**reasons[0], "tokens": _tokens(reasons), "detail": f"evicted {when} s ago for {said}"}


def _is_eviction(reasons: Sequence[Mapping[str, Any]]) -> bool:
    return bool(reasons[0]["cause"] == "evicted")


def _tokens(reasons: Sequence[Mapping[str, Any]]) -> int:
    return sum(int(reason["tokens"]) for reason in reasons)


def causes_table(causes: Mapping[str, int]) -> Table:
    """A row for each cause, and the sum."""
    total = sum(causes.values())
    rows = [
        (tokens, f"{tokens / total:.1%}" if total else "", Text(cause, _STYLES.get(cause, "")), _MEANINGS[cause])
        for cause, tokens in causes.items()
    ]
    last = "what it is"
    table = plain_table(("tokens", "share", "cause", last), rows, left=("cause", last), wraps=(last,))
    table.add_row(f"{total:,}", "", "", "all prompt tokens", style="dim")
    return table


def causes_picture(causes: Mapping[str, int]) -> dict[str, Any]:
    """Tokens by cause, on a page."""
    return {"kind": "causes", "causes": causes}


def strip_picture(explanation: Mapping[str, Any], page_size: int = 0) -> dict[str, Any]:
    """A prompt from its first token to its last, on a page; with lines between its pages if their size is known."""
    named = {name: explanation[name] for name in ("reasons", "prompt_tokens")}
    return {"kind": "strip", "page_size": page_size, **named}


def sequence_heading(name: str, explanation: Mapping[str, Any]) -> Text:
    """Which sequence, and how much of it was reused."""
    prompt, hit = explanation["prompt_tokens"], explanation["hit_tokens"]
    return Text(f"{name}: {counted(prompt, 'prompt token')}, {hit:,} of them reused ({hit / prompt:.1%}).\n")
