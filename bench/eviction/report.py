"""What `eviction.py` prints and draws of its results."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HELD_OUT = 11
"""Seeds from this one on are reported alone, where there are any: policies may be tuned on earlier ones."""
_DRAWN = ("lru", "density")

Rows = dict[str, dict[tuple[str, int, str], dict[str, dict[str, Any]]]]
"""By mode; by trace, page and pool; by policy: the means over seeds."""


def means(result: dict[str, Any]) -> Rows:
    """Means of every number over the seeds that are reported, of those that every policy of the place has."""
    found: dict[tuple[str, str, int, str, str], dict[int, dict[str, Any]]] = defaultdict(dict)
    for key, row in result["cells"].items():
        mode, trace, seed, page, pool, policy = key.split("/")
        found[mode, trace, int(page), pool.replace(":", "/"), policy][int(seed)] = row
    common: dict[tuple[str, str, int, str], set[int]] = {}
    for (*place, _), seeds in found.items():
        mode, trace, page, pool = place
        common[mode, trace, page, pool] = common.get((mode, trace, page, pool), set(seeds)) & set(seeds)
    rows: Rows = {"one": defaultdict(dict), "load": defaultdict(dict)}
    for (mode, trace, page, pool, policy), seeds in found.items():
        shared = {seed: row for seed, row in seeds.items() if seed in common[mode, trace, page, pool]}
        held_out = {seed: row for seed, row in shared.items() if seed >= HELD_OUT} or shared
        numbers = {name for row in held_out.values() for name in row} - {"commit"}
        rows[mode][trace, page, pool][policy] = {
            name: statistics.fmean(row[name] for row in held_out.values() if name in row) for name in sorted(numbers)
        } | {"seeds": len(held_out)}
    return rows


def write_section(tables: str, document: Path, name: str = "eviction") -> None:
    """Replace the tables of this name in a document. Raises ValueError without a place for them."""
    mark = re.compile(rf"(?s)(?<=<!-- {name}: measured -->\n).*?(?=<!-- {name}: end -->)")
    text = document.read_text()
    if len(mark.findall(text)) != 1:
        raise ValueError(f"{document} has no place for tables, or several")
    document.write_text(mark.sub(lambda _: tables + "\n", text))


def tables(result: dict[str, Any], *, largest_only: bool = False) -> str:
    """Markdown: hit rates of all cells, or of the largest pages, then what policies save over all of them."""
    rows = means(result)
    parts = [f"{result['machine']}, {result['date']}, commit {_commits(result)}."]
    for name, why in result["skipped"].items():
        parts.append(f"`{name}` is missing: {why}.")
    for mode, title in (("one", "One request at a time"), ("load", "Side by side")):
        if rows[mode]:
            pages = sorted({page for _, page, _ in rows[mode]})
            shown = {place: cell for place, cell in rows[mode].items() if not largest_only or place[1] == pages[-1]}
            parts += [f"**{title}: hit rate, % of prompt tokens**", *_hits(shown)]
            named = " and ".join(map(str, pages))
            parts += [f"**{title}: all cells, {len(rows[mode])}, in pages of {named}**", *_summary(rows[mode])]
    return "\n\n".join(parts)


def _hits(rows: dict[tuple[str, int, str], dict[str, dict[str, Any]]]) -> Iterator[str]:
    policies = _policies(rows)
    lines = [f"| trace | page | pool | {' | '.join(policies)} |", "|---" * (3 + len(policies)) + "|"]
    for (trace, page, pool), cell in sorted(rows.items(), key=lambda each: _place(*each[0])):
        best = max((each["hit"] for name, each in cell.items() if name != "optimum"), default=0)
        shown = [_percent(cell.get(policy), best) for policy in policies]
        lines.append(f"| {trace} | {page} | {pool} | {' | '.join(shown)} |")
    yield "\n".join(lines)


def _summary(rows: dict[tuple[str, int, str], dict[str, dict[str, Any]]]) -> Iterator[str]:
    """Against LRU: the closed part of the gap to the optimum, over traces and over all, and the worst cell."""
    traces = sorted({trace for trace, _, _ in rows})
    has_optimum = any("optimum" in cell for cell in rows.values())
    lines = [
        "| policy | gap closed | worst against LRU, points | recomputed, of LRU's | first token, of LRU's | us |",
        "|---" * 6 + "|",
    ]
    for policy in _policies(rows):
        cells = [
            (cell[policy], cell["lru"], cell.get("optimum")) for cell in rows.values() if {policy, "lru"} <= cell.keys()
        ]
        if not cells or (policy == "lru" and len(_policies(rows)) == 1):
            continue
        gap = gap_closed(cells) if has_optimum else None
        worst = min(own["hit"] - lru["hit"] for own, lru, _ in cells)
        work, first = (_ratio(cells, name) for name in ("recomputed", "ttft_s"))
        decisions = [own["decision_us"] for own, _, _ in cells if "decision_us" in own]
        shown = [
            policy,
            f"{gap:.0%}" if gap is not None and policy not in ("lru", "optimum") else "",
            f"{100 * worst:+.2f}",
            f"{work:.1%}",
            f"{first:.1%}",
            f"{statistics.median(decisions):.1f}" if decisions else "",
        ]
        lines.append(f"| {' | '.join(shown)} |")
    yield "\n".join(lines)
    if has_optimum:
        others = [policy for policy in _policies(rows) if policy not in ("lru", "optimum")]
        lines = [f"| gap closed | {' | '.join(others)} |", "|---" * (1 + len(others)) + "|"]
        for trace in traces:
            own = {
                place: cell for place, cell in rows.items() if place[0] == trace and {"lru", "optimum"} <= cell.keys()
            }
            shown = []
            for policy in others:
                gap = gap_closed(
                    [(cell[policy], cell["lru"], cell["optimum"]) for cell in own.values() if policy in cell]
                )
                shown.append(f"{gap:.0%}" if gap is not None else "")
            lines.append(f"| {trace} | {' | '.join(shown)} |")
        yield "\n".join(lines)


def gap_closed(cells: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any] | None]]) -> float | None:
    """The closed part of the whole gap between LRU and the optimum: sums over cells, so that a cell in which both
    are nearly equal counts little. None where the mean gap is below a fifth of a point."""
    gained = sum(own["hit"] - lru["hit"] for own, lru, best in cells if best is not None)
    gap = sum(best["hit"] - lru["hit"] for _, lru, best in cells if best is not None)
    return gained / gap if gap > 0.002 * len(cells) else None


def _ratio(cells: list[Any], name: str) -> float:
    """The geometric mean over cells."""
    return statistics.geometric_mean([max(own[name], 1e-9) / max(lru[name], 1e-9) for own, lru, _ in cells])


def draw(result: dict[str, Any], path: Path) -> None:
    """Hit rate by pool, a panel for each trace: LRU, density, newer policies and the optimum, in the largest pages."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    rows = means(result)["one"]
    page = max(page for _, page, _ in rows)
    rows = {place: cell for place, cell in rows.items() if place[1] == page}
    traces = sorted({trace for trace, _, _ in rows})
    known = {*_DRAWN, "slru", "lfu", "gdsf", "sieve", "s3fifo", "optimum"}
    shown = [policy for policy in _policies(rows) if policy in _DRAWN or policy not in known] + ["optimum"]
    columns = 4
    figure, axes = pyplot.subplots(
        -(-len(traces) // columns), columns, figsize=(13, 2.8 * -(-len(traces) // columns)), layout="constrained"
    )
    for axis in axes.flat[len(traces) :]:
        axis.set_visible(False)
    for trace, axis in zip(traces, axes.flat, strict=False):
        pools = sorted({pool for name, _, pool in rows if name == trace}, key=_pool)
        for policy in shown:
            rates = [rows[trace, page, pool].get(policy, {}).get("hit") for pool in pools]
            if None not in rates:
                style = (
                    {"color": "#333333", "linestyle": "--"} if policy == "optimum" else {"marker": "o", "markersize": 3}
                )
                axis.plot(range(len(pools)), rates, label=policy, **style)
        axis.set_xticks(range(len(pools)), pools)
        axis.set_title(trace, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes.flat[0].legend(fontsize=8)
    figure.supxlabel("pool, part of the working set", fontsize=9)
    figure.supylabel("hit rate", fontsize=9)
    figure.savefig(path)
    pyplot.close(figure)


def _policies(rows: dict[Any, dict[str, Any]]) -> list[str]:
    """In the order of the file, the optimum last."""
    order = ("lru", "slru", "lfu", "gdsf", "sieve", "s3fifo", "density")
    names = {policy for cell in rows.values() for policy in cell}
    new = sorted(names - {*order, "optimum"})
    return [name for name in (*order, *new, "optimum") if name in names]


def _percent(row: dict[str, Any] | None, best: float) -> str:
    if row is None:
        return ""
    return f"**{100 * row['hit']:.1f}**" if row["hit"] == best else f"{100 * row['hit']:.1f}"


def _pool(pool: str) -> float:
    part, whole = pool.split("/")
    return int(part) / int(whole)


def _place(trace: str, page: int, pool: str) -> tuple[str, int, float]:
    return trace, page, _pool(pool)


def _commits(result: dict[str, Any]) -> str:
    return ", ".join(sorted({row["commit"] for row in result["cells"].values()}))
