"""HiSparse in a plan: which models it is for, the hot buffers, and from which number of requests on it is faster."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from quire.errors import InvalidInput, PlanError
from quire.plan.budget import counted, format_bytes
from quire.plan.devices import DEVICES, LAUNCH_S, MEMORY_SHARE, Line
from quire.plan.host import HostMemory, host_budget
from quire.plan.plan import Plan
from quire.plan.settings import PlanSettings
from quire.plan.speculation import refuse_draft_layers
from quire.spec.hisparse import MOST_BUFFER_TOKENS, PAGE_BOUNDS, HiSparseConfig, HotBuffers
from quire.spec.layers import AttentionCall, Call, LatentCall
from quire.spec.model import ModelSpec
from quire.spec.pages import floor_to_page, pages_for

_LEAVE_OUT = "leave hisparse out."
# One request and indexer: 24 us measured, 16 requests that select 2,048 tokens (bench/results/hisparse-0.7.json).
_BOOKKEEPING_S = 25e-6
# Buffers of two selections, in the same file: 0.82 to 0.89 in engines with random models, 0.89 of what a small trained
# model selects. No large model is among them.
_HIT_RATE = 0.85


def latent_bytes(
    config: HiSparseConfig | None, asked: int | Literal["auto"] | None, memory: HostMemory, *, owners: int
) -> int | None:
    """Bytes of host memory for latents: their share, with `owners` in all, of what was `asked` for, or of half of what
    is available; None without hisparse. Raises what `host_budget` raises."""
    if config is None:
        return None
    asked = "auto" if asked is None else asked
    return host_budget(asked, memory, device_bytes=memory.available) // owners


def hot_buffers(spec: ModelSpec, settings: PlanSettings, *, page_size: int, context: int) -> HotBuffers | None:
    """The hot buffers of a plan; None if latents stay on the device. `spec` is that of `selecting`.

    By default a buffer has twice the selected tokens, and no more pages than the context. Raises what `refuse_hisparse`
    raises, and InvalidInput for a buffer, or a selection of pages, that is too small.
    """
    config = settings.hisparse
    if config is None:
        return None
    refuse_hisparse(spec, settings)
    top_k, size, whole = spec.index_topk, config.device_buffer_size, pages_for(context, page_size) * page_size
    if config.selection is not None:
        assert config.top_k is not None
        top_k = floor_to_page(config.top_k, page_size)
        if not top_k:
            raise InvalidInput(
                f"hisparse with a top_k of {config.top_k:,} tokens: that is less than a page of {page_size:,}.",
                fix=f"give at least {page_size}, or use smaller pages (--page-size).",
            )
    least = min(top_k, whole)
    if size is None:
        size = min(2 * top_k, whole, MOST_BUFFER_TOKENS)
    if size < least:
        raise InvalidInput(
            f"a device_buffer_size of {size:,} tokens: a step reads {counted(least, 'selected token')}.",
            fix=f"give at least {least}." if least <= MOST_BUFFER_TOKENS else _LEAVE_OUT,
        )
    return HotBuffers(group=0, buffer_size=size, top_k=top_k, lossy=config.selection is not None)


def selecting(spec: ModelSpec, settings: PlanSettings) -> ModelSpec:
    """The model as the settings let it select. Raises InvalidInput if bounds of pages are not for it."""
    bounded = settings.hisparse is not None and settings.hisparse.selection is not None
    return spec.with_page_bounds() if bounded else spec


def refuse_hisparse(spec: ModelSpec, settings: PlanSettings) -> None:
    """Raise InvalidInput for a model without sparse latents alone, for another number of selected tokens than the
    model's, and for settings beside which hisparse does not work."""
    if settings.hisparse is None:
        return
    if settings.hisparse.selection is not None:
        bounded = selecting(spec, settings)
        if not settings.window_pool and any(isinstance(call, AttentionCall) and call.window for call in bounded.calls):
            raise InvalidInput(
                f"hisparse: without window pools, windows of {spec.architecture} would be in host memory.",
                fix="leave --no-window-pool out.",
            )
    else:
        _refuse_indexer(spec, settings.hisparse.top_k)
    refuse_draft_layers(settings, "hisparse")
    for option in ("pp", "dcp"):
        if getattr(settings.parallel, option) > 1:
            raise InvalidInput(f"hisparse: not yet with --{option}.", fix=f"leave --{option} out; use --tp.")


def _refuse_indexer(spec: ModelSpec, top_k: int | None) -> None:
    name, calls = spec.architecture, spec.calls
    latents = [call for call in calls if isinstance(call, LatentCall)]
    if not latents and any(getattr(call, "index_dim", 0) for call in calls):
        raise InvalidInput(
            f"hisparse: the indexer of {name} does not select latents of single tokens, and others stay on the device.",
            fix=_LEAVE_OUT,
        )
    if not any(call.sparse for call in latents):
        raise InvalidInput(
            f"hisparse: no layer of {name} selects latents with an indexer.",
            fix=f'leave hisparse out; "selection": "{PAGE_BOUNDS}" selects pages of plain attention, which is lossy.',
        )
    if len(latents) < len(calls):
        kinds = sorted({type(call).__name__.removesuffix("Call").lower() for call in calls} - {"latent"})
        raise InvalidInput(f"hisparse: {name} has {kinds[0]} layers beside latent ones.", fix=_LEAVE_OUT)
    if not all(call.sparse for call in latents):
        raise InvalidInput(
            f"hisparse: {name} has layers that read all latents beside sparse ones, and this version keeps all latents "
            "in one place.",
            fix=_LEAVE_OUT,
        )
    if top_k not in (None, spec.index_topk):
        raise InvalidInput(
            f"hisparse with a top_k of {top_k:,}: the indexer of {name} selects {spec.index_topk:,} tokens.",
            fix=f"leave top_k out, or give {spec.index_topk}.",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HiSparseCosts:
    """What a comparison assumes.

    `hit_rate` is the share of selected tokens that a buffer has, `link_rate` the bytes per second from host memory to
    the device, `step_s` the seconds of a decode step beside those that each request adds, and `bookkeeping_s` those of
    one request and indexer, besides copies. None: not known.
    """

    hit_rate: float = _HIT_RATE
    link_rate: float | None = None
    step_s: float | None = None
    bookkeeping_s: float = _BOOKKEEPING_S


def hisparse_costs(
    plan: Plan, *, hit_rate: float | None = None, link_rate: float | None = None, step_s: float | None = None
) -> HiSparseCosts:
    """What is given, and for the rest four fifths of the published peaks of the plan's device, if it has a name.

    A step reads all weights of a rank once.
    """
    device = plan.settings.rank_device
    peaks = DEVICES.get(device.name) if device is not None else None
    weights = sum(line.bytes for line in plan.ledger if line.name == "weights")
    if peaks is not None:
        _, _, memory, bus = peaks
        link_rate = link_rate or bus * 1e9 * MEMORY_SHARE
        step_s = step_s or (LAUNCH_S + weights / (memory * 1e9 * MEMORY_SHARE) if weights else None)
    return HiSparseCosts(hit_rate=_HIT_RATE if hit_rate is None else hit_rate, link_rate=link_rate, step_s=step_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class HiSparseGain:
    """A plan with hisparse beside one with all latents on the device in the same bytes.

    Requests are of the full context. `swapped_bytes` and `swap_s` are those that a request adds to a step, on one rank.
    `break_even` is the least number of running requests with more tokens per second than resident latents ever have;
    None if there is none, or if the time of a step is not known. `loses` says why the plan is not worth it; empty
    if it is.
    """

    costs: HiSparseCosts
    tokens: int
    requests: int
    resident_tokens: int
    resident_requests: int
    swapped_bytes: int
    swap_s: float | None
    break_even: int | None
    loses: str


def hisparse_gain(plan: Plan, replan: Callable[[PlanSettings], Plan], costs: HiSparseCosts) -> HiSparseGain:
    """Compare with all latents on the device in the same bytes. `replan` plans the same model with other settings.

    Each request of b adds the same time to a step in both plans, and a swap more with hisparse. With R resident
    requests, a swap of s seconds and a step of w seconds without requests, hisparse gives more tokens per second if

        b / (w + b * (t + s)) > R / (w + R * t), that is b * (w - R * s) > R * w
    """
    memory, requests = plan.memory, plan.requests_at(plan.context)
    hot = memory.hot
    assert hot is not None
    settings = plan.settings.changed(hisparse=None, latent_bytes=None, rank_device=None, measured=None)
    try:
        resident = replan(settings.changed(kv_memory=plan.kv_bytes))
        fitting, held = resident.requests_at(plan.context), resident.config.max_total_num_tokens
    except PlanError:  # not a page fits
        fitting = held = 0
    swaps = plan.context > hot.buffer_size
    misses = (1 - costs.hit_rate) * hot.top_k if swaps else 0.0
    swapped = int(misses * memory.groups[hot.group].layout.bytes_per_token)
    owners = sum(_owns_index(call) for call in plan.spec.calls)
    swap_s = None
    if costs.link_rate is not None:
        swap_s = swapped / costs.link_rate + (costs.bookkeeping_s * owners if swaps else 0.0)
    dp = plan.settings.parallel.dp  # every attention group has a step and a link of its own
    least = _break_even(fitting / dp, swap_s, costs.step_s) * dp
    tokens, break_even, loses = plan.config.max_total_num_tokens, None, ""
    if tokens < held:
        loses = f"{tokens:,} tokens fit, and {held:,} with all {hot.contents} on the device"
    elif requests <= fitting:
        loses = (
            f"{counted(requests, 'request')} of the context fit, and {fitting:,} with all {hot.contents} on the device"
        )
    elif least <= requests:
        break_even = int(least)
    elif least > requests:
        loses = (
            f"{counted(requests, 'request')} at once are slower than {fitting:,} with all {hot.contents} on the device"
        )
    return HiSparseGain(
        costs=costs,
        tokens=tokens,
        requests=requests,
        resident_tokens=held,
        resident_requests=fitting,
        swapped_bytes=swapped,
        swap_s=swap_s,
        break_even=break_even,
        loses=loses,
    )


def _owns_index(call: Call) -> bool:
    if isinstance(call, AttentionCall):
        return call.page_bounds
    return isinstance(call, LatentCall) and call.index_dim > 0


def _break_even(resident: float, swap_s: float | None, step_s: float | None) -> float:
    """The least number of requests that are faster than so many resident ones: infinite if none is, NaN if not known.

    Without a resident request, one is enough.
    """
    if not resident:
        return 1.0
    if swap_s is None or step_s is None:
        return math.nan
    room = step_s - resident * swap_s
    return resident * step_s // room + 1 if room > 0 else float("inf")


# -- what a plan says of it: nothing, if latents are on the device


def host_lines(plan: Plan) -> tuple[Line, ...]:
    """The ledger's lines of tables on the host."""
    memory = plan.memory
    if memory.hot is None:
        return ()
    why = f"which slot has which token, of {memory.max_requests:,} requests and {len(memory.index_owners)} indexes"
    return (Line(name="slot tables", bytes=memory.slot_table_bytes, why=why, where="host"),)


def unused_by(plan: Plan) -> str:
    """Why the last bytes of a budget are not used."""
    if plan.memory.hot is None:
        return "less than one more page takes"
    return "less than one more page or hot buffer takes, or beyond what host memory holds"


def latents_told(plan: Plan) -> str:
    """The end of a line about pools."""
    hot = plan.memory.hot
    return "" if hot is None else f"; {hot.contents} {format_bytes(plan.memory.host_bytes)} in host memory"


def lossy_notes(plan: Plan) -> Iterator[str]:
    """Notes on outputs that differ from those of full attention."""
    hot = plan.memory.hot
    if hot is not None and hot.lossy:
        yield (
            f"lossy: a token of an output reads at most {hot.top_k:,} tokens before it, in pages selected by "
            "bounds of their keys; outputs differ from those of full attention."
        )


def hisparse_as_dict(plan: Plan) -> dict[str, Any] | None:
    """The hot buffers, how many requests have one, and the host memory of a rank that latents take."""
    memory = plan.memory
    if memory.hot is None:
        return None
    return {
        "device_buffer_size": memory.hot.buffer_size,
        "top_k": memory.hot.top_k,
        "lossy": memory.hot.lossy,
        "contents": memory.hot.contents,
        "hot_rows": plan.hot_rows,
        "host_bytes": memory.host_bytes,
    }
