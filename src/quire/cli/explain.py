"""`quire explain`: why no more of a prompt was cached, for a request of a trace or of a live server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

from rich.console import RenderableType
from rich.text import Text

from quire.cli.explain_table import causes_table, reasons_table, sequence_heading
from quire.cli.replay import ReplayedCache, ReplayedEngine
from quire.cli.report import Report, told_of_drafts
from quire.cli.server import Server, ServerAddress
from quire.errors import InvalidInput
from quire.settings.setting import Settings, option_names, setting


class Explained(Settings):
    """The requests to explain."""

    source: str | None = setting(
        None, "A trace's file or folder, or a workload; with --url, a request's id.", argument=True, metavar="TRACE"
    )
    request: str | None = setting(None, "A request's id; without one, a summary.", argument=True, metavar="REQUEST_ID")


def explain(asked: Explained, cache: ReplayedCache, where: ServerAddress) -> Report:
    """Say of every prompt token whether it was reused, and if not, why: evicted (for which request, when), never
    seen, less than a page, cached for another adapter or salt, or given up by a group of layers.

    A trace is replayed, on the virtual clock of `quire replay`. A server knows its last 1,000 sequences, by the id of
    the response or of one of its sequences; without an id it tells of all its prompt tokens. Exit codes: 0 done,
    2 bad input, or nothing is known of the request.

    [dim]Example:[/dim] quire explain sessions --pool-tokens 1/8

    [dim]Example:[/dim] quire explain sessions s27.0 --pool-tokens 1/8

    [dim]Example:[/dim] quire explain --url http://127.0.0.1:8000 chatcmpl-0123
    """
    if where.url is not None:
        _refuse_replays(asked, cache)
        server = Server(where.url, where.api_key)
        return _server_report(server) if asked.source is None else _sequences_report(server, asked.source)
    if asked.source is None:
        raise InvalidInput("nothing to explain.", fix="name a trace or a workload, or a server with --url.")
    return _replay(asked.source, asked.request, cache)


def _refuse_replays(asked: Explained, cache: ReplayedCache) -> None:
    """Raise InvalidInput for options that only a replay has."""
    if asked.request is not None:
        raise InvalidInput(
            "--url asks a server, which has no traces.", fix="give it one argument, a request's id, or none."
        )
    given = [
        option_names(ReplayedCache, name)[0] for name in ReplayedCache.model_fields if name in cache.model_fields_set
    ]
    if given:
        raise InvalidInput(
            f"{', '.join(given)}: for replays of traces; --url asks a server, which has its own settings.",
            fix="leave them out, or leave out --url and name a trace.",
        )


def _server_report(server: Server) -> Report:
    statistics = server.ask("/v1/cache/statistics")
    if "processes" in statistics:  # a router: what its engines say that answer clients
        statistics = _together([each["answer"] for each in statistics["processes"] if each["role"] != "prefill"])
    causes: dict[str, int] = statistics["explained_tokens"]
    if not causes:
        raise InvalidInput("this server does not explain.", fix="start it without --no-explain.")
    found = {name: statistics[name] for name in ("prompt_tokens", "hit_tokens")} | {"tokens_by_cause": causes}
    shown: list[RenderableType] = [Text(f"{server.url}: {found['prompt_tokens']:,} prompt tokens since its start.\n")]
    shown.append(causes_table(causes))
    if (drafts := statistics.get("speculation")) is not None:
        found["speculation"] = drafts
        shown.append(Text(f"\nSpeculation: {told_of_drafts(drafts)}."))
    if (limited := statistics.get("chunk_budget", {})).get("why"):
        found["chunk_budget"] = limited
        shown.append(Text(f"\nBeside requests that decode, at last: {limited['why']}."))
    return Report(found, lambda: shown)


def _together(parts: list[dict[str, Any]]) -> dict[str, Any]:
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

    return Report(answer, shown)


def _replay(source: str, request_id: str | None, cache: ReplayedCache) -> Report:
    from quire.cli.explain_replay import request_report, summary_report
    from quire.cli.replay_grid import grid_of
    from quire.cli.replay_table import progress_bar
    from quire.sim.comparison import replay_one
    from quire.sim.trace import open_trace

    grid = grid_of(cache, ReplayedEngine(), explain=True)
    trace = open_trace(source, limit=cache.limit, seed=cache.trace_seed)
    with progress_bar(len(trace)) as progress:
        result = replay_one(trace, grid, progress)
    return summary_report(trace, result) if request_id is None else request_report(trace, result, request_id)
