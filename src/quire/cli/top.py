"""`quire top`: what a server, or each server behind a router, does now, in a terminal."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from quire.cli.report import Report, Terminal, plain_table
from quire.cli.server import DEFAULT_URL, Server, ServerAddress
from quire.counters import Histogram
from quire.errors import InvalidInput, QuireError
from quire.plan.budget import format_bytes
from quire.settings.setting import Settings, setting

_BAR = 14  # so that all fits in 80 columns, with the name "server"
_STATES = {
    "private": "blue",
    "cached": "green",
    "moving": "yellow",
    "quarantined": "red",
    "free": "dim",
    "released": "dim",
}
_SIGNS = {"private": "█", "cached": "▓", "moving": "▒", "quarantined": "x", "free": "·", "released": " "}
"""Frames by state, so that a terminal without colours shows them too."""

_TOTALS = ("prompt_tokens", "hit_tokens", "output_tokens", "evicted_pages")
_LATENCIES = ("first_token_s", "inter_token_s")
_QUANTILES = {"median": 0.5, "p99": 0.99}
_NOW = ("running_requests", "waiting_requests", "usage", "waiting_reason", "preemptions", "shortages")


class Watched(Settings):
    """How a server is watched."""

    once: bool = setting(False, "Look once, for as long as --every, and end; --json does so too.")
    every: float = setting(1.0, "Seconds between two looks.", ge=0.1, le=3600)


@dataclass(frozen=True, slots=True)
class Seen:
    """One look: when, and the rows of servers. A server that answers with an error has no statistics."""

    at_s: float
    rows: list[dict[str, Any]]


def top(where: ServerAddress, watched: Watched, *, as_json: bool) -> Report | None:
    """Watch a live server, or all servers behind a router: requests, tokens a second, times to the first token and
    between tokens, memory by group and tier, and from where prompt tokens came. Ctrl-C ends it. Exit codes: 0 done,
    2 bad input or no server.

    [dim]Example:[/dim] quire top --url http://127.0.0.1:8000

    [dim]Example:[/dim] quire top --once --json
    """
    server = Server(where.url or DEFAULT_URL, where.api_key)
    before = look(server)
    if watched.once or as_json:
        time.sleep(watched.every)
        found = rows_of(look(server), before)
        return Report({"url": server.url, "processes": found}, lambda: [shown(server.url, found)])
    console = Terminal()
    if not console.is_terminal:
        raise InvalidInput("the output is no terminal.", fix="add --once, or --json.")
    with Live(console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(watched.every)
                try:
                    now = look(server)
                    live.update(shown(server.url, rows_of(now, before)), refresh=True)
                    before = now
                except QuireError as error:
                    live.update(Text(str(error), "red"), refresh=True)
        except KeyboardInterrupt:
            return None


def look(server: Server) -> Seen:
    """The statistics now, of one server or of all of a router. Raises what `Server.ask` does."""
    answer = server.ask("/v1/cache/statistics")
    alone = {"name": "server", "role": "", "url": server.url, "status": 200, "answer": answer}
    return Seen(time.monotonic(), answer.get("processes", [alone]))


def rows_of(now: Seen, before: Seen) -> list[dict[str, Any]]:
    """A row for each server: what it does now, what it did a second since `before`, and the latencies of what came
    since then. A counter that fell is of an engine that was started again: it has no rate."""
    earlier = {each["name"]: each for each in before.rows}
    return [_row(each, earlier.get(each["name"], {}), max(1e-9, now.at_s - before.at_s)) for each in now.rows]


def _row(process: Mapping[str, Any], earlier: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    row = {name: process.get(name) or "" for name in ("name", "role", "url")} | {"answers": process["status"] == 200}
    if row["answers"]:
        found, then = process["answer"], earlier.get("answer", {})
        grown = {name: found.get(name, 0) - then.get(name, found.get(name, 0)) for name in _TOTALS}
        row |= {name: found.get(name) for name in (*_NOW, *_TOTALS)}
        row |= {f"{name}_a_second": round(more / seconds, 2) if more >= 0 else None for name, more in grown.items()}
        row |= {name: _quantiles(found, then, name) for name in _LATENCIES}
        row |= {"frames": _frames(found), "causes": found.get("explained_tokens", {})}
        row |= {"tenants": found.get("tenants") or {}}
    return row


def _quantiles(now: Mapping[str, Any], before: Mapping[str, Any], name: str) -> dict[str, float | None]:
    """Those of what a server has measured between, None if that is nothing, or if it was started again."""
    told = [each.get("server", {}).get(name) for each in (now, before)]
    if None in told:
        return dict.fromkeys(_QUANTILES)
    found, then = map(Histogram.from_dict, told)
    since = then.counts()
    fell = any(count < earlier for count, earlier in zip(found.counts(), since, strict=True))
    return {key: None if fell else found.quantile(part, since) for key, part in _QUANTILES.items()}


def _frames(found: Mapping[str, Any]) -> dict[str, dict[str, dict[str, int]]]:
    """Frames by tier, group and state."""
    tiers = {"device": found.get("frames", {}), "host": (found.get("tiers") or {}).get("host", {})}
    return {
        tier: {
            group: {state: states[state] for state in _STATES if state in states} for group, states in groups.items()
        }
        for tier, groups in tiers.items()
        if groups
    }


def shown(url: str, rows: list[dict[str, Any]]) -> RenderableType:
    """Tables of the rows of servers."""
    parts: list[RenderableType] = [Text(f"{url}, {time.strftime('%H:%M:%S')}\n"), _requests(rows)]
    parts += [Text(""), _latencies(rows), Text(""), _pools(rows), Text(""), _causes(rows)]
    if any(row.get("tenants") for row in rows):
        parts += [Text(""), _tenants(rows)]
    for row in rows:
        if row.get("waiting_reason"):
            parts.append(Text(f"{row['name']}, the first that waits: {row['waiting_reason']}", "yellow"))
        if not row["answers"]:
            parts.append(Text(f"{row['name']} does not answer", "red"))
    return Group(*parts)


def _requests(rows: list[dict[str, Any]]) -> RenderableType:
    heads = ("server", "runs", "waits", "in/s", "out/s", "cached", "evicted/s", "used", "preempted")
    names = ("running_requests", "waiting_requests", "prompt_tokens_a_second", "output_tokens_a_second")
    body = [
        (
            row["name"],
            *(_rate(row[name]) for name in names),
            _share(row["hit_tokens"] or 0, row["prompt_tokens"] or 0),
            _rate(row["evicted_pages_a_second"]),
            f"{row['usage'] or 0:.0%}",
            row["preemptions"],
        )
        for row in rows
        if row["answers"]
    ]
    return plain_table(heads, body)


def _latencies(rows: list[dict[str, Any]]) -> RenderableType:
    heads = ("server", "address", "first token", "99 %", "between tokens", "99 %")
    body = [
        (row["name"], row["url"], *(_time(row[name][part]) for name in _LATENCIES for part in _QUANTILES))
        for row in rows
        if row["answers"]
    ]
    return plain_table(heads, body, left=heads[:2])


def _rate(value: float | None) -> float | None:
    return value if value is None or value < 10 else round(value)


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.{0 if seconds >= 0.01 else 1}f} ms"


def _pools(rows: list[dict[str, Any]]) -> RenderableType:
    pools = [
        (row["name"], tier, group, states)
        for row in rows
        for tier, groups in row.get("frames", {}).items()
        for group, states in groups.items()
    ]
    shown = [state for state in _STATES if state != "released" or any(each[-1].get(state) for each in pools)]
    heads = [{"quarantined": "apart", "released": "gone"}.get(state, state) for state in shown]
    longest = max((len(name) for name, *_ in pools), default=0)
    width = max(4, _BAR + 6 - longest - 6 * ("released" in shown))
    body = [(*where, _bar(states, width), *(states.get(state, 0) for state in shown)) for *where, states in pools]
    first = ("server", "tier", "group", "frames")
    return plain_table((*first, *heads), body, left=first)


def _tenants(rows: list[dict[str, Any]]) -> RenderableType:
    body = [
        (
            row["name"],
            tenant,
            *(format_bytes(found[name]) for name in ("held_bytes", "cached_bytes", "floor_bytes", "ceiling_bytes")),
            found["waiting_requests"],
            _share(found["hit_tokens"], found["prompt_tokens"]),
        )
        for row in rows
        for tenant, found in row.get("tenants", {}).items()
    ]
    heads = ("server", "tenant", "in use", "cached", "floor", "ceiling", "waits", "hits")
    return plain_table(heads, body, left=heads[:2])


def _bar(states: Mapping[str, int], width: int) -> Text:
    whole = sum(states.values())
    made, at, ends = Text(), 0, 0
    for state, style in _STATES.items():
        at += states.get(state, 0)
        end = round(width * at / whole) if whole else 0
        made.append(_SIGNS[state] * (end - ends), style)
        ends = end
    return made


def _causes(rows: list[dict[str, Any]]) -> RenderableType:
    causes: dict[str, int] = {}
    for row in rows:
        for cause, tokens in row.get("causes", {}).items():
            causes[cause] = causes.get(cause, 0) + tokens
    whole = sum(causes.values())
    body = [(cause, tokens, _share(tokens, whole)) for cause, tokens in causes.items() if tokens]
    return plain_table(("prompt tokens", "since the start", "share"), body)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"
