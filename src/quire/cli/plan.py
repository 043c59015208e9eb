"""`quire plan`: how many tokens and requests a budget holds, why, and what to change. No weights are needed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.console import RenderableType
from rich.text import Text

from quire.cli.plan_request import PlanRequest
from quire.cli.report import Report, named_rows, panel, plain_table
from quire.engine.setting import Settings, setting
from quire.errors import InvalidInput

if TYPE_CHECKING:
    from quire.cli.planned_model import PlannedModel
    from quire.plan.plan import PlanSettings

EXIT_DOES_NOT_FIT = 2

_OUTPUT = "Output"


class PlanOutput(Settings):
    """The output of a plan."""

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


def plan(request: PlanRequest, output: PlanOutput) -> Report:
    """Plan a server's memory from a model's config.json and a budget.

    Exit codes: 0 fits, 2 does not fit or bad input, 3 a model or combination that is refused.

    [dim]Example:[/dim] quire plan llama-3.1-70b --gpu h100-80gb --tp 4 --context 32k
    """
    if output.names:
        return _catalogue()
    if output.compare is not None:
        return _comparison(output.compare, request)
    if output.sweep is None and (output.plot is not None or output.values is not None):
        raise InvalidInput("--plot and --values belong to a sweep.", fix="add --sweep context, say.")
    subject, settings = request.planned_model().with_draft(request.settings())
    if output.measure:
        settings = _measured(request.model or "", settings)
    if output.sweep is not None:
        return _sweep(subject, settings, output.sweep, output.values, output.plot)
    return _one(subject, settings, why=output.why)


def _one(subject: PlannedModel, settings: PlanSettings, *, why: bool) -> Report:
    from quire.cli.plan_table import plan_panel
    from quire.plan.advice import options_to_fit
    from quire.plan.report import explain, plan_as_dict

    found = subject.plan_or_least(settings)
    to_fit = () if found.fits else options_to_fit(found, subject.plan)
    data = plan_as_dict(found, to_fit=to_fit, model=subject.name) | {"source": subject.found}
    if why:
        data["why"] = [{"name": what, "why": reason} for what, reason in explain(found)]
    parallel = settings.parallel
    where = f" on {settings.device.name}" if settings.device is not None else ""
    ranks = [f"{name} {getattr(parallel, name)}" for name in ("tp", "pp", "dp", "dcp") if getattr(parallel, name) > 1]
    title = ", ".join([f"{subject.name}{where}", *ranks]) + ":"
    return Report(data, lambda: [plan_panel(data, title)], 0 if found.fits else EXIT_DOES_NOT_FIT)


def _sweep(subject: PlannedModel, settings: PlanSettings, what: str, values: str | None, plot: Path | None) -> Report:
    from quire.cli.plan_sweep import sweep_rows

    rows = sweep_rows(subject, settings, what, values)
    if plot is not None:
        from quire.cli.chart import draw_sweep

        draw_sweep(plot, subject.name, what, rows)

    def shown() -> Iterator[RenderableType]:
        columns = tuple(rows[0])
        yield panel(plain_table(columns, (tuple(row.values()) for row in rows), wraps=columns), subject.name)
        if plot is not None:
            yield f"Drawn into {plot}."

    data = {"model": subject.name, "sweep": what, "rows": rows}
    return Report(data, shown, 0 if any(row["fits"] for row in rows) else EXIT_DOES_NOT_FIT)


def _comparison(two: tuple[str, str], request: PlanRequest) -> Report:
    from quire.plan.report import comparison, plan_as_dict

    requests = {text: request.changed(text) for text in two}
    subjects = {text: each.planned_model().with_draft(each.settings()) for text, each in requests.items()}
    plans = {text: subject.plan_or_least(settings) for text, (subject, settings) in subjects.items()}
    data = {name: plan_as_dict(found, model=name) for name, found in plans.items()}
    columns = ("", *plans)
    rows = [(what, *numbers) for what, numbers in comparison(plans)]
    return Report(data, lambda: [panel(plain_table(columns, rows, wraps=columns), "Side by side")])


def _measured(model: str, settings: PlanSettings) -> PlanSettings:
    """The settings with a ledger from this machine. Raises QuireError if the model cannot be loaded here."""
    from quire.engine.measure import measure_device
    from quire.spec.catalogue import catalogue_model

    if settings.parallel.tp * settings.parallel.pp > 1:
        raise InvalidInput("--measure loads the whole model on one device.", fix="measure without --tp and --pp.")
    known = catalogue_model(model)
    device, lines = measure_device(known.hub if known is not None else model, chunk=settings.chunk)
    return replace(settings, device=device, measured=lines)


def _catalogue() -> Report:
    from quire.spec.catalogue import CATALOGUE

    hubs = {name: known.hub for name, known in CATALOGUE.items()}
    return Report(hubs, lambda: [named_rows((name, Text(hub, "dim")) for name, hub in hubs.items())])
