"""A plan for several values of one setting."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.cli.planned_model import PlannedModel
from quire.errors import QuireError
from quire.plan.settings import PlanSettings
from quire.settings.setting import parse_tokens

_DEFAULTS = {
    "context": "4k,8k,16k,32k,64k,128k",
    "concurrency": "1,4,16,64,256",
    "dtype": "auto,fp8_e4m3,nvfp4",
    "page-size": "1,16,32,64,128,256",
    "tp": "1,2,4,8",
}
_SETTINGS = {"context": "max_model_len", "concurrency": "concurrency", "page-size": "page_size"}
_COLUMNS = ("tokens", "bytes per token", "requests at once", "each of", "largest request", "fits", "refused")


def sweep_rows(subject: PlannedModel, settings: PlanSettings, what: str, values: str | None) -> list[dict[str, Any]]:
    """A row of a table for each value of `what`; where a plan is refused, "refused" says why. Raises InvalidInput."""
    rows: list[dict[str, Any]] = []
    for text in map(str.strip, (values or _defaults(subject, what)).split(",")):
        changed = _with(settings, what, text)
        try:
            plan = subject.plan_or_least(changed)
        except QuireError as error:
            rows.append({what: text} | dict.fromkeys(_COLUMNS) | {"fits": False, "refused": error.message})
            continue
        price = float(plan.bytes_per_token)
        numbers = (
            plan.config.max_total_num_tokens,
            int(price) if price.is_integer() else round(price, 2),
            plan.requests_at(plan.context),
            plan.context,
            plan.largest_request,
            plan.fits,
            None,
        )
        rows.append({what: text} | dict(zip(_COLUMNS, numbers, strict=True)))
    if not any(row["refused"] for row in rows):
        for row in rows:
            del row["refused"]
    return rows


def _defaults(subject: PlannedModel, what: str) -> str:
    """The default values: contexts only up to the model's own."""
    found = _DEFAULTS[what].split(",")
    if what == "context":
        most = subject.spec.context_length
        found = [text for text in found if parse_tokens(text) < most] + [str(most)]
    return ",".join(found)


def _with(settings: PlanSettings, what: str, text: str) -> PlanSettings:
    if what == "dtype":
        return settings.changed(kv_dtype=text)
    number = parse_tokens(text)
    if what == "tp":
        return settings.changed(parallel=replace(settings.parallel, tp=number))
    return settings.changed(**{_SETTINGS[what]: number})
