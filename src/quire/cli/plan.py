"""`quire plan`: how many tokens and requests a budget holds, why, and what to change. No weights are needed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from quire.cli.plan_request import PlanRequest
from quire.engine.setting import Settings, setting
from quire.errors import InvalidInput

if TYPE_CHECKING:
    from quire.cli.planned_model import PlannedModel
    from quire.plan.plan import PlanSettings

EXIT_DOES_NOT_FIT = 2

_OUTPUT = "Output"


class PlanOutput(Settings):
    """What is printed of a plan."""

    measure: bool = setting(
        False, "Load the model here and measure instead of estimating.", group="Budget", option="--measure"
    )
    why: bool = setting(False, "Explain each line by its formula.", group=_OUTPUT, option="--why")
    sweep: Literal["context", "concurrency", "dtype", "page-size", "tp"] | None = setting(
        None, "Vary one thing: {choices}.", group=_OUTPUT
    )
    values: str | None = setting(None, "The values to sweep: 4k,8k,16k.", group=_OUTPUT)
    plot: Path | None = setting(None, "Draw the sweep into a PNG or SVG file.", group=_OUTPUT)
    compare: tuple[str, str] | None = setting(
        None,
        "Two models side by side; settings may follow a comma: llama-3.1-8b,kv-dtype=fp8.",
        group=_OUTPUT,
    )
    names: bool = setting(False, "Print the catalogue.", group=_OUTPUT, option="--list")


def plan(request: PlanRequest, output: PlanOutput, *, as_json: bool) -> None:
    """Plan a server's memory from a model's config.json and a budget.

    Exit codes: 0 fits, 2 does not fit or bad input, 3 a model or combination that is refused.

    [dim]Example:[/dim] quire plan llama-3.1-70b --gpu h100-80gb --tp 4 --context 32k
    """
    if output.names:
        _print_catalogue(as_json)
    elif output.compare is not None:
        _compare(output.compare, request, as_json)
    else:
        if output.sweep is None and (output.plot is not None or output.values is not None):
            raise InvalidInput("--plot and --values belong to a sweep.", fix="add --sweep context, say.")
        subject, settings = request.planned_model(), request.settings()
        if output.measure:
            settings = _measured(request.model or "", settings)
        if output.sweep is not None:
            _sweep(subject, settings, output.sweep, output.values, output.plot, as_json)
        else:
            _one(subject, settings, why=output.why, as_json=as_json)


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


def _compare(two: tuple[str, str], request: PlanRequest, as_json: bool) -> None:
    from quire.cli.plan_table import rows_table
    from quire.plan.report import comparison, plan_as_dict

    requests = {text: request.changed(text) for text in two}
    plans = {text: each.planned_model().plan_or_least(each.settings()) for text, each in requests.items()}
    if as_json:
        print(json.dumps({name: plan_as_dict(found, model=name) for name, found in plans.items()}))
        return
    rows = [(what, *numbers) for what, numbers in comparison(plans)]
    Console().print(
        Panel(rows_table(("", *plans), rows), title="[bold]Side by side[/bold]", title_align="left", expand=False)
    )


def _measured(model: str, settings: PlanSettings) -> PlanSettings:
    """The settings with a ledger from this machine. Raises QuireError if the model cannot be loaded here."""
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
