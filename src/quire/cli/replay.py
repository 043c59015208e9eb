"""`quire replay`: a trace through the real cache and scheduler, on a simulated device."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from rich.console import RenderableType
from rich.text import Text

from quire.cli.report import ListedOutput, PageOutput, Report, named_rows
from quire.errors import InvalidInput
from quire.settings.fields import (
    ArenaFields,
    CostFields,
    HiSparseFields,
    RankFields,
    StepFields,
    TenantFields,
    WorthFields,
)
from quire.settings.setting import setting
from quire.sim.settings import Fleet, SimulatedLink, SimulatedTiers

if TYPE_CHECKING:
    from quire.sim.comparison import Grid
    from quire.sim.trace_request import Trace

_CACHE, _ENGINE, _HISPARSE = "Cache", "Engine", "Latents in host memory"


class ReplayedCache(WorthFields):
    """The caches for the replay of a trace, and which part of it is replayed."""

    GROUP: ClassVar[str] = _CACHE

    policies: str | None = setting(
        None,
        "Eviction policies to compare: lru,lfu.",
        option="--policy",
        otherwise="lru,density; with roles or --replicas, and for explain: density",
    )
    pool_tokens: str | None = setting(
        None,
        "Pool sizes: tokens (64k), or parts of what the trace would fill (1/16,1/4).",
        otherwise="1/8, or more where that holds no request",
    )
    page_sizes: str = setting("16", "Page sizes, in tokens: 1,16,64.", option="--page-size", aliases=("--block-size",))
    models: list[str] = setting(
        [],
        "Plan the pools of this model: a name of the catalogue or a config.json; may be repeated.",
        option="--model",
        aliases=("-m",),
    )
    endings: Literal["hidden", "told"] = setting(
        "hidden", "Whether the policy is told which outputs call tools, where the trace says it: {choices}."
    )
    limit: int | None = setting(None, "Only the first N requests.", group="Output", ge=1)
    trace_seed: int = setting(0, "Seed of a workload.", group="Output", option="--seed")


class ReplayedEngine(ArenaFields, TenantFields, CostFields, StepFields, RankFields):
    """The engine that replays, and what its steps cost."""

    GROUP: ClassVar[str] = _ENGINE

    fit: bool = setting(False, "Measure the engine here with the bundled model.", group="Cost of steps", option="--fit")
    speculate: str | None = setting(
        None,
        "Drafts of a step, and the chance of each to be right: 4,0.7. Without a chance, that of the trace's requests.",
        metavar="N[,CHANCE]",
    )
    resizes: str | None = setting(
        None,
        "Times of the virtual clock and the part of its pools that the engine has from then on: 60s:1/2,120s:1.",
        metavar="TIME:PART,...",
        otherwise="all of them",
    )
    order: str = setting("fcfs", "Which waiting request goes first: fcfs, or lpm.")
    check: str = setting(
        "off", "off; reads: every page that a step reads; all: and the invariants of the cache.", group="Output"
    )


class ReplayedHiSparse(HiSparseFields):
    """Latents in host memory and hot buffers on the device, beside all latents on the device in the same bytes."""

    GROUP: ClassVar[str] = _HISPARSE

    selections: Path | None = setting(
        None, "What requests select: a file of `bench/sparse/record_selections.py`.", otherwise="drawn"
    )
    selection_drift: float | None = setting(
        None,
        "Correlation of two steps in drawn selections: at 1, a request selects the same tokens in all steps.",
        otherwise="0.95",
        ge=0,
        le=1,
    )


class ReplayedRoles(SimulatedLink):
    """Engines that compute prompts for others, beside as many engines that do everything."""

    num_prefill: int | None = setting(
        None, "Engines that compute prompts for others.", option="--prefill", otherwise="0", ge=1
    )
    num_decode: int | None = setting(None, "Engines that answer requests.", option="--decode", otherwise="1", ge=1)


class ReplayedFleet(Fleet):
    """Engines behind a router, with each of several routers."""

    routers: str | None = setting(
        None,
        "How a request finds its engine, to compare: round-robin,least-loaded,prefix,events.",
        option="--router",
        otherwise="all four",
    )


class ReplayOutput(PageOutput, ListedOutput):
    """The trace of a replay."""

    replayed: str | None = setting(
        None, "A trace's file or folder, or a workload: see --list.", argument=True, metavar="TRACE"
    )


def replay(
    output: ReplayOutput,
    cache: ReplayedCache,
    engine: ReplayedEngine,
    tiers: SimulatedTiers,
    hisparse: ReplayedHiSparse,
    roles: ReplayedRoles,
    fleet: ReplayedFleet,
) -> Report:
    """Replay a trace through the cache and the scheduler of the engine, on a simulated device.

    Nothing waits: times are those of a virtual clock, from what steps would cost. Requests that can never fit are
    refused and counted. Exit codes: 0 done, 2 bad input, 4 a step read a page that did not hold what it must.

    [dim]Example:[/dim] quire replay chat --policy lru,lfu --pool-tokens 1/16,1/8,1/4 --check reads

    [dim]Example:[/dim] quire replay chat --prefill 1 --decode 2 --link 10GB/s --link-failures 0.01

    [dim]Example:[/dim] quire replay noisy:9,quiet:1 --tenants tenants.json

    [dim]Example:[/dim] quire replay chat --resizes 60s:1/2,120s:1 --host-tokens 1M

    [dim]Example:[/dim] quire replay chat:rate=8 --replicas 4 --router prefix,events --event-delay 0.1
    """
    if output.names:
        return _names()
    if output.replayed is None:
        raise InvalidInput("no trace is named.", fix="name a file or a workload; see --list.")
    from quire.cli.replay_grid import grid_of
    from quire.cli.replay_pictures import run_pictures
    from quire.cli.replay_table import progress_bar, shown_runs
    from quire.sim.comparison import compare
    from quire.sim.trace import open_trace

    grid = grid_of(cache, engine, tiers, hisparse)
    trace = open_trace(output.replayed, limit=cache.limit, seed=cache.trace_seed)
    if grid.resizes and (fleet != ReplayedFleet() or roles != ReplayedRoles()):
        raise InvalidInput(
            "--resizes: not yet with several engines.", fix="leave --replicas, --prefill and --decode out."
        )
    if fleet != ReplayedFleet():
        return _replicas(trace, grid, cache, roles, fleet)
    if roles != ReplayedRoles():
        return _roles(trace, grid, cache, roles)
    with progress_bar(len(trace)) as progress:
        runs = compare(trace, grid, progress)
    data = [run.as_dict() for run in runs]
    return Report(data, lambda: shown_runs(trace, runs), pictures=lambda: run_pictures(runs))


def _roles(trace: Trace, grid: Grid, cache: ReplayedCache, roles: ReplayedRoles) -> Report:
    """Engines with roles, and as many without."""
    from quire.cli.replay_pictures import engines_pictures
    from quire.cli.replay_table import progress_bar, roles_table
    from quire.prefix.evict import DEFAULT_POLICY
    from quire.sim.comparison import replay_roles

    if grid.hisparse:
        raise InvalidInput("--hisparse: not yet with roles.", fix="leave --prefill and --decode out.")
    if roles.num_prefill is None:
        raise InvalidInput("no engine computes prompts for others.", fix="add --prefill 1, or leave --decode out.")
    if cache.policies is None:
        grid = replace(grid, policies=[DEFAULT_POLICY])
    link = roles.changed(failure_seed=cache.trace_seed)
    with progress_bar(len(trace)) as progress:
        apart, same = replay_roles(trace, grid, link, roles.num_prefill, roles.num_decode or 1, progress)
    both = (apart, same)
    return Report(
        [each.as_dict() for each in both], lambda: roles_table(trace, both), pictures=lambda: engines_pictures(both)
    )


def _replicas(trace: Trace, grid: Grid, cache: ReplayedCache, roles: ReplayedRoles, fleet: ReplayedFleet) -> Report:
    """Engines behind each router."""
    from quire.cli.replay_pictures import engines_pictures
    from quire.cli.replay_table import progress_bar, replicas_table
    from quire.prefix.evict import DEFAULT_POLICY
    from quire.sim.comparison import replay_replicas
    from quire.sim.routers import ROUTERS

    if fleet.num_replicas == 1:
        raise InvalidInput("there is no router in front of one engine.", fix="add --replicas 4, say.")
    if grid.hisparse or roles != ReplayedRoles():
        raise InvalidInput("--replicas: not yet with roles or hot buffers.", fix="leave --prefill and --hisparse out.")
    names = list(dict.fromkeys(each.strip() for each in (fleet.routers or ",".join(ROUTERS)).split(",")))
    if unknown := [name for name in names if name not in ROUTERS]:
        raise InvalidInput(f"there is no router '{unknown[0]}'.", fix=f"use some of {','.join(ROUTERS)}.")
    if cache.policies is None:
        grid = replace(grid, policies=[DEFAULT_POLICY])
    with progress_bar(len(trace)) as progress:
        found = replay_replicas(trace, grid, fleet.changed(loss_seed=cache.trace_seed), names, progress)
    data = [each.as_dict() for each in found]
    return Report(data, lambda: replicas_table(trace, found), pictures=lambda: engines_pictures(found))


def _names() -> Report:
    from quire.prefix.evict import POLICIES
    from quire.sim.trace import FORMATS
    from quire.sim.workloads import WORKLOADS

    workloads = {name: inspect.cleandoc(make.__doc__ or "") for name, make in WORKLOADS.items()}
    formats = [found.name for found in FORMATS]

    def shown() -> Iterator[RenderableType]:
        yield Text("Workloads, with settings as in chat:requests=500,rate=4; tenants as in noisy:9,quiet:1:", "bold")
        summaries = {name: about.partition(". ")[0].replace("\n", " ") for name, about in workloads.items()}
        yield named_rows((f"  {name}", Text(about, "dim")) for name, about in summaries.items())
        yield "Trace formats: " + ", ".join(formats)
        yield "Policies: " + ", ".join(POLICIES)

    return Report({"workloads": workloads, "formats": formats, "policies": list(POLICIES)}, shown)
