"""Draws the JSON of a replay, or of the sweep of a plan, with matplotlib; the suffix of the picture says the format.

    quire replay chat --policy lru,density --pool-tokens 1/16,1/8,1/4 --json | python examples/chart.py replay.svg
    quire plan gemma-3-27b --kv-memory 40GiB --sweep context --json | python examples/chart.py sweep.svg

A replay: left a line for each policy over the pool sizes of the first model and page size, with the ideal and the
optimum dashed; right the share of the pool that requests held, and that was cached, in the run of the largest
pool. A sweep: tokens and requests over its values.
"""

import json
import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot

DARK, LIGHT = "#3b6ea5", "#a9c4e0"


def draw_runs(runs):
    first = runs[0]
    shown = [run for run in runs if (run["model"], run["page_size"]) == (first["model"], first["page_size"])]
    figure, (rates, pool) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    draw_rates(rates, sorted(shown, key=lambda run: run["pool_tokens"]))
    draw_occupancy(pool, max(shown, key=lambda run: run["pool_tokens"]))
    figure.suptitle(f"{first['trace']}: {first['model']}, pages of {first['page_size']}")
    return figure


def draw_rates(axis, runs):
    for policy in dict.fromkeys(run["policy"] for run in runs):
        own = [run for run in runs if run["policy"] == policy]
        pools = [run["pool_tokens"] for run in own]
        axis.plot(pools, [run["hit_rate"] for run in own], marker="o", markersize=4, label=policy)
    pools = [run["pool_tokens"] for run in runs]
    axis.plot(pools, [run["optimal_hit_rate"] for run in runs], "--", marker="_", color="#333333", label="optimum")
    axis.plot(pools, [run["ideal_hit_rate"] for run in runs], "--", marker="_", color="#aaaaaa", label="ideal")
    axis.set_xscale("log", base=2)
    axis.set_xticks(sorted(set(pools)), [f"{pool:,}" for pool in sorted(set(pools))], rotation=20, fontsize=8)
    axis.minorticks_off()
    axis.set_ylim(bottom=0)
    axis.set_xlabel("pool, tokens")
    axis.set_title("hit rate")
    axis.legend(fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def draw_occupancy(axis, run):
    times, held, cached = zip(*run["occupancy"], strict=True)
    # A sample is valid until the next one, hence `step`.
    axis.stackplot(times, held, cached, labels=("held by requests", "cached"), colors=(DARK, LIGHT), step="post")
    axis.set_ylim(0, 1)
    axis.set_xlabel("seconds of the virtual clock")
    axis.set_title(f"share of a pool of {run['pool_tokens']:,} tokens, {run['policy']}")
    axis.legend(fontsize=8, loc="lower right")
    axis.spines[["top", "right"]].set_visible(False)


def draw_sweep(found):
    what, names = found["sweep"], [str(row[found["sweep"]]) for row in found["rows"]]
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axis, column in zip(axes, ("tokens", "requests at once"), strict=True):
        heights = [row[column] or 0 for row in found["rows"]]
        axis.bar(names, heights, color=DARK)
        axis.bar_label(axis.containers[0], labels=[f"{height:,}" for height in heights], fontsize=8)
        axis.set_xlabel(what)
        axis.set_title(column)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(found["model"])
    return figure


found = json.load(sys.stdin)
(draw_sweep(found) if isinstance(found, dict) else draw_runs(found)).savefig(Path(sys.argv[1]))
