"""The runs of `quire replay` as pictures of a page: a sweep of pools, or bars of one; and how full each pool was."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from quire.cli.report_page import bar, chart
from quire.sim.replicas import ReplicasResult
from quire.sim.result import ReplayResult
from quire.sim.roles import RolesResult

_COLORS = ("device", "host", "evicted", "storage", "peer", "moving", "namespace")


def run_pictures(runs: Sequence[ReplayResult]) -> Iterator[dict[str, Any]]:
    """Hits of each policy beside those of the optimum, then the pools over time."""
    for (model, page_size), group in groupby(runs, key=lambda run: (run.model, run.page_size)):
        same = list(group)
        if len({run.pool_tokens for run in same}) > 1:
            yield _sweep(same, f"{model}, pages of {page_size}: prompt tokens that were cached")
        else:
            yield from map(_hits, same)
    yield from map(_occupancy, runs)


def engines_pictures(results: Sequence[RolesResult | ReplicasResult]) -> Iterator[dict[str, Any]]:
    """From where the prompt tokens of several engines came; behind each router, what each engine was sent."""
    for each in results:
        received = each.received_tokens if isinstance(each, RolesResult) else 0
        computed = max(0, each.prompt_tokens - each.hit_tokens - received)  # some may come twice
        name = each.name if isinstance(each, RolesResult) else f"router {each.router}"
        parts = [("hit", each.hit_tokens, "device"), ("from a peer", received, "peer"), ("computed", computed, "new")]
        yield bar(f"{name}: prompt tokens", parts)
    for each in results:
        if isinstance(each, ReplicasResult):
            sent = [int(engine["prompt_tokens"]) for engine in each.engines]
            shares = [(f"engine {at}", tokens, _COLORS[at % len(_COLORS)]) for at, tokens in enumerate(sent)]
            yield bar(f"router {each.router}: prompt tokens by engine", shares)


def _name(run: ReplayResult) -> str:
    return run.policy + (" + tiers" if run.tiers else " + hot" if run.hisparse else "")


def _sweep(runs: Sequence[ReplayResult], label: str) -> dict[str, Any]:
    """Shares of hits over sizes of the pool."""
    pools = sorted({run.pool_tokens: run for run in runs}.items())
    series = []
    for at, name in enumerate(dict.fromkeys(map(_name, runs))):
        rates = {run.pool_tokens: run.hit_rate for run in runs if _name(run) == name}
        series.append((name, _COLORS[at % len(_COLORS)], [rates.get(size) for size, _ in pools]))
    series.append(("optimum", "new striped", [run.optimal_hit_rate for _, run in pools]))
    series.append(("ideal", "new", [run.ideal_hit_rate for _, run in pools]))
    shown = [
        {"name": name, "color": color, "values": [None if rate is None else round(100 * rate, 2) for rate in rates]}
        for name, color, rates in series
    ]
    return chart(label, "tokens in the pool", [size for size, _ in pools], shown, unit=" %", most=100)


def _hits(run: ReplayResult) -> dict[str, Any]:
    """The prompt tokens of a run: what it hit, what another policy or a larger pool would hit, and what none does."""
    bounds = [run.hit_tokens, *(round(rate * run.prompt_tokens) for rate in (run.optimal_hit_rate, run.ideal_hit_rate))]
    hit, best, ideal = (max(bounds[: at + 1]) for at in range(3))
    unseen = run.prompt_tokens - ideal
    parts = [
        ("hit", hit, "device"), ("lost to the policy", best - hit, "evicted"),
        ("lost to the pool", ideal - best, "new striped"), ("seen for the first time", unseen, "new"),
    ]  # fmt: skip
    return bar(f"{run.model}, pages of {run.page_size}, {run.pool_tokens:,} tokens: {_name(run)}", parts)


def _occupancy(run: ReplayResult) -> dict[str, Any]:
    """Shares of the pool over virtual time."""
    samples = run.occupancy
    both = [round(100 * (each.held + each.cached), 2) for each in samples]
    held = [round(100 * each.held, 2) for each in samples]
    series = [
        {"name": "in use or cached", "color": "device", "values": both, "fills": True},
        {"name": "held by requests", "color": "host", "values": held, "fills": True},
    ]
    if any(each.size < 1 for each in samples):
        sizes = [round(100 * each.size, 2) for each in samples]
        series.append({"name": "its size", "color": "evicted", "values": sizes, "fills": False})
    label = f"{_name(run)}, {run.pool_tokens:,} tokens: the pool"
    return chart(label, "seconds", [round(each.time, 3) for each in samples], series, unit=" %", most=100)
