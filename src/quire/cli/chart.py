"""Charts, with matplotlib: replays over pool sizes and time, and the sweep of a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quire.errors import InvalidInput
from quire.sim.result import ReplayResult

_DARK, _LIGHT = "#3b6ea5", "#a9c4e0"


def check_chart(path: Path) -> None:
    """Raises InvalidInput if the drawing library or the folder is missing, or the format is unknown."""
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise InvalidInput(
            "--plot draws with matplotlib.", fix="in the checkout of Quire: pip install '.[plot]'."
        ) from error
    if not path.absolute().parent.is_dir():
        raise InvalidInput(f"{path} cannot be written: there is no such folder.", fix="make it, or name another.")
    if path.suffix[1:].lower() not in FigureCanvasBase.filetypes:
        raise InvalidInput(
            f"{path} cannot be written: its suffix is no format.", fix="give a file such as replay.png or replay.svg."
        )


def draw_runs(path: Path, title: str, runs: Sequence[ReplayResult]) -> None:
    """Draw the runs of the first model and page size into `path`; its suffix says the format.

    Left a line for each policy over the pool sizes, with the ideal and the optimum dashed; right the share of the pool
    that requests held, and that was cached, in the run with the first policy and the largest pool. Raises InvalidInput
    where the file cannot be written, and what `check_chart` raises.
    """
    check_chart(path)
    from matplotlib import pyplot

    first = runs[0]
    shown = [run for run in runs if (run.model, run.page_size) == (first.model, first.page_size)]
    figure, (rates, pool) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    _draw_rates(rates, shown)
    _draw_occupancy(pool, max(shown, key=lambda run: run.pool_tokens))
    figure.suptitle(f"{title}: {first.model}, pages of {first.page_size}")
    _save(figure, path)


def draw_sweep(path: Path, title: str, what: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw tokens and requests over the values of a sweep into `path`. Raises as `draw_runs`."""
    check_chart(path)
    from matplotlib import pyplot

    names = [str(row[what]) for row in rows]
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axis, column in zip(axes, ("tokens", "requests at once"), strict=True):
        heights = [row[column] or 0 for row in rows]
        axis.bar(names, heights, color=_DARK)
        axis.bar_label(axis.containers[0], labels=[f"{height:,}" for height in heights], fontsize=8)
        axis.set_xlabel(what)
        axis.set_title(column)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise InvalidInput(
            f"{path} cannot be written: {error}.", fix="give a file such as replay.png or replay.svg."
        ) from error
    finally:
        pyplot.close(figure)


def _draw_rates(axis: Any, runs: Sequence[ReplayResult]) -> None:
    runs = sorted(runs, key=lambda run: run.pool_tokens)
    for policy in dict.fromkeys(run.policy for run in runs):
        own = [run for run in runs if run.policy == policy]
        pools = [run.pool_tokens for run in own]
        axis.plot(pools, [run.hit_rate for run in own], marker="o", markersize=4, label=policy)
    pools = [run.pool_tokens for run in runs]
    axis.plot(pools, [run.optimal_hit_rate for run in runs], "--", marker="_", color="#333333", label="optimum")
    axis.plot(pools, [run.ideal_hit_rate for run in runs], "--", marker="_", color="#aaaaaa", label="ideal")
    axis.set_xscale("log", base=2)
    axis.set_xticks(sorted(set(pools)), [f"{pool:,}" for pool in sorted(set(pools))], rotation=20, fontsize=8)
    axis.minorticks_off()
    axis.set_ylim(bottom=0)
    axis.set_xlabel("pool, tokens")
    axis.set_title("hit rate")
    axis.legend(fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def _draw_occupancy(axis: Any, run: ReplayResult) -> None:
    samples = run.occupancy
    times = [sample.time for sample in samples]
    held, cached = [sample.held for sample in samples], [sample.cached for sample in samples]
    # A sample is valid until the next one, hence `step`.
    axis.stackplot(times, held, cached, labels=("held by requests", "cached"), colors=(_DARK, _LIGHT), step="post")
    axis.set_ylim(0, 1)
    axis.set_xlabel("seconds of the virtual clock")
    axis.set_title(f"share of a pool of {run.pool_tokens:,} tokens, {run.policy}")
    axis.legend(fontsize=8, loc="lower right")
    axis.spines[["top", "right"]].set_visible(False)
