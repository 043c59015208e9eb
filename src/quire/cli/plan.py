"""`quire plan`: how many tokens and requests a budget holds, why, and what to change. No weights are needed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from quire.cli import plan_options as options
from quire.cli.options import DebugOption, JsonOption
from quire.cli.report import reported
from quire.errors import InvalidInput

if TYPE_CHECKING:
    from quire.cli.plan_inputs import PlannedModel
    from quire.plan.plan import PlanSettings

EXIT_DOES_NOT_FIT = 2

_ABOUT_OUTPUT = {"model", "measure", "why", "sweep", "values", "plot", "compare", "names", "as_json", "debug"}


def plan(
    model: options.Model = None,
    kv_memory: options.KvMemory = None,
    gpu: options.Gpu = None,
    device_memory: options.DeviceMemory = None,
    mem_fraction_static: options.MemFraction = None,
    weights: options.Weights = None,
    measure: options.Measure = False,
    kv_dtype: options.KvDtype = None,
    dtype: options.Dtype = None,
    state_dtype: options.StateDtype = None,
    page_size: options.PageSize = None,
    context: options.Context = None,
    concurrency: options.Concurrency = None,
    input_tokens: options.InputTokens = None,
    output_tokens: options.OutputTokens = None,
    trace: options.Trace = None,
    chunk: options.Chunk = None,
    shares: options.Shares = True,
    swa_full_tokens_ratio: options.SwaRatio = None,
    mamba_full_memory_ratio: options.MambaRatio = None,
    max_mamba_cache_size: options.MambaSize = None,
    max_total_tokens: options.MaxTokens = None,
    window_pool: options.WindowPool = True,
    tp: options.Tp = None,
    pp: options.Pp = None,
    pp_layers: options.PpLayers = None,
    dp: options.Dp = None,
    dcp: options.Dcp = None,
    speculative_num_steps: options.Steps = None,
    speculative_topk: options.TopK = None,
    speculative_num_draft_tokens: options.DraftTokens = None,
    speculative_draft_layers: options.DraftLayers = None,
    why: options.Why = False,
    sweep: options.Sweep = None,
    values: options.Values = None,
    plot: options.Plot = None,
    compare: options.Compare = None,
    names: options.Names = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Plan a server's memory from a model's config.json and a budget.

    Exit codes: 0 fits, 2 does not fit or bad input, 3 a model or combination that is refused.

    [dim]Example:[/dim] quire plan llama-3.1-70b --gpu h100-80gb --tp 4 --context 32k
    """
    words = {name: value for name, value in locals().items() if name not in _ABOUT_OUTPUT}
    with reported(as_json=as_json, debug=debug):
        if names:
            _print_catalogue(as_json)
        elif compare is not None:
            _compare(compare, words, as_json)
        else:
            if sweep is None and (plot is not None or values is not None):
                raise InvalidInput("--plot and --values belong to a sweep.", fix="add --sweep context, say.")
            subject, settings = _read(model, words)
            if measure:
                settings = _measured(model or "", settings)
            if sweep is not None:
                _sweep(subject, settings, sweep, values, plot, as_json)
            else:
                _one(subject, settings, why=why, as_json=as_json)


def _read(model: str | None, words: dict[str, Any]) -> tuple[PlannedModel, PlanSettings]:
    from quire.cli.plan_inputs import plan_settings, planned_model

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
        print(json.dumps(data | ({"why": [{"name": what, "why": reason} for what, reason in lines]} if why else {})))
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
    fits = any(row[columns.index("fits")] for row in rows)
    if plot is not None:
        draw(plot, subject.name, what, rows)
    if as_json:
        print(
            json.dumps(
                {"model": subject.name, "sweep": what, "rows": [dict(zip(columns, row, strict=True)) for row in rows]}
            )
        )
        raise typer.Exit(0 if fits else EXIT_DOES_NOT_FIT)
    console = Console()
    console.print(
        Panel(rows_table(columns, rows), title=f"[bold]{subject.name}[/bold]", title_align="left", expand=False)
    )
    if plot is not None:
        console.print(f"Drawn into {plot}.")
    if not fits:
        raise typer.Exit(EXIT_DOES_NOT_FIT)


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
    from quire.spec.catalogue import catalogue_model

    if settings.parallel.tp * settings.parallel.pp > 1:
        raise InvalidInput("--measure loads the whole model on one device.", fix="measure without --tp and --pp.")
    known = catalogue_model(model)
    device, lines = measure_device(known.hub if known is not None else model, chunk=settings.chunk)
    return replace(settings, device=device, measured=lines)


def _print_catalogue(as_json: bool) -> None:
    from quire.spec.catalogue import CATALOGUE

    if as_json:
        print(json.dumps({name: known.hub for name, known in CATALOGUE.items()}))
        return
    console = Console()
    for name, known in CATALOGUE.items():
        console.print(Text.assemble((f"{name:30} ", "bold"), (known.hub, "dim")))
