"""`quire replay`: a trace through the real cache and scheduler, on a simulated device."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

from rich.console import Console
from rich.text import Text

from quire.cli.replay_request import ReplayedCache, ReplayedEngine, ReplayedTiers
from quire.engine.setting import Settings, setting
from quire.errors import InvalidInput


class ReplayOutput(Settings):
    """Which trace is replayed, and what is drawn of it."""

    trace: str | None = setting(None, "A trace's file or folder, or a workload: see --list.", argument=True)
    plot: Path | None = setting(None, "Draw hit rates and occupancy into a PNG or SVG file.", group="Output")
    names: bool = setting(False, "Print workloads, trace formats and policies.", group="Output", option="--list")


def replay(
    output: ReplayOutput, cache: ReplayedCache, engine: ReplayedEngine, tiers: ReplayedTiers, *, as_json: bool
) -> None:
    """Replay a trace through the cache and the scheduler of the engine, on a simulated device.

    Nothing waits: times are those of a virtual clock, from what steps would cost. Requests that can never fit are
    refused and counted. Exit codes: 0 done, 2 bad input, 4 a step read a page that did not hold what it must.

    [dim]Example:[/dim] quire replay chat --policy lru,lfu --pool-tokens 1/16,1/8,1/4 --check reads
    """
    if output.names:
        _print_names(as_json)
        return
    if output.trace is None:
        raise InvalidInput("no trace is named.", fix="name a file or a workload; see --list.")
    from quire.cli.replay_grid import grid_of
    from quire.cli.replay_plot import check_picture, draw_runs
    from quire.cli.replay_table import heading, progress_bar, remarks, run_tables, tier_tables
    from quire.sim.comparison import compare
    from quire.sim.trace import open_trace

    plot = output.plot
    grid = grid_of(cache, engine, tiers)
    if plot is not None:
        check_picture(plot)
    trace = open_trace(output.trace, limit=cache.limit, seed=cache.seed)
    with progress_bar(len(trace)) as progress:
        runs = compare(trace, grid, progress)
    if plot is not None:
        draw_runs(plot, trace.name, runs)
    if as_json:
        print(json.dumps([run.as_dict() for run in runs]))
        return
    console = Console()
    console.print(heading(trace, runs))
    for table in run_tables(runs):
        console.print(table, "")
    for table in tier_tables(runs):
        console.print(table, "")
    for remark in remarks(runs):
        console.print(remark)
    if plot is not None:
        console.print(f"Drawn into {plot}.")


def _print_names(as_json: bool) -> None:
    from quire.prefix.evict import POLICIES
    from quire.sim.trace import FORMATS
    from quire.sim.workloads import WORKLOADS

    workloads = {name: inspect.cleandoc(make.__doc__ or "") for name, make in WORKLOADS.items()}
    formats = [found.name for found in FORMATS]
    if as_json:
        print(json.dumps({"workloads": workloads, "formats": formats, "policies": list(POLICIES)}))
        return
    console = Console()
    console.print("Workloads, with settings as in chat:requests=500,rate=4:", style="bold")
    for name, about in workloads.items():
        console.print(Text.assemble((f"  {name:26} ", "bold"), (about.partition(". ")[0].replace("\n", " "), "dim")))
    console.print("Trace formats: " + ", ".join(formats), highlight=False)
    console.print("Policies: " + ", ".join(POLICIES), highlight=False)
