"""Changes that would make a plan fit: the plan is computed again with less context, fewer requests or fewer bits."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from quire.errors import QuireError
from quire.plan.budget import format_bytes, round_up_bytes
from quire.plan.devices import DEVICES, Device
from quire.plan.mix import Mix
from quire.plan.plan import Plan
from quire.plan.settings import PlanSettings
from quire.spec.kv_format import KV_FORMATS, kv_format
from quire.spec.pages import floor_to_page

Replan = Callable[[PlanSettings], Plan]

_SMALLER = ("fp8_e4m3", "nvfp4")
_MOST_RANKS = 64
_MIB = 2**20
_MOST = 2**50  # bytes: no search goes beyond


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One change that would work: what to change, to what, and how many requests of which length then fit."""

    change: str
    value: str
    requests: int
    length: int

    def __str__(self) -> str:
        return f"{self.change} {self.value} (fits {self.requests:,} of {self.length:,} tokens)"


def options_to_fit(plan: Plan, replan: Replan) -> tuple[Option, ...]:
    """Changes each of which alone makes the required load fit, in the order of how much they cost the user.

    Each was planned with the change, so none is a guess. A named device has no more memory, so more memory is proposed
    only without a device. Empty if no change suffices.
    """
    found = [
        _in_an_arena(plan, replan),
        _lower_context(plan, replan),
        _lower_concurrency(plan),
        *_smaller_types(plan, replan),
        _higher_cap(plan, replan),
        _more_ranks(plan, replan) if plan.settings.rank_device is not None else _more_memory(plan, replan),
    ]
    return tuple(option for option in found if option is not None)


def _in_an_arena(plan: Plan, replan: Replan) -> Option | None:
    """The memory as it is, shared by both groups."""
    other = None if plan.settings.arena else _try(replan, plan.settings.changed(arena=True))
    if other is None or not other.fits:
        return None
    return Option(change="arena", value="on", requests=other.requests_at(plan.context), length=plan.context)


def _lower_context(plan: Plan, replan: Replan) -> Option | None:
    """The longest context, in whole pages, of which the required number fits."""

    def too_long(context: int) -> bool:
        other = _try(replan, _at_context(plan, context))
        return other is None or other.requests_at(context) < plan.required

    longest = bisect_left(range(1, plan.context), True, key=too_long)
    context = floor_to_page(longest, plan.page_size) or longest
    if not context or too_long(context):
        return None
    return Option(change="context", value=f"{context:,}", requests=plan.required, length=context)


def _at_context(plan: Plan, context: int) -> PlanSettings:
    mix: Mix | None = plan.settings.mix
    return plan.settings.changed(max_model_len=context, mix=mix.clipped(context) if mix is not None else None)


def _lower_concurrency(plan: Plan) -> Option | None:
    """The current plan is already that of the most requests that fit."""
    requests = plan.requests_at(plan.context)
    if plan.settings.concurrency is None or not requests:
        return None
    return Option(change="concurrency", value=f"{requests:,}", requests=requests, length=plan.context)


def _higher_cap(plan: Plan, replan: Replan) -> Option | None:
    """The smallest cap on tokens, in whole pages, if the cap is the limit."""
    cap, page = plan.settings.max_total_tokens, plan.tokens_per_page
    free = _try(replan, plan.settings.changed(max_total_tokens=None)) if cap is not None else None
    if cap is None or free is None or not free.fits:
        return None
    caps = range(cap - cap % page, free.config.max_total_num_tokens, page)
    at = bisect_left(caps, True, key=lambda tokens: _fits(replan, plan.settings.changed(max_total_tokens=tokens)))
    tokens = caps[at] if at < len(caps) else free.config.max_total_num_tokens
    return Option(change="max-total-tokens", value=f"{tokens:,}", requests=plan.required, length=plan.context)


def _more_ranks(plan: Plan, replan: Replan) -> Option | None:
    """The smallest tensor parallelism, doubled repeatedly, that makes room on the same device."""
    for changed in _with_ranks(plan.settings, "tp"):
        other = _try(replan, changed)
        if other is not None and other.fits:
            requests = other.requests_at(plan.context)
            return Option(change="tp", value=f"{changed.parallel.tp}", requests=requests, length=plan.context)
    return None


def _with_ranks(settings: PlanSettings, name: str) -> Iterator[PlanSettings]:
    """The settings with `tp` or `pp` doubled, and doubled again."""
    count = 2 * getattr(settings.parallel, name)
    while count <= _MOST_RANKS:
        yield settings.changed(parallel=replace(settings.parallel, **{name: count}))
        count *= 2


def more_room(settings: PlanSettings, replan: Replan, left: int) -> str:
    """The fix of an error of a full device: changes that make room for pools, each planned and found to fit.

    `left` are the bytes beside weights and working memory. Weights given per rank do not shrink with more ranks: the
    fix is then the most bytes that they may take.
    """
    device, ways = settings.rank_device, []
    assert device is not None

    def works(changed: PlanSettings) -> bool:
        found = _try(replan, changed)  # KV memory that was asked for may be too little for what is required
        return found is not None and (found.fits or changed.kv_memory is not None)

    less = (left - 1) // _MIB
    if settings.kv_memory is not None and less > 0 and works(settings.changed(kv_memory=less * _MIB)):
        ways.append(f"ask for --kv-memory {less}MiB or less")
    if settings.mem_fraction_static is not None:
        percents = range(int(100 * settings.mem_fraction_static) + 1, 100)
        at = bisect_left(percents, True, key=lambda each: works(settings.changed(mem_fraction_static=each / 100)))
        ways += [f"raise --mem-fraction-static to {percents[at] / 100:g}"] if at < len(percents) else []
    if settings.weight_bytes is not None:
        sizes = range(0, settings.weight_bytes, _MIB)
        at = bisect_left(sizes, True, key=lambda size: not works(settings.changed(weight_bytes=size)))
        ways += (
            [f"split the model (--tp, --pp) until a rank has {sizes[at - 1] // _MIB:,} MiB of weights"] if at else []
        )
    for name in ("tp", "pp") if settings.weight_bytes is None and settings.measured is None else ():
        changed = next(filter(works, _with_ranks(settings, name)), None)
        if changed is not None:
            parallel = changed.parallel
            ways.append(f"use --{name} {getattr(parallel, name)} ({parallel.tp * parallel.pp} devices)")
    for memory, name in sorted((mib * _MIB, name) for name, (mib, *_) in DEVICES.items()):
        if memory > device.memory and works(settings.changed(rank_device=Device(name=name, memory=memory))):
            ways.append(f"use {name} ({format_bytes(memory)})")
            break
    return ", or ".join(ways or [f"use smaller weights: no known device has room, nor have {_MOST_RANKS} ranks"]) + "."


def _smaller_types(plan: Plan, replan: Replan) -> list[Option]:
    now = kv_format(plan.settings.kv_dtype, plan.spec.dtype)
    found = []
    for name in _SMALLER:
        other = _try(replan, plan.settings.changed(kv_dtype=name)) if KV_FORMATS[name].bits < now.bits else None
        if other is not None and other.fits:
            requests = other.requests_at(plan.context)
            found.append(Option(change="KV dtype", value=name, requests=requests, length=plan.context))
    return found


def _more_memory(plan: Plan, replan: Replan) -> Option | None:
    size = least_memory(plan.settings, replan) if plan.settings.max_total_tokens is None else None
    if size is None:
        return None
    return Option(change="KV memory", value=round_up_bytes(size), requests=plan.required, length=plan.context)


def least_memory(settings: PlanSettings, replan: Replan) -> int | None:
    """The KV memory of a rank, rounded up to a MiB, in which the required load fits; None if no memory suffices."""
    bare, sizes = settings.changed(rank_device=None, measured=None), range(_MIB, _MOST + 1, _MIB)
    at = bisect_left(sizes, True, key=lambda size: _fits(replan, bare.changed(kv_memory=size)))
    return sizes[at] if at < len(sizes) else None


def _fits(replan: Replan, settings: PlanSettings) -> bool:
    plan = _try(replan, settings)
    return plan is not None and plan.fits


def _try(replan: Replan, settings: PlanSettings) -> Plan | None:
    try:
        return replan(settings)
    except QuireError:
        return None
