"""A plan in words and in data: the dictionary that machines read and tables are drawn from, and why each line is so."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from quire.plan.advice import Option
from quire.plan.budget import format_bytes
from quire.plan.configurator import PADDING, PoolSize
from quire.plan.devices import Line
from quire.plan.plan import Plan
from quire.spec.layout import PER_PAGE, Field
from quire.spec.pages import pages_for

_NEXT_PAGE = 2  # the runner-up of a page size is twice as large


def plan_as_dict(plan: Plan, *, to_fit: Sequence[Option] = (), model: str = "") -> dict[str, Any]:
    """Everything a plan says, as JSON values. Bytes and frames are those of one rank; frames include frame 0."""
    config, settings = plan.config, plan.settings
    return {
        "model": model or plan.spec.architecture,
        "architecture": plan.spec.architecture,
        "kv_dtype": settings.kv_dtype if settings.kv_dtype != "auto" else plan.spec.dtype.value,
        "fits": plan.fits,
        "kv_bytes": plan.kv_bytes,
        "page_size": plan.page_size,
        "bytes_per_token": _number(float(plan.bytes_per_token)),
        "bias_bytes": config.bias,
        "max_total_num_tokens": config.max_total_num_tokens,
        "full_max_total_num_tokens": plan.full_tokens,
        "swa_max_total_num_tokens": plan.window_tokens,
        "compressed_max_total_num_tokens": {str(k): v for k, v in config.compressed_max_total_num_tokens} or None,
        "max_running_requests": plan.max_running_requests,
        "state_slots": plan.state_slots,
        "pools": [pool_as_dict(pool, plan.page_size) for pool in config.pools],
        "ledger": [line_as_dict(line) for line in plan.ledger],
        "context": plan.context,
        "required_requests": plan.required,
        "requests_at_context": plan.requests_at(plan.context),
        "room_at_context": plan.room_for(plan.context),
        "requests_at_mean": plan.requests_at(min(plan.mix.mean, plan.context)),
        "largest_request": plan.largest_request,
        "minimum_reusable_prefix": plan.minimum_reusable_prefix,
        "geometry": geometry(plan),
        "expected": {
            "requests": plan.mix.source,
            "mean_tokens": plan.mix.mean,
            "given": plan.settings.mix is not None,
        },
        "parallel": {name: getattr(settings.parallel, name) for name in ("tp", "pp", "dp", "dcp")},
        "deciding_stage": plan.stage,
        "device": None if settings.device is None else settings.device.name,
        "device_bytes": None if settings.device is None else settings.device.memory,
        "to_fit": [str(option) for option in to_fit],
        "notes": list(plan.notes),
    }


def summary_line(plan: Plan) -> str:
    """The plan in one line, for logs."""
    pools = " + ".join(f"{pool.name} {format_bytes(pool.bytes)}" for pool in plan.config.pools)
    return (
        f"KV pools {format_bytes(plan.config.bytes)} ({pools}): {plan.config.max_total_num_tokens:,} tokens in pages "
        f"of {plan.page_size}, {_number(float(plan.bytes_per_token)):,} bytes for each; largest request "
        f"{plan.largest_request:,} tokens; up to {plan.max_running_requests:,} requests at once."
    )


def pool_as_dict(pool: PoolSize, page_size: int) -> dict[str, Any]:
    """One pool: `bytes = frames * bytes_per_frame`, frame 0, the padding, among the frames."""
    return {
        "name": pool.name,
        "reach": {"kind": pool.group.reach.kind, "tokens": pool.group.reach.tokens},
        "frames": pool.frames + PADDING,
        "bytes_per_frame": pool.bytes_per_frame,
        "bytes": pool.bytes,
        "why": pool.why,
        "fields": [
            {
                "name": field.name,
                "dtype": field.dtype.value,
                "shape": list(field.shape),
                "layers": list(field.layers),
                "tokens_per_entry": None if field.per == PER_PAGE else field.per,
                "bytes_per_frame": field.bytes_per_frame(page_size),
            }
            for field in pool.group.layout.fields
        ],
    }


def line_as_dict(line: Line) -> dict[str, Any]:
    """One line of the ledger."""
    return {
        "name": line.name,
        "bytes": line.bytes,
        "where": line.where,
        "estimated": line.estimated,
        "why": line.why,
    }


def geometry(plan: Plan) -> dict[str, Any]:
    """The page size, the share of an expected request that its last page leaves unused, and the next larger page's."""
    length, page = plan.mix.mean, plan.page_size * plan.settings.parallel.dcp
    return {
        "page_size": page,
        "waste": _waste(page, length),
        "pages_per_request": pages_for(length, page),
        "runner_up": page * _NEXT_PAGE,
        "runner_up_waste": _waste(page * _NEXT_PAGE, length),
        "runner_up_pages_per_request": pages_for(length, page * _NEXT_PAGE),
        "request_tokens": length,
    }


def _waste(page: int, length: int) -> float:
    """Unused tokens of the last page, when lengths end anywhere in it, per token of the request."""
    return (page - 1) / 2 / length


def field_formula(field: Field, page_size: int) -> str:
    """How a field's bytes per frame come about: `80 layers * 16 entries * 2 * 128 * 2 bytes (bfloat16)`."""
    entries = field.entries(page_size)
    shape = " * ".join(map(str, field.shape))
    unit = "entry" if entries == 1 else "entries"
    return (
        f"{len(field.layers)} layers * {entries} {unit} * {shape} * {field.dtype.itemsize} bytes ({field.dtype.value})"
        f" = {field.bytes_per_frame(page_size):,}"
    )


def explain(plan: Plan) -> list[tuple[str, str]]:
    """Each number of the plan with its formula: (what, why), in the order of the table."""
    config = plan.config
    found = [(line.name, line.why + (" (estimate)" if line.estimated else "")) for line in plan.ledger]
    for pool in config.pools:
        fields = pool.group.layout.fields
        found += [(f"{pool.name}.{field.name}", field_formula(field, plan.page_size)) for field in fields]
    coeff = _number(float(plan.bytes_per_token))
    cap = plan.settings.max_total_tokens
    bound = f"<= {plan.kv_bytes:,}" + (f", and at most {cap:,} tokens" if cap is not None else "")
    tokens = config.max_total_num_tokens
    found.append(("tokens", f"largest whole page with tokens * {coeff:,} + {config.bias:,} {bound}: {tokens:,}"))
    found.append(
        ("largest request", f"min(context {plan.context:,}, tokens + 1: the last token is drawn, never written)")
    )
    found.append(("smallest reused prefix", _prefix_why(plan)))
    return found


def _prefix_why(plan: Plan) -> str:
    if plan.minimum_reusable_prefix is None:
        return "nothing is reused: prefix caching is off"
    return f"one page: {plan.minimum_reusable_prefix:,} tokens" + (
        "; a state can be left at the end of any" if plan.state_slots is not None else ""
    )


def comparison(plans: Mapping[str, Plan]) -> list[tuple[str, list[Any]]]:
    """Rows of numbers of several plans side by side: (what, one value per plan)."""
    rows: list[tuple[str, Any]] = [
        ("KV memory (bytes)", lambda p: p.kv_bytes),
        ("bytes per token", lambda p: _number(float(p.bytes_per_token))),
        ("fixed bytes", lambda p: p.config.bias),
        ("tokens", lambda p: p.config.max_total_num_tokens),
        ("window tokens", lambda p: p.window_tokens),
        ("state slots", lambda p: p.state_slots),
        ("page size", lambda p: p.page_size),
        ("context", lambda p: p.context),
        ("requests at context", lambda p: p.requests_at(p.context)),
        ("requests of 8,192", lambda p: p.requests_at(8192) if p.context >= 8192 else None),
        ("largest request", lambda p: p.largest_request),
        ("smallest reused prefix", lambda p: p.minimum_reusable_prefix),
    ]
    return [(what, [get(plan) for plan in plans.values()]) for what, get in rows]


def _number(value: float) -> int | float:
    return int(value) if math.isclose(value, round(value), rel_tol=1e-12) else value
