"""The dashboard and the alert rules in deploy/monitoring, from the declared counters.

`python -m tests.examples.generated_boards` writes them. The first rows of the dashboard are chosen here; each other
metric gets a panel of its own in a row of its section, so that a new counter is there without being written down.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from quire.counters import Metric
from tests.examples.generated_reference import declared_metrics, exposed_names

FOLDER = Path(__file__).parents[2] / "deploy/monitoring"
DASHBOARD, RULES = FOLDER / "dashboard.json", FOLDER / "rules.yml"

MODEL = 'model_name=~"$model", '
CHOSEN = "{" + MODEL + 'instance=~"$instance"}'
WIDTH, HEIGHT = 12, 8
IN_A_ROW = 24 // WIDTH

Targets = dict[str, str]
"""Expressions by their legends."""


def rate(name: str, by: str = "", more: str = "") -> str:
    """The sum of a counter's rates."""
    chosen = CHOSEN[:-1] + more + "}"
    return f"sum{f' by ({by})' if by else ''} (rate({name}{chosen}[$__rate_interval]))"


def quantile(part: float, name: str) -> str:
    """The value below which so many observations are."""
    return f"histogram_quantile({part}, sum by (le) (rate({name}_bucket{CHOSEN}[$__rate_interval])))"


def quantiles(name: str) -> Targets:
    """Median and 95th percentile."""
    return {"median": quantile(0.5, name), "95 %": quantile(0.95, name)}


OVERVIEW: list[tuple[str, str, Targets]] = [
    ("Share of prompt tokens that were cached", "percentunit",
     {"cached": f"{rate('quire_hit_tokens_total')} / {rate('quire_prompt_tokens_total')}"}),
    ("Prompt tokens a second, by what became of them", "short",
     {"{{cause}}": rate("quire_prompt_tokens_by_cause_total", "cause")}),
    ("Tokens a second", "short", {"in": rate("quire_prompt_tokens_total"), "out": rate("quire_output_tokens_total")}),
    ("Requests", "short", {"running": f"sum (quire_running_requests{CHOSEN})",
                           "waiting": f"sum (quire_waiting_requests{CHOSEN})"}),
    ("Time to the first token", "s", quantiles("quire_time_to_first_token_seconds")),
    ("Time between tokens", "s", quantiles("quire_inter_token_latency_seconds")),
    ("Frames by tier, group and state", "short",
     {"{{tier}} {{group}} {{state}}": f"sum by (tier, group, state) (quire_frames{CHOSEN})"}),
    ("Hits by tier", "short", {"{{tier}}": rate("quire_tier_hit_tokens_total", "tier")}),
    ("Memory that was short", "short", {"preempted": rate("quire_preemptions_total"),
                                        "short": rate("quire_shortages_total"),
                                        "evicted pages": rate("quire_evicted_pages_total")}),
    ("How sequences ended", "short", {"{{finished_reason}}": rate("quire_request_success_total", "finished_reason")}),
]  # fmt: skip
"""What to look at first: title, unit, expressions."""

ALERTS: list[tuple[str, str, str, str, str]] = [
    ("QuireDown", 'up{job="quire"} == 0', "1m", "critical", "A server of Quire does not answer."),
    ("QuireUnhealthy", "quire_healthy == 0", "1m", "critical", "No request can progress; /health has the reason."),
    ("QuireNoServer", "quire_router_can_answer == 0", "1m", "critical",
     "A router has no server that can answer; its /health has the reason."),
    ("QuireServerLost", "quire_router_healthy == 0", "1m", "warning",
     "A router sends no requests to one of its servers, which is lost or unhealthy; its /health has the reason."),
    ("QuireInvariantBroken", "quire_invariant_broken == 1", "0m", "critical",
     "An invariant of the cache is broken: no request is admitted. Its log has the cause; restart it."),
    ("QuireEngineRestarted",
     'increase(quire_engine_restarts_total[15m]) > 0 or resets(quire_steps_total{process!=""}[15m]) > 0',
     "0m", "warning", "An engine process ended, and another took its place; the log has the cause."),
    ("QuirePageDamaged", "increase(quire_canary_found_pages_total[1h]) > 0", "0m", "critical",
     "The canary found bytes of cached pages that are not what they were: `quire audit` has them."),
    ("QuireRecordDamaged", "increase(quire_tier_corrupt_records_total[1h]) > 0", "0m", "warning",
     "A record on the host or in the store failed its check; it was not served. Is the storage sound?"),
    ("QuireStoreLost", "quire_store_lost == 1", "5m", "warning",
     "The store answers nothing; requests are answered without it."),
    ("QuireMemoryShort", "quire_waiting_requests > 0 and rate(quire_preemptions_total[10m]) > 0", "10m", "warning",
     "Requests wait and others are preempted: the pool is too small for the load, or requests are too many."),
    ("QuireSequencesFail", 'rate(quire_request_success_total{finished_reason="error"}[5m]) > 0', "5m", "warning",
     "Sequences end with errors; the log has them."),
    ("QuireFirstTokenSlow",
     "histogram_quantile(0.95, sum by (le, instance) (rate(quire_time_to_first_token_seconds_bucket[10m]))) > 10",
     "10m", "warning", "One request of 20 waits for more than 10 s for its first token."),
    ("QuireEventsDropped", "increase(quire_kv_events_dropped_total[15m]) > 0", "0m", "warning",
     "Readers of events have gaps until the next snapshot: the publisher's thread was behind."),
]  # fmt: skip
"""Alerts: name, expression, for how long, severity, what it means."""


def named(text: str) -> set[str]:
    """The metrics that an expression names."""
    return set(re.findall(r"\b(?:quire_|vllm:)\w+", text))


def exposed() -> set[str]:
    """All names that a server may expose."""
    ends = {"histogram": ("_bucket", "_sum", "_count")}
    return {
        name + end for each in declared_metrics() for name in exposed_names(each) for end in ends.get(each.kind, ("",))
    }


def dashboard() -> dict[str, Any]:
    """Grafana's JSON."""
    panels = list(_placed(_panels()))
    variable = {"type": "query", "datasource": _SOURCE, "refresh": 2, "multi": True, "includeAll": True}
    variables = [
        {"name": name, "label": name, "query": f"label_values(quire_healthy, {label})", **variable}
        for name, label in (("model", "model_name"), ("instance", "instance"))
    ]
    source = {"name": "datasource", "label": "data source", "type": "datasource", "query": "prometheus"}
    return {
        "uid": "quire",
        "title": "Quire",
        "tags": ["quire"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [source, *variables]},
        "panels": panels,
    }


_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def _panels() -> Iterator[dict[str, Any]]:
    """Panels and rows, without their places."""
    yield {"type": "row", "title": "Overview", "collapsed": False, "panels": []}
    for title, unit, targets in OVERVIEW:
        yield _panel(title, unit, targets)
    seen = named(json.dumps(OVERVIEW))
    others = [
        each for each in declared_metrics() if not {exposed_names(each)[0], f"{exposed_names(each)[0]}_bucket"} & seen
    ]
    for section, metrics in groupby(sorted(others, key=_section), key=_section):
        inside = [_panel(exposed_names(each)[0], _unit(each), _targets(each), each.text) for each in metrics]
        yield {"type": "row", "title": section, "collapsed": True, "panels": inside}


def _section(metric: Metric) -> str:
    """The word that a metric begins with, where it is that of a feature."""
    first = metric.name.partition("_")[0]
    known = {"tier": "Tiers", "store": "Tiers", "transfer": "Peers", "canary": "Canary", "spec": "Speculation"}
    known |= {
        "router": "Router",
        "session": "Sessions",
        "sessions": "Sessions",
        "hisparse": "Latents on the host",
        "kv": "Cache",
    }
    return known.get(first, "Engine and cache")


def _targets(metric: Metric) -> Targets:
    """A router has no model: its samples are chosen by instance alone."""
    has_model = not metric.name.startswith("router_")
    return {legend: each if has_model else each.replace(MODEL, "") for legend, each in _of_models(metric).items()}


def _of_models(metric: Metric) -> Targets:
    name, labels = exposed_names(metric)[0], sorted((*metric.labels, *metric.constant))
    if metric.kind == "histogram":
        return quantiles(name)
    legend = " ".join(f"{{{{{label}}}}}" for label in labels) or "{{instance}}"
    by = ", ".join(labels)
    if metric.kind == "counter":
        return {legend: rate(name, by)}
    return {legend: f"sum by ({by}) ({name}{CHOSEN})" if by else f"sum by (instance) ({name}{CHOSEN})"}


def _unit(metric: Metric) -> str:
    is_rate = metric.kind == "counter"
    ends = {"_bytes_per_second": "Bps", "_bytes": "Bps" if is_rate else "bytes", "_ratio": "percentunit"}
    ends |= {"_seconds": "percentunit" if is_rate else "s"}
    return next((unit for end, unit in ends.items() if metric.name.endswith(end)), "short")


def _panel(title: str, unit: str, targets: Targets, about: str = "") -> dict[str, Any]:
    return {
        "type": "timeseries",
        "title": title,
        "description": about,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + at), "expr": expression, "legendFormat": legend}
            for at, (legend, expression) in enumerate(targets.items())
        ],
    }


def _placed(panels: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The panels with ids and places: a row is one line high, and those inside of it are below it."""
    number = x = y = 0

    def place(panel: dict[str, Any]) -> dict[str, Any]:
        nonlocal number, x, y
        is_row = panel["type"] == "row"
        if is_row and x:
            x, y = 0, y + HEIGHT
        number += 1
        found = {"id": number, "gridPos": {"x": x, "y": y, "w": 24 if is_row else WIDTH, "h": 1 if is_row else HEIGHT}}
        x, y = (0, y + 1) if is_row else ((x + WIDTH) % 24, y + HEIGHT * (x + WIDTH == 24))
        return found | panel

    for panel in panels:
        placed = place(panel)
        if "panels" in panel:
            placed["panels"] = [place(inside) for inside in panel["panels"]]
        yield placed


def rules() -> dict[str, Any]:
    """Prometheus' alert rules."""
    return {
        "groups": [
            {
                "name": "quire",
                "rules": [
                    {
                        "alert": name,
                        "expr": expression,
                        "for": lasts,
                        "labels": {"severity": severity},
                        "annotations": {"summary": about},
                    }
                    for name, expression, lasts, severity, about in ALERTS
                ],
            }
        ]
    }


def files() -> dict[Path, str]:
    """What is written where."""
    head = "# Generated by `python -m tests.examples.generated_boards`.\n"
    return {
        DASHBOARD: json.dumps(dashboard(), indent=1) + "\n",
        RULES: head + yaml.safe_dump(rules(), sort_keys=False, width=1000),
    }


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")
