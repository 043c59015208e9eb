"""`quire replay`: a trace through the real cache and scheduler, on a simulated device."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from quire.cli.options import DebugOption, JsonOption
from quire.cli.report import reported
from quire.errors import InvalidInput

if TYPE_CHECKING:
    from quire.cli.replay_inputs import ReplayWords

_CACHE = "Cache"
_COST = "Cost of steps"
_ENGINE = "Engine"
_TIERS = "Below the device"
_OUTPUT = "Output"


def _option(panel: str, text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


def replay(
    trace: Annotated[
        str | None, typer.Argument(help="A trace's file or folder, or a workload: see --list.", show_default=False)
    ] = None,
    policy: Annotated[str, _option(_CACHE, "Eviction policies to compare: lru,lfu.")] = "lru,density",
    pool_tokens: Annotated[
        str | None,
        _option(_CACHE, "Pool sizes: tokens (64k), or parts of what the trace would fill (1/16,1/4). (default: 1/8)"),
    ] = None,
    page_size: Annotated[str, _option(_CACHE, "Page sizes, in tokens: 1,16,64.")] = "16",
    model: Annotated[
        list[str] | None,
        _option(_CACHE, "Plan the pools of this model: a name of the catalogue or a config.json; may be repeated.",
                "--model", "-m"),
    ] = None,
    gpu: Annotated[str, _option(_COST, "A device whose published peaks give the times.")] = "h100-80gb",
    tp: Annotated[int, _option(_COST, "Devices that share the work of a step.")] = 1,
    prefill_rate: Annotated[float | None, _option(_COST, "Prompt tokens per second, instead of a device.")] = None,
    decode_ms: Annotated[float | None, _option(_COST, "Milliseconds of a decode step, instead of a device.")] = None,
    fit: Annotated[bool, _option(_COST, "Measure the engine here with the bundled model.", "--fit")] = False,
    max_running: Annotated[int, _option(_ENGINE, "Requests that run at once.")] = 256,
    chunk: Annotated[int, _option(_ENGINE, "Tokens of one step.", "--max-num-batched-tokens")] = 2048,
    overlap: Annotated[
        bool, _option(_ENGINE, "Launch a step before the one before it has settled.", "--overlap/--no-overlap")
    ] = False,
    order: Annotated[str, _option(_ENGINE, "Who waits first: fcfs, or lpm.")] = "fcfs",
    host_tokens: Annotated[
        str | None, _option(_TIERS, "Tokens that host memory holds; everything is replayed without it and with it.")
    ] = None,
    host_memory: Annotated[str | None, _option(_TIERS, "The same in bytes: 64GiB.")] = None,
    storage_tokens: Annotated[str | None, _option(_TIERS, "Tokens that storage behind it holds.")] = None,
    host_bandwidth: Annotated[float | None, _option(_TIERS, "GB/s each way. (default: the device's bus)")] = None,
    storage_bandwidth: Annotated[float | None, _option(_TIERS, "GB/s each way. (default: 7)")] = None,
    write_policy: Annotated[
        str, _option(_TIERS, "write_through, write_through_selective or write_back.")
    ] = "write_through",
    prefetch_policy: Annotated[
        str, _option(_TIERS, "break_even, best_effort, wait_complete or timeout.")
    ] = "break_even",
    load: Annotated[str, _option(_TIERS, "break_even: where that beats computing; or always.")] = "break_even",
    limit: Annotated[int | None, _option(_OUTPUT, "Only the first N requests.", min=1)] = None,
    seed: Annotated[int, _option(_OUTPUT, "Of a workload.")] = 0,
    check: Annotated[
        str, _option(_OUTPUT, "off; reads: every page that a step reads; all: and the cache's laws.")
    ] = "off",
    plot: Annotated[Path | None, _option(_OUTPUT, "Draw hit rates and occupancy into a PNG or SVG file.")] = None,
    names: Annotated[bool, _option(_OUTPUT, "Print workloads, trace formats and policies.", "--list")] = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:  # fmt: skip
    """Replay a trace through the cache and the scheduler of the engine, on a simulated device.

    Nothing waits: times are those of a virtual clock, from what steps would cost. Requests that can never fit are
    refused and counted. Exit codes: 0 done, 2 bad input, 4 a step read a page that did not hold what it must.

    [dim]Example:[/dim] quire replay chat --policy lru,lfu --pool-tokens 1/16,1/8,1/4 --check reads
    """
    with reported(as_json=as_json, debug=debug):
        if names:
            _print_names(as_json)
            return
        if trace is None:
            raise InvalidInput("a replay is of a trace.", fix="name a file or a workload; see --list.")
        from quire.cli.replay_inputs import ReplayWords, TierWords

        tiers = TierWords(
            host_tokens=host_tokens, host_memory=host_memory, storage_tokens=storage_tokens,
            host_bandwidth=host_bandwidth, storage_bandwidth=storage_bandwidth, write_policy=write_policy,
            prefetch_policy=prefetch_policy, load=load,
        )  # fmt: skip
        words = ReplayWords(
            policy=policy, pool_tokens=pool_tokens, page_size=page_size, models=model or (), gpu=gpu,
            tp=tp, prefill_rate=prefill_rate, decode_ms=decode_ms, fit=fit, max_running=max_running, chunk=chunk,
            overlap=overlap, order=order, check=check, tiers=tiers,
        )  # fmt: skip
        _replay(trace, limit, seed, words, plot, as_json)


def _replay(source: str, limit: int | None, seed: int, words: ReplayWords, plot: Path | None, as_json: bool) -> None:
    from quire.cli.replay_inputs import grid_of
    from quire.cli.replay_plot import check_picture, draw_runs
    from quire.cli.replay_table import heading, progress_bar, remarks, run_tables
    from quire.cli.replay_tiers import tier_tables
    from quire.sim.comparison import compare
    from quire.sim.trace import open_trace

    grid = grid_of(words)
    if plot is not None:
        check_picture(plot)
    trace = open_trace(source, limit=limit, seed=seed)
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
    from quire.sim.formats import FORMATS
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
