"""`quire plan`: how many tokens and requests a budget holds, why, and what to change. No weights are needed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rich.console import RenderableType
from rich.text import Text

from quire.cli.plan_request import PlanRequest
from quire.cli.report import ListedOutput, PageOutput, Report, named_rows, panel, plain_table
from quire.errors import InvalidInput, QuireError
from quire.settings.fields import LinkFields
from quire.settings.setting import parse_tokens, setting

if TYPE_CHECKING:
    from pathlib import Path

    from quire.cli.planned_model import PlannedModel
    from quire.plan.plan import Plan
    from quire.plan.settings import PlanSettings

EXIT_DOES_NOT_FIT = 2

_WITHOUT_DRAFTS = (
    "output tokens/s are estimated without drafts, because how many are accepted depends on the requests; give "
    "--decode-rate as measured with them. Pages are planned with drafts."
)

_OUTPUT, _ROLES = "Output", "Roles"

_SWEPT = {
    "context": "4k,8k,16k,32k,64k,128k",
    "concurrency": "1,4,16,64,256",
    "dtype": "auto,fp8_e4m3,nvfp4",
    "page-size": "1,16,32,64,128,256",
    "tp": "1,2,4,8",
}
_SWEEP_SETTINGS = {"context": "max_model_len", "concurrency": "concurrency", "page-size": "page_size"}
_SWEEP_COLUMNS = ("tokens", "bytes per token", "requests at once", "each of", "largest request", "fits", "refused")


class PlanOutput(PageOutput, ListedOutput):
    """The output of a plan."""

    GROUP: ClassVar[str] = _OUTPUT

    measure: bool = setting(
        False, "Load the model here and measure instead of estimating.", group="Budget", option="--measure"
    )
    why: bool = setting(False, "Explain each line by its formula.", option="--why")
    sweep: Literal["context", "concurrency", "dtype", "page-size", "tp"] | None = setting(
        None, "Vary one thing: {choices}."
    )
    values: str | None = setting(None, "The values to sweep: 4k,8k,16k.")
    compare: tuple[str, str] | None = setting(
        None, "Two models side by side; settings may follow a comma: llama-3.1-8b,kv-dtype=fp8."
    )


class PlanRoles(LinkFields):
    """Engines that compute prompts and others that answer, for a rate of requests."""

    GROUP: ClassVar[str] = _ROLES

    requests_per_second: float | None = setting(
        None, "Plan engines of each role for so many requests of --input-tokens and --output-tokens.", gt=0
    )
    decode_rate: float | None = setting(
        None, "Output tokens a second of an engine.", otherwise="estimated from the --gpu", gt=0
    )
    cached: float = setting(0.0, "Share of a prompt that the engine that answers has cached.", ge=0, lt=1)


def plan(request: PlanRequest, roles: PlanRoles, output: PlanOutput) -> Report:
    """Plan a server's memory from a model's config.json and a budget.

    Exit codes: 0 fits, 2 does not fit or bad input, 3 a model or combination that is refused.

    [dim]Example:[/dim] quire plan llama-3.1-70b --gpu h100-80gb --tp 4 --context 32k

    [dim]Example:[/dim] quire plan llama-3.1-8b --gpu h100-80gb --requests-per-second 20 --input-tokens 2k
    --output-tokens 200
    """
    if output.names:
        return _catalogue()
    if output.compare is not None:
        return _comparison(output.compare, request)
    if output.sweep is None and output.values is not None:
        raise InvalidInput("--values belong to a sweep.", fix="add --sweep context, say.")
    subject, settings = request.planned_model().with_draft(request.settings())
    if output.measure:
        settings = _measured(request.planned or "", settings)
    if output.sweep is not None:
        return _sweep(subject, settings, output.sweep, output.values)
    if roles.requests_per_second is not None:
        return _roles(subject, settings, request, roles)
    if roles != PlanRoles() or request.prefill_rate is not None:
        raise InvalidInput("roles are planned for a rate of requests.", fix="add --requests-per-second 10, say.")
    return _one(subject, settings, request, why=output.why)


def _one(subject: PlannedModel, settings: PlanSettings, request: PlanRequest, *, why: bool) -> Report:
    from quire.cli.plan_table import ledger_picture, plan_panel
    from quire.plan.advice import options_to_fit
    from quire.plan.report import explain, plan_as_dict

    found = subject.plan_or_least(settings)
    to_fit = () if found.fits else options_to_fit(found, subject.plan)
    data = plan_as_dict(found, to_fit=to_fit, model=subject.name) | {"source": subject.found}
    worth = found.fits
    if request.tenants is not None:
        data["tenants"] = _tenants(found, request.tenants)
    if data["hisparse"] is not None:
        data["hisparse"]["gain"] = gain = _gain(subject, found, request)
        worth &= not gain["loses"]
    if why:
        data["why"] = [{"name": what, "why": reason} for what, reason in explain(found)]
    parallel = settings.parallel
    where = f" on {settings.rank_device.name}" if settings.rank_device is not None else ""
    ranks = [f"{name} {getattr(parallel, name)}" for name in ("tp", "pp", "dp", "dcp") if getattr(parallel, name) > 1]
    title = ", ".join([f"{subject.name}{where}", *ranks]) + ":"
    return Report(
        data, lambda: [plan_panel(data, title)], 0 if worth else EXIT_DOES_NOT_FIT, lambda: [ledger_picture(data)]
    )


def _tenants(plan: Plan, path: Path) -> list[dict[str, Any]]:
    """The tenants of a file, by the rules of a server with this plan: it checks them, and admits their requests."""
    from quire.cache import KVCache
    from quire.plan.report import tenants_as_dict
    from quire.settings.tenants import read_tenants
    from quire.spec.events import Namespace

    terms = read_tenants(path)
    admission = KVCache(plan.memory, tenants=terms).admission
    # No request is one of a tenant without keys, but for `default`.
    salts = [each.keys[0] if each.keys else None if at else "" for at, each in enumerate(terms)]
    largest = [0 if salt is None else admission.largest_request(Namespace(salt=f"{salt}/")) for salt in salts]
    return tenants_as_dict(terms, plan, largest)


def _gain(subject: PlannedModel, plan: Plan, request: PlanRequest) -> dict[str, Any]:
    """A plan with latents in host memory beside one with all of them on the device."""
    from quire.plan.hisparse import hisparse_costs, hisparse_gain

    costs = hisparse_costs(
        plan,
        hit_rate=request.hit_rate,
        link_rate=None if request.host_bandwidth is None else request.host_bandwidth * 1e9,
        step_s=None if request.decode_ms is None else request.decode_ms / 1e3,
    )
    return asdict(hisparse_gain(plan, subject.plan, costs))


def _roles(subject: PlannedModel, settings: PlanSettings, request: PlanRequest, roles: PlanRoles) -> Report:
    from quire.cli.plan_table import roles_panel
    from quire.plan.roles import RoleLoad, plan_roles, sent_bytes

    if request.input_tokens is None or request.output_tokens is None:
        raise InvalidInput("the lengths of requests are not given.", fix="add --input-tokens and --output-tokens.")
    assert roles.requests_per_second is not None
    prefill_rate, decode_rate = request.prefill_rate, roles.decode_rate
    is_without_drafts = settings.speculative_config is not None and decode_rate is None
    found = subject.plan_or_least(settings)
    if prefill_rate is None or decode_rate is None:
        if request.gpu is None:
            raise InvalidInput(
                "the speed of an engine is not given.", fix="add --gpu, or --prefill-rate and --decode-rate."
            )
        from quire.cli.replay_grid import planned_rates

        rates = planned_rates(request, found, request.input_tokens, request.output_tokens)
        prefill_rate, decode_rate = prefill_rate or rates[0], decode_rate or rates[1]
    load = RoleLoad(
        requests_per_s=roles.requests_per_second,
        prompt_tokens=request.input_tokens,
        output_tokens=request.output_tokens,
        prefill_rate=prefill_rate,
        decode_rate=decode_rate,
        token_bytes=settings.parallel.tp * sent_bytes(found.memory, request.input_tokens) / request.input_tokens,
        link_rate=roles.link_rate,
        cached=roles.cached,
    )
    data = {"model": subject.name, "load": asdict(load)} | asdict(plan_roles(load))
    data["notes"] = [_WITHOUT_DRAFTS] if is_without_drafts else []
    return Report(data, lambda: [roles_panel(data)])


def _sweep(subject: PlannedModel, settings: PlanSettings, what: str, values: str | None) -> Report:
    rows = _sweep_rows(subject, settings, what, values)

    def shown() -> list[RenderableType]:
        columns = tuple(rows[0])
        return [panel(plain_table(columns, (tuple(row.values()) for row in rows), wraps=columns), subject.name)]

    data = {"model": subject.name, "sweep": what, "rows": rows}
    return Report(data, shown, 0 if any(row["fits"] for row in rows) else EXIT_DOES_NOT_FIT, lambda: _swept(what, rows))


def _swept(what: str, rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Charts of a sweep over numbers."""
    from quire.cli.report_page import chart

    planned = [row for row in rows if row["tokens"] is not None]
    if what == "dtype" or len(planned) < 2:
        return
    planned.sort(key=lambda row: parse_tokens(row[what]))
    x = [parse_tokens(row[what]) for row in planned]
    for name, color in (("tokens", "device"), ("requests at once", "host")):
        yield chart(
            f"{name}, by {what}", what, x, [{"name": name, "color": color, "values": [row[name] for row in planned]}]
        )


def _sweep_rows(subject: PlannedModel, settings: PlanSettings, what: str, values: str | None) -> list[dict[str, Any]]:
    """A row of a table for each value of `what`; where a plan is refused, "refused" says why. Raises InvalidInput."""
    rows: list[dict[str, Any]] = []
    for text in map(str.strip, (values or _sweep_values(subject, what)).split(",")):
        changed = _with(settings, what, text)
        try:
            plan = subject.plan_or_least(changed)
        except QuireError as error:
            rows.append({what: text} | dict.fromkeys(_SWEEP_COLUMNS) | {"fits": False, "refused": error.message})
            continue
        price = float(plan.bytes_per_token)
        numbers = (
            plan.tokens,
            int(price) if price.is_integer() else round(price, 2),
            plan.requests_at(plan.context),
            plan.context,
            plan.largest_request,
            plan.fits,
            None,
        )
        rows.append({what: text} | dict(zip(_SWEEP_COLUMNS, numbers, strict=True)))
    if not any(row["refused"] for row in rows):
        for row in rows:
            del row["refused"]
    return rows


def _sweep_values(subject: PlannedModel, what: str) -> str:
    """The default values: contexts only up to the model's own."""
    found = _SWEPT[what].split(",")
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
    return settings.changed(**{_SWEEP_SETTINGS[what]: number})


def _comparison(two: tuple[str, str], request: PlanRequest) -> Report:
    from quire.cli.plan_table import ledger_picture
    from quire.plan.report import comparison, plan_as_dict

    requests = {text: request.variant(text) for text in two}
    subjects = {text: each.planned_model().with_draft(each.settings()) for text, each in requests.items()}
    plans = {text: subject.plan_or_least(settings) for text, (subject, settings) in subjects.items()}
    data = {name: plan_as_dict(found, model=name) for name, found in plans.items()}
    columns = ("", *plans)
    rows = [(what, *numbers) for what, numbers in comparison(plans)]
    return Report(
        data,
        lambda: [panel(plain_table(columns, rows, wraps=columns), "Side by side")],
        pictures=lambda: [ledger_picture(each, name) for name, each in data.items()],
    )


def _measured(model: str, settings: PlanSettings) -> PlanSettings:
    """The settings with a ledger from this machine. Raises QuireError if the model cannot be loaded here."""
    from quire.engine.device.measure import measure_device
    from quire.spec.catalogue import catalogue_model

    if settings.parallel.tp * settings.parallel.pp > 1:
        raise InvalidInput("--measure loads the whole model on one device.", fix="measure without --tp and --pp.")
    known = catalogue_model(model)
    device, lines = measure_device(known.hub if known is not None else model, chunk=settings.max_num_batched_tokens)
    return settings.changed(rank_device=device, measured=lines)


def _catalogue() -> Report:
    from quire.spec.catalogue import CATALOGUE

    hubs = {name: known.hub for name, known in CATALOGUE.items()}
    return Report(hubs, lambda: [named_rows((name, Text(hub, "dim")) for name, hub in hubs.items())])
