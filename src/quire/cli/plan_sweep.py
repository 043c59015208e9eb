"""A plan asked again and again with one setting varied: a table, and a picture of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from quire.cli.planned_model import PlannedModel
from quire.errors import QuireError
from quire.plan.budget import parse_tokens
from quire.plan.plan import PlanSettings

_DEFAULTS = {
    "context": "4k,8k,16k,32k,64k,128k",
    "concurrency": "1,4,16,64,256",
    "dtype": "auto,fp8_e4m3,nvfp4",
    "page-size": "1,16,32,64,128,256",
    "tp": "1,2,4,8",
}

COLUMNS = ("tokens", "bytes per token", "requests at once", "each of", "largest request", "fits", "refused")


def sweep_rows(
    subject: PlannedModel, settings: PlanSettings, what: str, values: str | None
) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
    """Columns and rows of a sweep over `what`. What is refused has a row that says why. Raises InvalidInput."""
    rows: list[tuple[Any, ...]] = []
    for text in (values or _defaults(subject, what)).split(","):
        text = text.strip()
        changed = _with(settings, what, text)
        try:
            plan = subject.plan_or_least(changed)
        except QuireError as error:
            rows.append((text, None, None, None, None, None, False, error.message))
            continue
        price = float(plan.bytes_per_token)
        rows.append(
            (
                text,
                plan.config.max_total_num_tokens,
                int(price) if price == int(price) else round(price, 2),
                plan.requests_at(plan.context),
                plan.context,
                plan.largest_request,
                plan.fits,
                None,
            )
        )
    columns = (what, *COLUMNS)
    if not any(row[-1] for row in rows):
        return columns[:-1], [row[:-1] for row in rows]
    return columns, rows


def _defaults(subject: PlannedModel, what: str) -> str:
    """The values that are swept when none are given: contexts only up to the model's own."""
    found = _DEFAULTS[what].split(",")
    if what == "context":
        most = subject.spec.context_length
        found = [text for text in found if parse_tokens(text) < most] + [str(most)]
    return ",".join(found)


def _with(settings: PlanSettings, what: str, text: str) -> PlanSettings:
    if what == "dtype":
        return replace(settings, kv_dtype=text)
    number = parse_tokens(text)
    if what == "tp":
        return replace(settings, parallel=replace(settings.parallel, tp=number))
    if what == "context":
        return replace(settings, context=number)
    if what == "concurrency":
        return replace(settings, concurrency=number)
    return replace(settings, page_size=number)


def draw(path: Path, title: str, what: str, rows: Sequence[Sequence[Any]]) -> None:
    """Draw tokens and requests over the swept values into `path`; its suffix says the format. Raises InvalidInput."""
    from quire.cli.replay_plot import check_picture, save_picture

    check_picture(path)
    from matplotlib import pyplot

    names = [str(row[0]) for row in rows]
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axis, column, label in ((axes[0], 1, "tokens"), (axes[1], 3, "requests at once")):
        heights = [row[column] or 0 for row in rows]
        axis.bar(names, heights, color="#3b6ea5")
        axis.bar_label(axis.containers[0], labels=[f"{height:,}" for height in heights], fontsize=8)
        axis.set_xlabel(what)
        axis.set_title(label)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    save_picture(figure, path)
