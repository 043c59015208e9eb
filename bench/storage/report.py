"""The tables of `tiers.py`, and what its numbers say of the goals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

Row = dict[str, Any]
Parts = dict[str, list[Row]]

COPY_GOAL = 0.9  # of a plain copy of memory, pages of 64 KiB and more
DIGEST_GOAL = 0.1  # of the copy
SAVE_GOAL = COPY_GOAL / (1 + DIGEST_GOAL)  # of a plain copy: a copy that is sealed, piece by piece
SLOWER_GOAL = 1.02  # times the time to the first token without tiers
FASTER_GOAL = 3.0  # times, where sessions come back
LEAST_PAGE = 64 * 2**10
RETURNING = "sessions come back"
FITS = "all fits on the device"


def verdicts(parts: Parts) -> list[Row]:
    """What was asked, what was found, and whether that is enough."""
    found: list[Row] = []

    def goal(what: str, asked: float, value: float, *, most: bool = False, fastest: float | None = None) -> None:
        met = value <= asked if most else value >= asked
        found.append({"what": what, "asked": asked, "most": most, "found": value, "fastest": fastest, "met": met})

    for row in parts.get("copies", ()):
        if row["page_bytes"] < LEAST_PAGE:
            continue
        size = f"{row['page_bytes'] >> 10} KiB"
        part, best_part = row["of_plain"], row["best_of_plain"]
        for way in ("to_host", "to_device", "to_host_scattered", "to_device_scattered"):
            goal(f"{way}, {size}, of a plain copy", COPY_GOAL, part[way], fastest=best_part[way])
        for way in ("to_host_saved", "to_host_saved_scattered"):
            if way in part:
                goal(f"{way}, {size}, of a plain copy", SAVE_GOAL, part[way], fastest=best_part[way])
        save = "save" if "save" in row["digest_of_copy"] else "seal_while_warm"  # results of before have no saves
        for what, kind in (("seal", save), ("check", "defects")):
            value, best = row["digest_of_copy"][kind], row["best_digest_of_copy"][kind]
            goal(f"{what} a digest, {size}, of the copy", DIGEST_GOAL, value, most=True, fastest=best)
    for row in parts.get("engine", ()):
        if row["tiers"] == "none":
            continue
        if row.get("case") == FITS:
            for key in ("p50", "p95", "mean"):
                goal(f"engine, all fits, {row['tiers']}: {key}", SLOWER_GOAL, row["of_without"][key], most=True)
        else:
            goal(f"engine, sessions come back, {row['tiers']}: p50", FASTER_GOAL, row["times_faster_p50"])
            goal(f"engine, sessions come back, {row['tiers']}: p95", FASTER_GOAL, row["times_faster_p95"])
    for row in parts.get("simulator", ()):
        if "skipped" in row:
            continue
        for key in ("p50_s", "p95_s", "mean_s"):
            goal(f"{row['trace']}, {row['tiers']}: {key[:-2]}", SLOWER_GOAL, row["of_without"][key], most=True)
        if row["trace"] == "returning sessions" and row["tiers"] in ("host", "host and 50 GB/s storage"):
            goal(f"{row['trace']}, {row['tiers']}: p50, faster", FASTER_GOAL, 1 / row["of_without"]["p50_s"])
    return found


def print_report(result: Row, console: Console) -> None:
    """A table for each part, and one of the goals."""
    console.print(f"{result['date']}, {result['cores']} cores, load {result['load']}, {result['seconds']} s")
    shown: dict[str, Callable[[list[Row]], Table]] = {
        "copies": _copies,
        "directory": _directory,
        "engine": _engine,
        "simulator": _simulator,
    }
    for name in [name for name in shown if name in result["parts"]]:
        rows = result["parts"][name]
        console.print(shown[name]([row for row in rows if "skipped" not in row]))
        for row in rows:
            if "skipped" in row:
                console.print(f"{row.get('system', row.get('trace'))}: skipped, {row['skipped']}.", markup=False)
    table = _table("Goals", "what", "asked", "found", "fastest samples", "verdict")
    for each in result["goals"]:
        asked = f"{'<=' if each['most'] else '>='} {each['asked']:g}"
        best = "" if each["fastest"] is None else f"{each['fastest']:.2f}"
        table.add_row(each["what"], asked, f"{each['found']:.3f}", best, "met" if each["met"] else "missed")
    console.print(table)
    console.print(f"{sum(each['met'] for each in result['goals'])} of {len(result['goals'])} goals met.")


def _table(title: str, first: str, *others: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _copies(rows: list[Row]) -> Table:
    table = _table(
        "Frames, GB/s of medians (part of a plain copy); digests, ns per byte (part of the copy)",
        "page", "plain", "to host", "to device", "seal", "seal while warm", "check",
    )  # fmt: skip
    for row in rows:
        speed, part, digest, share = (
            row["gb_per_second"], row["of_plain"], row["digest_ns_per_byte"], row["digest_of_copy"]
        )  # fmt: skip
        ways = [f"{speed[way]:.1f} ({part[way]:.0%})" for way in ("to_host", "to_device")]
        seals = [f"{digest['seal']:.3f} ({share['seal']:.0%})", f"({share['seal_while_warm']:.0%})"]
        check = f"{digest['defects']:.3f} ({share['defects']:.0%})"
        table.add_row(f"{row['page_bytes'] >> 10} KiB", f"{speed['plain']:.1f}", *ways, *seals, check)
    return table


def _directory(rows: list[Row]) -> Table:
    table = _table(
        "Directory store beside the disk, GB/s (part of the disk)",
        "record", "how", "disk put", "store put", "disk get", "store get",
    )  # fmt: skip
    for row in rows:
        cells = []
        for verb in ("put", "get"):
            store, part = row[f"{verb}_store_gb_per_s"], row[f"{verb}_of_disk"]
            cells += [f"{row[f'{verb}_disk_gb_per_s']:.2f}", f"{store:.2f} ({part:.0%})"]
        table.add_row(f"{row['record_bytes'] >> 10} KiB", row["how"], *cells)
    return table


def _engine(rows: list[Row]) -> Table:
    table = _table(
        "Engine on this CPU, bundled model: seconds to the first token",
        "case", "tiers", "p50", "p95", "mean", "faster, p50", "faster, p95", "tokens from host", "from storage",
    )  # fmt: skip
    for row in rows:
        times = [f"{row[f'ttft_{name}_s']:.3f}" for name in ("p50", "p95", "mean")]
        faster = [f"{row[f'times_faster_{name}']:.1f}x" for name in ("p50", "p95")]
        hits = [f"{row['use'].get(name, 0):,}" for name in ("host_hit_tokens", "storage_hit_tokens")]
        table.add_row(row.get("case", RETURNING), row["tiers"], *times, *faster, *hits)
    return table


def _simulator(rows: list[Row]) -> Table:
    table = _table(
        "Simulator, an H100's costs: time to the first token without tiers and with them, seconds",
        "trace", "tiers", "hit", "p50", "p95", "mean", "off",
    )  # fmt: skip
    for row in rows:
        without, beside = row["ttft"]["without"], row["ttft"]["with"]
        times = [f"{without[key]:.3f} -> {beside[key]:.3f}" for key in ("p50_s", "p95_s", "mean_s")]
        hits = f"{row['hit_rate'][0]:.0%} -> {row['hit_rate'][1]:.0%}"
        table.add_row(row["trace"], row["tiers"], hits, *times, ", ".join(row["off"]))
    return table
