"""A plan as text and as data: its ledger and notes, the dictionary for programs, and the formula of each number."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from quire.plan.advice import Option
from quire.plan.budget import counted, format_bytes
from quire.plan.configurator import PADDING, PoolSize
from quire.plan.devices import Line
from quire.plan.hisparse import hisparse_as_dict, host_lines, latents_told, lossy_notes, unused_by
from quire.plan.plan import Plan, size_within
from quire.plan.settings import PlanSettings
from quire.plan.speculation import draft_weight_notes, reserve_told, speculation_as_dict
from quire.settings.tenants import Amount, TenantTerms
from quire.spec.layers import AttentionCall
from quire.spec.layout import PER_PAGE, Field
from quire.spec.pages import pages_for
from quire.spec.weights import WeightEstimate


def ledger_of(plan: Plan, lines: Sequence[Line]) -> tuple[Line, ...]:
    """`lines`, then a line for every other byte of the budget, and the tables on the host."""
    pools, settings, memory = plan.config.pools, plan.settings, plan.memory
    found, arena = list(lines), plan.memory.arena
    for pool in pools if arena is None else ():
        size, frames, where = pool.bytes_per_frame, pool.frames, "host" if pool.on_host else "device"
        why = f"{frames:,} frames of {size:,} bytes: {pool.why}"
        taken = pool.bytes if pool.on_host else frames * size
        found.append(Line(name=f"pool {pool.name}", bytes=taken, why=why, where=where))
    padding, used = sum(pool.bytes_per_frame for pool in pools if not pool.on_host), plan.config.bytes
    if arena is not None:
        most = " or ".join(
            f"{arena.most(at):,} frames of {stride:,} bytes of '{group.name}'"
            for at, (group, stride) in enumerate(zip(memory.groups, arena.strides, strict=True))
        )
        found.append(Line(name="arena", bytes=arena.room, why=f"{most}, or some of both, as requests come"))
        padding = sum(arena.strides)  # one frame of each group, whatever pools these would have
        used = arena.room + padding
    found.append(Line(name="padding", bytes=padding, why="frame 0 of every pool, where padded tokens write"))
    if settings.graph_bytes:
        why = "kept for CUDA graphs of decode steps, beside the pools"
        found.append(Line(name="graphs", bytes=settings.graph_bytes, why=why, estimated=True))
    if settings.sampling_bytes:
        requests = counted(settings.max_running_requests, "request")
        why = f"logits of {requests} while they are filtered and reported, beside the pools"
        found.append(Line(name="sampling", bytes=settings.sampling_bytes, why=why))
    why = unused_by(plan)
    if _capped(plan):
        why = f"beyond the cap of {settings.max_total_tokens:,} tokens"
    found.append(Line(name="unused", bytes=plan.kv_bytes - used, why=why))
    if settings.rank_device is not None and settings.kv_memory is not None:
        rest = settings.rank_device.memory - sum(line.bytes for line in found)
        found.append(Line(name="not asked for", bytes=rest, why="what --kv-memory leaves of the device"))
    tokens = memory.pages_per_row * memory.tokens_per_page
    why = (
        f"{memory.max_requests:,} requests of up to {memory.pages_per_row:,} page ids and {tokens:,} tokens of 4 bytes"
    )
    found.append(Line(name="request tables", bytes=memory.row_bytes, why=why, where="host"))
    found += host_lines(plan)
    return tuple(found)


_SHORT = 512  # tokens of a short request


def notes_of(plan: Plan, weights: WeightEstimate | None) -> tuple[str, ...]:
    """What was assumed, what limits the plan, and which settings have no effect, in sentences."""
    return (*_notes_on_load(plan), *_notes_on_settings(plan), *draft_weight_notes(plan, weights), *_limits(plan))


def _notes_on_load(plan: Plan) -> Iterator[str]:
    settings = plan.settings
    if (
        plan.memory.arena is None
        and len(_kinds(plan)) > 1
        and settings.swa_full_tokens_ratio is None
        and not _states_given(settings)
    ):
        asked = settings.mix is not None or settings.max_model_len is not None
        more = "." if asked else "; --context, --input-tokens and --output-tokens, or --trace, say otherwise."
        yield f"pools are split for {plan.mix.source}{more}"
    if (arena := arena_as_dict(plan)) is not None:
        told = [f"{counted(each['arena'], 'request')} of {each['tokens']:,} tokens" for each in arena["fits"]]
        split = ", ".join(f"{each['split']:,}" for each in arena["fits"])
        waste = format_bytes(arena["waste_bytes"])
        yield (
            f"one arena of these bytes holds {', or '.join(told)}, and {waste} of it hold no frame; pools that are "
            f"split hold {split}."
        )
    if (least := settings.kv_memory_least) is not None:
        found = size_within(plan, least)
        most = f"{found.num_tokens:,} tokens, and requests of up to {found.largest_request:,}"
        yield f"it may be made smaller while it serves, if floors of tenants fit: {format_bytes(least)} hold {most}."


def _notes_on_settings(plan: Plan) -> Iterator[str]:
    settings, kinds = plan.settings, _kinds(plan)
    share, device, parallel = settings.mem_fraction_static, settings.rank_device, settings.parallel
    if share is not None and device is not None:
        yield f"--mem-fraction-static {share:g} is {format_bytes(int(device.memory * share))} of this device."
    if settings.arena and plan.memory.arena is None:
        groups = plan.memory.groups
        here = f"{counted(len(groups), 'group')} ({', '.join(group.name for group in groups)})"
        here += f" in {len(plan.stages)} stages" * (len(plan.stages) > 1)
        yield (
            "--arena has no effect: two groups share one, a whole and a partial one, on the device of a single stage. "
            f"This model has {here}{' and latents in host memory' * bool(plan.memory.groups_on_host)}."
        )
    if parallel.pp > 1:
        yield f"stage {plan.stage + 1} of {parallel.pp} has the least room and decides."
    if parallel.dp > 1:
        yield f"tokens are those of one of {parallel.dp} attention groups; requests are those of all."
    if settings.swa_full_tokens_ratio is not None and (not kinds & {"window", "chunk"} or len(kinds) == 1):
        yield "--swa-full-tokens-ratio has no effect: there are no window pools beside full ones."
    if _states_given(settings) and "state" not in kinds:
        yield "--mamba-full-memory-ratio and --max-mamba-cache-size have no effect: this model has no states."
    if settings.mamba_full_memory_ratio is not None and kinds == {"state"}:
        yield "--mamba-full-memory-ratio has no effect: there are no pools beside the states."


def _limits(plan: Plan) -> Iterator[str]:
    settings, options, step = plan.settings, plan.configurator.options, plan.tokens_per_page
    ranks, heads = settings.parallel.attention_tp, plan.spec.query_heads
    if heads % ranks:
        yield f"{heads} query heads do not divide over {ranks} ranks; most engines refuse that."
    kv_heads = max((call.kv_heads for call in plan.spec.calls if isinstance(call, AttentionCall)), default=ranks)
    if kv_heads < ranks and settings.parallel.dcp == 1:
        yield f"{kv_heads} KV heads on {ranks} ranks: each head is held by {ranks // kv_heads} of them."
    if _capped(plan):
        what = "every pool follows the cap" if plan.memory.arena is None else "the arena has the bytes of such pools"
        yield f"capped at {settings.max_total_tokens:,} tokens; {what}."
    if settings.concurrency is not None and plan.max_running_requests < settings.concurrency:
        limit = "hot buffers" if plan.state_slots is None else "states"
        yield f"{plan.max_running_requests:,} requests may run at once: there are {limit} for no more."
    in_pools = plan.memory.arena is None
    if in_pools and plan.state_slots is not None and plan.state_slots < options.states_per_request:
        yield (
            f"a request uses {options.states_per_request} states and there are {plan.state_slots}: it runs with one, "
            "and little or nothing of its prompt can be reused."
        )
    chunk = settings.max_num_batched_tokens
    for pool in plan.config.pools if in_pools and settings.swa_full_tokens_ratio is not None else ():
        room = pool.frames * step - pool.group.reach.tokens - step
        if pool.group.reach.kind != "full" and 0 < room < chunk:
            yield f"the pool '{pool.name}' has room for steps of {room:,} prompt tokens, not {chunk:,}."
    yield from lossy_notes(plan)
    if step > plan.context:
        yield f"a page of {step:,} tokens is longer than the context: nothing can be reused."


def _kinds(plan: Plan) -> set[str]:
    """The kinds of reach of all pools."""
    return {pool.group.reach.kind for one in plan.stages for pool in one.pools}


def _states_given(settings: PlanSettings) -> bool:
    return settings.mamba_full_memory_ratio is not None or settings.max_mamba_cache_size is not None


def arena_as_dict(plan: Plan) -> dict[str, Any] | None:
    """What fits in an arena and in split pools, for the expected requests and if all are short or all are long; and
    its bytes that hold no frame: the paddings, and less than one of the smaller frames. None if groups share none."""
    layout = plan.floating.arena
    if layout is None:
        return None
    lengths = sorted({min(_SHORT, plan.context), min(plan.mix.mean, plan.context), plan.context})
    fits = [{"tokens": n, "arena": plan.room_in_arena(n), "split": plan.room_in_pools(n)} for n in lengths]
    waste = layout.budget - layout.room
    return {"is_planned": plan.settings.arena, "bytes": layout.budget, "waste_bytes": waste, "fits": fits}


def _capped(plan: Plan) -> bool:
    cap = plan.settings.max_total_tokens
    return cap is not None and plan.config.max_total_num_tokens <= cap


def plan_as_dict(plan: Plan, *, to_fit: Sequence[Option] = (), model: str = "") -> dict[str, Any]:
    """Everything a plan says, as JSON values. Bytes and frames are those of one rank; frames include frame 0."""
    config, settings, arena = plan.config, plan.settings, plan.memory.arena
    pools = config.pools
    if arena is not None:
        why = "as many as the arena holds without the other group"
        groups = enumerate(plan.memory.groups)
        pools = tuple(PoolSize(group=group, frames=arena.most(at), why=why) for at, group in groups)
    return {
        "model": model or plan.spec.architecture,
        "architecture": plan.spec.architecture,
        "kv_dtype": settings.kv_dtype if settings.kv_dtype != "auto" else plan.spec.dtype.value,
        "fits": plan.fits,
        "kv_bytes": plan.kv_bytes,
        "page_size": plan.page_size,
        "bytes_per_token": _bytes_per_token(plan),
        "bias_bytes": config.bias,
        "max_total_num_tokens": plan.tokens,
        "full_max_total_num_tokens": plan.full_tokens if arena is None else plan.tokens,
        "swa_max_total_num_tokens": plan.window_tokens if arena is None else None,
        "compressed_max_total_num_tokens": {str(k): v for k, v in config.compressed_max_total_num_tokens.items()}
        or None,
        "max_running_requests": plan.max_running_requests,
        "state_slots": plan.state_slots if arena is None else None,
        "pools": [_pool_as_dict(pool, plan.page_size) for pool in pools],
        "ledger": [asdict(line) for line in plan.ledger],
        "context": plan.context,
        "required_requests": plan.required,
        "requests_at_context": plan.requests_at(plan.context),
        "room_at_context": plan.room_for(plan.context),
        "requests_at_mean": plan.requests_at(min(plan.mix.mean, plan.context)),
        "largest_request": plan.largest_request,
        "minimum_reusable_prefix": plan.minimum_reusable_prefix,
        "geometry": _geometry(plan.tokens_per_page, plan.mix.mean),
        "expected": {"requests": plan.mix.source, "mean_tokens": plan.mix.mean, "given": plan.settings.mix is not None},
        "parallel": {name: getattr(settings.parallel, name) for name in ("tp", "pp", "dp", "dcp")},
        "deciding_stage": plan.stage,
        "speculation": speculation_as_dict(plan),
        "hisparse": hisparse_as_dict(plan),
        "arena": arena_as_dict(plan),
        "device": None if settings.rank_device is None else settings.rank_device.name,
        "device_bytes": None if settings.rank_device is None else settings.rank_device.memory,
        "to_fit": [str(option) for option in to_fit],
        "notes": list(plan.notes),
    }


def tenants_as_dict(terms: Sequence[TenantTerms], plan: Plan, largest: Sequence[int]) -> list[dict[str, Any]]:
    """Each tenant as `quire plan --json` tells it. `largest[i]` are the tokens of its largest request."""
    memory = plan.memory

    def of(amount: Amount) -> dict[str, int]:
        share = min(1.0, amount.of(memory.room_bytes))
        size = min(amount.bytes, memory.room_bytes) or int(share * memory.room_bytes)
        return {"bytes": size, "tokens": int(share * memory.num_tokens)}

    return [
        {
            "name": each.name,
            "floor": of(each.floor),
            "ceiling": of(each.ceiling or Amount(share=1.0)),
            "weight": each.weight,
            "largest_request": tokens,
        }
        for each, tokens in zip(terms, largest, strict=True)
    ]


def summary_line(plan: Plan) -> str:
    """The plan in one line, for logs."""
    pools = " + ".join(f"{pool.name} {format_bytes(pool.bytes)}" for pool in plan.config.pools if not pool.on_host)
    pools += latents_told(plan)
    what = f"KV pools {format_bytes(plan.config.bytes)} ({pools}):"
    if plan.memory.arena is not None:
        names = " and ".join(group.name for group in plan.memory.groups)
        what = f"KV arena {format_bytes(plan.memory.pool_bytes)} ({names}): up to"
    return (
        f"{what} {plan.tokens:,} tokens in pages "
        f"of {plan.page_size}, {_bytes_per_token(plan):,} bytes for each; largest request "
        f"{plan.largest_request:,} tokens; up to {plan.max_running_requests:,} requests at once."
    )


def _pool_as_dict(pool: PoolSize, page_size: int) -> dict[str, Any]:
    """One pool: `bytes = frames * bytes_per_frame`, frame 0, the padding, among the frames. Of a pool in host memory,
    bytes are those of its records."""
    return {
        "name": pool.name,
        "where": "host" if pool.on_host else "device",
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


def _geometry(page: int, length: int) -> dict[str, Any]:
    """Pages of `page` tokens, and of twice as many: how many a request of `length` tokens needs, and the waste.

    The waste is the unused tokens of the last page, if requests may end anywhere in it, per token of the request.
    """
    found: dict[str, Any] = {"request_tokens": length}
    for prefix, size in (("", page), ("runner_up_", 2 * page)):
        found[f"{prefix}waste"] = (size - 1) / 2 / length
        found[f"{prefix}pages_per_request"] = pages_for(length, size)
    return found | {"page_size": page, "runner_up": 2 * page}


def _field_formula(field: Field, page_size: int) -> str:
    """The formula of a field's bytes per frame: `80 layers * 16 entries * 2 * 128 * 2 bytes (bfloat16)`."""
    entries = field.entries(page_size)
    shape = " * ".join(map(str, field.shape))
    unit = "entry" if entries == 1 else "entries"
    return (
        f"{len(field.layers)} layers * {entries} {unit} * {shape} * {field.dtype.itemsize} bytes ({field.dtype.value})"
        f" = {field.bytes_per_frame(page_size):,}"
    )


def explain(plan: Plan) -> list[tuple[str, str]]:
    """Each number of the plan with its formula: (what, why), in the order of the table."""
    config, cap = plan.config, plan.settings.max_total_tokens
    found = [(line.name, line.why + (" (estimate)" if line.estimated else "")) for line in plan.ledger]
    for pool in config.pools:
        fields = pool.group.layout.fields
        found += [(f"{pool.name}.{field.name}", _field_formula(field, plan.page_size)) for field in fields]
    bound = f"<= {plan.kv_bytes:,}" + (f", and at most {cap:,} tokens" if cap is not None else "")
    price = f"tokens * {_bytes_per_token(plan):,} + {config.bias:,} {bound}"
    tokens = f"largest whole page with {price}: {config.max_total_num_tokens:,}"
    if plan.memory.arena is not None:
        tokens = f"what the arena holds beside the other group's frames of one request: {plan.tokens:,}"
    written = f"the last token is drawn, never written{reserve_told(plan)}"
    prefix = "nothing is reused: prefix caching is off"
    if plan.minimum_reusable_prefix is not None:
        prefix = f"one page: {plan.minimum_reusable_prefix:,} tokens"
        prefix += "; a state can be left at the end of any" if plan.state_slots is not None else ""
    return [
        *found,
        ("tokens", tokens),
        ("largest request", f"min(context {plan.context:,}, tokens + 1: {written})"),
        ("smallest reused prefix", prefix),
    ]


def comparison(plans: Mapping[str, Plan]) -> list[tuple[str, list[Any]]]:
    """Rows of numbers of several plans side by side: (what, one value per plan)."""
    rows: list[tuple[str, Any]] = [
        ("KV memory (bytes)", lambda p: p.kv_bytes),
        ("bytes per token", _bytes_per_token),
        ("fixed bytes", lambda p: p.config.bias),
        ("tokens", lambda p: p.tokens),
        ("window tokens", lambda p: p.window_tokens if p.memory.arena is None else None),
        ("state slots", lambda p: p.state_slots if p.memory.arena is None else None),
        ("page size", lambda p: p.page_size),
        ("context", lambda p: p.context),
        ("requests at context", lambda p: p.requests_at(p.context)),
        ("requests of 8,192", lambda p: p.requests_at(8192) if p.context >= 8192 else None),
        ("largest request", lambda p: p.largest_request),
        ("smallest reused prefix", lambda p: p.minimum_reusable_prefix),
    ]
    return [(what, [get(plan) for plan in plans.values()]) for what, get in rows]


def _bytes_per_token(plan: Plan) -> int | float:
    value = float(plan.bytes_per_token)
    return int(value) if math.isclose(value, round(value), rel_tol=1e-12) else value
