"""The tables that `metadata.py --read RESULT --readme FILE` writes into documents, from a result alone.

`docs/benchmarks.md` has all rows with goals and the replays, `README.md` a few rows. Marks in the document say which.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.bookkeeping.report import NAMES, PACKAGES, figure

_SHORT = (
    "step-full-256-16",
    "step-full+window-256-16",
    "step-full+state-256-16",
    "step-full-1-16",
    "match-8192-16",
    "evict-8192-16",
)
"""Rows of the README: work of many requests, of one, and calls of the tree."""


def write_tables(result: dict[str, Any], document: Path) -> None:
    """Replace what is between the marks of each kind that the document has. Raises ValueError where it has none."""
    text, found = document.read_text(), 0
    for name, make in {"measured": _tables, "short": _short}.items():
        before, *rest = re.split(rf"(?s)(?<=<!-- bookkeeping: {name} -->\n).*?(?=<!-- bookkeeping: end -->)", text)
        if rest:
            text, found = f"{before}{make(result)}\n{rest[0]}", found + len(rest)
    if found != 1:
        raise ValueError(f"{document} has a place for tables {found} times, not once")
    document.write_text(text)


def _short(result: dict[str, Any]) -> str:
    """A line for each row of the README, with the fastest peer that does the work."""
    lines = ["| work | page | Quire, CPU µs | fastest peer, CPU µs | peer / Quire |", "|---|---|---|---|---|"]
    for row in (row for name in _SHORT for row in result["rows"] if row["name"] == name):
        peers = {name: found["cpu_us"] for name, found in row["systems"].items() if name != "quire"}
        own = row["systems"]["quire"]["cpu_us"]
        name = min(peers, key=peers.__getitem__, default="")
        ratios = {goal["peer"]: goal["ratio"] for goal in row["goals"] if "peer" in goal}  # of pairs of samples
        ratio = ratios.get(name, peers[name] / own if name else 0.0)
        beside = f"{figure(peers[name])} ({NAMES[name]}) | {ratio:.1f}" if name else "- | -"
        lines.append(f"| {row['label']} | {row['page']} | {figure(own)} | {beside} |")
    return "\n".join((*lines, "", f"{result['cpu']}, {result['cores']} cores, medians, {result['date']}."))


def _tables(result: dict[str, Any]) -> str:
    goals = [goal for row in result["rows"] for goal in row["goals"]]
    met = sum(goal["met"] for goal in goals)
    systems = [name for name in result["versions"] if any(name in row["systems"] for row in result["rows"])]
    versions = (f"{NAMES[name]} {result['versions'][name][PACKAGES[name]]}" for name in systems if name != "quire")
    return "\n".join(
        (
            f"{result['cpu']}, {result['cores']} cores with other work (load {result['load']}), Python "
            f"{result['python']}, {result['date']}.",
            f"{'; '.join(versions)}.",
            f"{met} of {len(goals)} goals are met.",
            "",
            "| work | page | Quire | beside it | ratio | goal |",
            "|---|---|---|---|---|---|",
            *(line for row in result["rows"] for line in _rows(row, result)),
            "",
            *_replays(result),
        )
    )


def _rows(row: dict[str, Any], result: dict[str, Any]) -> Iterator[str]:
    """A line for each goal of a row; of one without goals, none."""
    by_name = {other["name"]: other for other in result["rows"]}
    for goal in row["goals"]:
        beside, ratio = "", ""
        if "peer" in goal:
            beside = f"{_figure(row, goal['peer'])} ({NAMES[goal['peer']]})"
            ratio, asked = f"{goal['ratio']:.1f} [{goal['fastest']:.1f}]", f"at least {goal['factor']:g}"
        elif "row" in goal:
            beside = f"{_figure(by_name[goal['row']])} (`{goal['row']}`)"
            ratio, asked = f"{goal['times']:.2f} [{goal['fastest']:.2f}]", f"at most {goal['most']:g}"
        else:
            asked = f"at most {goal['at_most']:,.0f} {row['unit'].replace('us', 'µs')}"
        missed = "" if goal["met"] else ", missed"
        yield f"| {row['label']} | {row['page']} | {_figure(row)} | {beside} | {ratio} | {asked}{missed} |"


def _figure(row: dict[str, Any], system: str = "quire") -> str:
    found = row["systems"][system]
    return f"{figure(found['cpu_us'])} [{figure(min(found['samples']))}]"


def _replays(result: dict[str, Any]) -> Iterator[str]:
    rows = [row for row in result["rows"] if "ideal_hit_rate" in row]
    if not rows:
        return
    systems = [name for name in NAMES if any(name in row["systems"] for row in rows)]
    yield "Whole traces: requests per CPU second of the cache, and the share of prompt tokens that hit."
    yield ""
    yield f"| trace | page | {' | '.join(NAMES[name] for name in systems)} | ideal hit rate |"
    yield "|---" * (len(systems) + 3) + "|"
    for row in rows:
        cells = []
        for name in systems:
            found = row["systems"].get(name)
            cells.append(f"{1e6 / found['cpu_us']:,.0f} ({found['found']['hit_rate']:.1%})" if found else "-")
        trace = row["name"].split("-")[1]
        yield f"| {trace} | {row['page']} | {' | '.join(cells)} | {row['ideal_hit_rate']:.1%} |"
