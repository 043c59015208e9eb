"""Tables and a picture of what `bench.eviction.recorded` has measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

Cells = Mapping[str, list[float]]
"""By half, sessions, spacing, seed, pool and column, with "/" between them: hit rates, and shares of work saved."""


@dataclass(frozen=True, kw_only=True)
class Mean:
    """A column in a pool, over `cells`: its hit rate, the part of the gap from LRU to the optimum that it closes, its
    worst cell against LRU in points, and the share of the work of prompts that hits save, in points above LRU."""

    cells: int
    hits: float
    gap: float
    worst: float
    saved: float


def means(cells: Cells) -> dict[str, dict[str, dict[str, Mean]]]:
    """By half of the data, pool and column."""
    found: dict[str, dict[str, dict[str, dict[str, list[float]]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(dict))
    )
    for key, values in cells.items():
        half, *where = key.split("/")[:4]
        pool, column = key.split("/", 4)[4].rsplit("/", 1)
        found[half][pool][column]["/".join(where)] = values
    return {half: {pool: _means(columns) for pool, columns in pools.items()} for half, pools in found.items()}


def _means(columns: Mapping[str, Mapping[str, list[float]]]) -> dict[str, Mean]:
    lru, best = columns["lru"], columns["optimum"]
    result = {}
    for column, rows in columns.items():
        places = [place for place in rows if place in lru and place in best]
        rates, base, top = (np.array([each[place][0] for place in places]) for each in (rows, lru, best))
        saved = [rows[place][1] - lru[place][1] for place in places if len(rows[place]) > 1]
        result[column] = Mean(
            cells=len(places),
            hits=100 * float(rates.mean()),
            gap=float((rates - base).sum() / (top - base).sum()),
            worst=100 * float((rates - base).min()),
            saved=100 * float(np.mean(saved)) if saved else 0.0,
        )
    return result


def lines(cells: Cells) -> Iterator[str]:
    """A line for each half, pool and column."""
    for half, pools in means(cells).items():
        yield f"{half}: pool, column, cells, hits %, gap closed, worst cell in points, work saved above LRU in points"
        for pool, columns in pools.items():
            for column, mean in columns.items():
                shown = f"{mean.hits:6.2f} {mean.gap:7.1%} {mean.worst:+6.2f} {mean.saved:+6.2f}"
                yield f"{pool:6} {column:26} {mean.cells:3} {shown}"


def tables(measured: Cells) -> str:
    """Markdown: for each half the gap that each column closes, its worst cell, and the work that it saves."""
    parts = []
    for half, pools in means(measured).items():
        most = max(mean.cells for columns in pools.values() for mean in columns.values())
        parts.append(f"**Sessions: {half}; {most} compositions. Gap closed; worst cell; work saved**")
        rows = [f"| column | {' | '.join(pools)} |", f"|---|{'---|' * len(pools)}"]
        for name in ("lru", "optimum"):
            hits = [f"{columns[name].hits:.2f} %" for columns in pools.values()]
            rows += [f"| {name}, hits | {' | '.join(hits)} |"]
        for column in dict.fromkeys(column for columns in pools.values() for column in columns):
            if column not in ("lru", "optimum"):
                cells = max(columns[column].cells for columns in pools.values() if column in columns)
                label = column if cells == most else f"{column}, of {cells}"
                rows += [f"| {label} | {' | '.join(_shown(columns.get(column)) for columns in pools.values())} |"]
        parts.append("\n".join(rows))
    return "\n\n".join(parts)


def _shown(mean: Mean | None) -> str:
    return "" if mean is None else f"{mean.gap:.0%}; {mean.worst:+.2f}; {mean.saved:+.2f}"


DRAWN = (
    "lru:closes=1",
    "density",
    "density:told",
    "density:told:closes=1",
    "oracle:over",
    "oracle:error1",
    "oracle:next",
)


def draw(cells: Cells, path: Path) -> None:
    """The gap that columns close, by pool, a panel for each half; what knows the future is dashed."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    halves = means(cells)
    figure, axes = pyplot.subplots(1, len(halves), figsize=(6.5 * len(halves), 4), layout="constrained", squeeze=False)
    for (half, pools), axis in zip(halves.items(), axes.flat, strict=True):
        for number, column in enumerate(DRAWN):
            values = [100 * pools[pool][column].gap for pool in pools if column in pools[pool]]
            if len(values) == len(pools):
                style = "--" if column.startswith("oracle") else "-"
                drawn = {"color": f"C{number}", "marker": "o", "markersize": 3}
                axis.plot(range(len(pools)), values, style, label=column, **drawn)
        axis.axhline(0, color="#999999", linewidth=0.8)
        axis.set_xticks(range(len(pools)), pools)
        axis.set_title(f"sessions: {half}", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside right center", fontsize=8)
    figure.supxlabel("pool, part of the working set", fontsize=9)
    figure.supylabel("gap from LRU to the optimum that is closed, %", fontsize=9)
    figure.savefig(path)
    pyplot.close(figure)
