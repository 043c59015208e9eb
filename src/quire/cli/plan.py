"""`quire plan`: how many tokens and requests a budget holds, why, and what to change. No weights are needed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from quire.cli.options import DebugOption, JsonOption
from quire.cli.report import reported

if TYPE_CHECKING:
    from quire.cli.plan_inputs import PlannedModel
    from quire.plan.planner import PlanSettings

BUDGET = "Budget"
LOAD = "Load"
SPLIT = "Split between pools"
PARALLEL = "Parallelism"
SPECULATION = "Speculation"
OUTPUT = "Output"

EXIT_DOES_NOT_FIT = 2

SWEEPS = ("context", "concurrency", "dtype", "page-size", "tp")


def _budget(**options: Any) -> Any:
    return typer.Option(rich_help_panel=BUDGET, **options)


def plan(
    model: Annotated[
        str | None,
        typer.Argument(help="A name in the catalogue, a config.json or its folder, or a hub id.", show_default=False),
    ] = None,
    kv_memory: Annotated[
        str | None, _budget(help="Exactly the bytes that the pools of a rank may take: 40GiB.")
    ] = None,
    gpu: Annotated[str | None, _budget(help="A device by name: h100-80gb. Pools get what the rest leaves.")] = None,
    device_memory: Annotated[str | None, _budget(help="The device's memory, where its name is not known.")] = None,
    mem_fraction_static: Annotated[
        float | None, _budget(help="Share of the device for weights and pools; printed back in bytes.")
    ] = None,
    weights: Annotated[str | None, _budget(help="Bytes of weights on a rank, instead of the estimate.")] = None,
    measure: Annotated[
        bool, _budget(help="Load the model on this machine's device and measure the ledger's lines.")
    ] = False,
    kv_dtype: Annotated[
        str | None, typer.Option(help="auto, fp8_e4m3, fp8_e5m2, mxfp8, nvfp4, fp4_e2m1, ...", rich_help_panel=BUDGET)
    ] = None,
    dtype: Annotated[str | None, _budget(help="The model's dtype, where its configuration names none.")] = None,
    state_dtype: Annotated[str | None, _budget(help="Element type of recurrent states. (default: float32)")] = None,
    page_size: Annotated[int | None, _budget(help="Tokens in a page. (default: 16)")] = None,
    context: Annotated[str | None, typer.Option(help="Longest request, in tokens: 32k.", rich_help_panel=LOAD)] = None,
    concurrency: Annotated[
        int | None, typer.Option(help="Requests of that length that must fit at once.", rich_help_panel=LOAD)
    ] = None,
    input_tokens: Annotated[
        str | None, typer.Option(help="Tokens of an expected prompt.", rich_help_panel=LOAD)
    ] = None,
    output_tokens: Annotated[
        str | None, typer.Option(help="Tokens of an expected answer.", rich_help_panel=LOAD)
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Expected requests, from a trace (JSON lines or CSV).", rich_help_panel=LOAD)
    ] = None,
    chunk: Annotated[
        int | None,
        typer.Option("--max-num-batched-tokens", help="Tokens of one step. (default: 2048)", rich_help_panel=LOAD),
    ] = None,
    shares: Annotated[
        bool,
        typer.Option("--prefix-caching/--no-prefix-caching", help="Keep finished prefixes.", rich_help_panel=LOAD),
    ] = True,
    swa_full_tokens_ratio: Annotated[
        float | None,
        typer.Option(help="Window tokens per full token. (default: from the load)", rich_help_panel=SPLIT),
    ] = None,
    mamba_full_memory_ratio: Annotated[
        float | None,
        typer.Option(help="Bytes of state per other byte. (default: from the load)", rich_help_panel=SPLIT),
    ] = None,
    max_mamba_cache_size: Annotated[int | None, typer.Option(help="State slots.", rich_help_panel=SPLIT)] = None,
    max_total_tokens: Annotated[
        int | None, typer.Option(help="At most this many tokens; every pool follows.", rich_help_panel=SPLIT)
    ] = None,
    window_pool: Annotated[
        bool,
        typer.Option("--window-pool/--no-window-pool", help="Windows have a pool of their own.", rich_help_panel=SPLIT),
    ] = True,
    tp: Annotated[int | None, typer.Option(help="Tensor parallelism.", rich_help_panel=PARALLEL)] = None,
    pp: Annotated[int | None, typer.Option(help="Pipeline stages.", rich_help_panel=PARALLEL)] = None,
    pp_layers: Annotated[
        str | None, typer.Option(help="Layers of each stage: 20,20,24.", rich_help_panel=PARALLEL)
    ] = None,
    dp: Annotated[
        int | None, typer.Option(help="Attention groups among the tp ranks.", rich_help_panel=PARALLEL)
    ] = None,
    dcp: Annotated[int | None, typer.Option(help="Ranks that share a page's tokens.", rich_help_panel=PARALLEL)] = None,
    speculative_num_steps: Annotated[
        int | None, typer.Option(help="Depth of a draft.", rich_help_panel=SPECULATION)
    ] = None,
    speculative_topk: Annotated[
        int | None, typer.Option(help="Branches of a draft. (default: 1)", rich_help_panel=SPECULATION)
    ] = None,
    speculative_num_draft_tokens: Annotated[
        int | None, typer.Option(help="Tokens verified at once.", rich_help_panel=SPECULATION)
    ] = None,
    speculative_draft_layers: Annotated[
        int | None, typer.Option(help="Draft layers with keys and values. (default: 1)", rich_help_panel=SPECULATION)
    ] = None,
    why: Annotated[
        bool, typer.Option("--why", help="Explain each line by its formula.", rich_help_panel=OUTPUT)
    ] = False,
    sweep: Annotated[
        str | None, typer.Option(help=f"Vary one thing: {', '.join(SWEEPS)}.", rich_help_panel=OUTPUT)
    ] = None,
    values: Annotated[str | None, typer.Option(help="The values to sweep: 4k,8k,16k.", rich_help_panel=OUTPUT)] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the sweep into a PNG or SVG file.", rich_help_panel=OUTPUT)
    ] = None,
    compare: Annotated[
        tuple[str, str] | None,
        typer.Option(
            help="Two models side by side; settings may follow a comma: llama-3.1-8b,kv-dtype=fp8.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    names: Annotated[bool, typer.Option("--list", help="Print the catalogue.", rich_help_panel=OUTPUT)] = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Plan a server's memory from a model's config.json and a budget.

    Exit codes: 0 fits, 2 does not fit or bad input, 3 a model or combination that is refused.

    [dim]Example:[/dim] quire plan llama-3.1-70b --gpu h100-80gb --tp 4 --context 32k
    """
    words = {
        name: value
        for name, value in locals().items()
        if name not in ("model", "why", "sweep", "values", "plot", "compare", "names", "as_json", "debug", "measure")
    }
    with reported(as_json=as_json, debug=debug):
        if names:
            _print_catalogue(as_json)
        elif compare is not None:
            _compare(compare, words, as_json)
        else:
            subject, settings = _read(model, words)
            if measure:
                settings = _measured(model or "", settings)
            if sweep is not None:
                _sweep(subject, settings, sweep, values, plot, as_json)
            else:
                _one(subject, settings, why=why, as_json=as_json)


def _read(model: str | None, words: dict[str, Any]) -> tuple[PlannedModel, PlanSettings]:
    from quire.cli.plan_inputs import plan_settings, planned_model
    from quire.errors import InvalidInput

    if model is None:
        raise InvalidInput("a plan is of a model.", fix="name one: `quire plan llama-3.1-8b`, or see --list.")
    subject = planned_model(model, dtype=words["dtype"], state_dtype=words["state_dtype"])
    return subject, plan_settings(words)


def _one(subject: PlannedModel, settings: PlanSettings, *, why: bool, as_json: bool) -> None:
    from quire.cli.plan_table import plan_panel
    from quire.plan.advice import options_to_fit
    from quire.plan.report import explain, plan_as_dict

    found = subject.plan_or_least(settings)
    to_fit = () if found.fits else options_to_fit(found, subject.plan)
    data = plan_as_dict(found, to_fit=to_fit, model=subject.name) | {"source": subject.found}
    lines = explain(found) if why else []
    if as_json:
        print(json.dumps(data | ({"why": dict(lines)} if why else {})))
    else:
        Console().print(plan_panel(data, title=_title(subject, settings), why=lines))
    if not found.fits:
        raise typer.Exit(EXIT_DOES_NOT_FIT)


def _title(subject: PlannedModel, settings: PlanSettings) -> str:
    parallel = settings.parallel
    parts = [f"{name} {getattr(parallel, name)}" for name in ("tp", "pp", "dp", "dcp") if getattr(parallel, name) > 1]
    where = f" on {settings.device.name}" if settings.device is not None else ""
    return f"{subject.name}{where}{', ' if parts else ''}{', '.join(parts)}:"


def _sweep(
    subject: PlannedModel, settings: PlanSettings, what: str, values: str | None, plot: Path | None, as_json: bool
) -> None:
    from quire.cli.plan_sweep import draw, sweep_rows
    from quire.cli.plan_table import rows_table

    columns, rows = sweep_rows(subject, settings, what, values)
    if plot is not None:
        draw(plot, subject.name, what, rows)
    if as_json:
        print(
            json.dumps(
                {"model": subject.name, "sweep": what, "rows": [dict(zip(columns, row, strict=True)) for row in rows]}
            )
        )
        return
    console = Console()
    console.print(
        Panel(rows_table(columns, rows), title=f"[bold]{subject.name}[/bold]", title_align="left", expand=False)
    )
    if plot is not None:
        console.print(f"Drawn into {plot}.")


def _compare(two: tuple[str, str], words: dict[str, Any], as_json: bool) -> None:
    from quire.cli.plan_inputs import with_settings
    from quire.cli.plan_table import rows_table
    from quire.plan.report import comparison, plan_as_dict

    plans = {}
    for text in two:
        name, own = with_settings(text, words)
        subject, settings = _read(name, own)
        plans[text] = subject.plan_or_least(settings)
    if as_json:
        print(json.dumps({name: plan_as_dict(found, model=name) for name, found in plans.items()}))
        return
    rows = [(what, *numbers) for what, numbers in comparison(plans)]
    Console().print(
        Panel(rows_table(("", *plans), rows), title="[bold]Side by side[/bold]", title_align="left", expand=False)
    )


def _measured(model: str, settings: PlanSettings) -> PlanSettings:
    """The settings with a ledger from this machine. Raises QuireError where the model cannot be loaded here."""
    from quire.engine.measure import measure_device

    device, lines = measure_device(model, chunk=settings.chunk)
    return replace(settings, device=device, measured=lines)


def _print_catalogue(as_json: bool) -> None:
    from quire.spec.catalogue import CATALOGUE

    if as_json:
        print(json.dumps({name: known.hub for name, known in CATALOGUE.items()}))
        return
    console = Console()
    for name, known in CATALOGUE.items():
        console.print(Text.assemble((f"{name:28}", "bold"), (known.hub, "dim")))
