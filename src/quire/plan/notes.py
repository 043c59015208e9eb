"""The notes of a plan: what was assumed, resolved or has no effect, in sentences."""

from __future__ import annotations

from quire.plan.budget import format_bytes
from quire.plan.plan import Plan
from quire.spec.layers import AttentionCall


def notes_of(plan: Plan) -> tuple[str, ...]:
    """What was assumed or resolved, in sentences."""
    settings, parallel, options = plan.settings, plan.settings.parallel, plan.configurator.options
    notes = []
    kinds = {pool.group.reach.kind for one in plan.stages for pool in one.pools}
    ratios = (settings.swa_full_tokens_ratio, settings.mamba_full_memory_ratio, settings.max_mamba_cache_size)
    if len(kinds) > 1 and not any(ratio is not None for ratio in ratios):
        asked = settings.mix is not None or settings.context is not None
        notes.append(
            f"pools are split for {plan.mix.source}"
            + ("." if asked else "; --context, --input-tokens and --output-tokens, or --trace, say otherwise.")
        )
    if settings.mem_fraction_static is not None and settings.device is not None:
        share = int(settings.device.memory * settings.mem_fraction_static)
        notes.append(f"--mem-fraction-static {settings.mem_fraction_static:g} is {format_bytes(share)} of this device.")
    if parallel.pp > 1:
        notes.append(f"stage {plan.stage + 1} of {parallel.pp} has the least room and decides.")
    if parallel.dp > 1:
        notes.append(f"tokens are those of one of {parallel.dp} attention groups; requests are those of all.")
    notes += _idle_options(plan, kinds)
    notes += _uneven_heads(plan)
    cap = settings.max_total_tokens
    if cap is not None and plan.config.max_total_num_tokens <= cap:
        notes.append(f"capped at {cap:,} tokens; every pool follows the cap.")
    if settings.concurrency is not None and plan.max_running_requests < settings.concurrency:
        notes.append(f"{plan.max_running_requests:,} requests may run at once: there are states for no more.")
    if plan.state_slots is not None and plan.state_slots < options.states_per_request:
        notes.append(
            f"of {options.states_per_request} states that a request uses there are {plan.state_slots}: it runs with "
            "one, and little or nothing of its prompt can be reused."
        )
    step = plan.page_size * parallel.dcp
    for pool in plan.config.pools:
        room = pool.frames * step - pool.group.reach.tokens - step
        if settings.swa_full_tokens_ratio is not None and pool.group.reach.kind != "full" and 0 < room < options.chunk:
            notes.append(f"the pool '{pool.name}' has room for steps of {room:,} prompt tokens, not {options.chunk:,}.")
    if step > plan.context:
        notes.append(f"a page of {step:,} tokens is longer than the context: nothing can be reused.")
    return tuple(notes)


def _idle_options(plan: Plan, kinds: set[str]) -> list[str]:
    """Settings that were given and change nothing for this model."""
    settings = plan.settings
    slides, states = kinds & {"window", "chunk"} and len(kinds) > 1, "state" in kinds
    found = []
    if settings.swa_full_tokens_ratio is not None and not slides:
        found.append("--swa-full-tokens-ratio has no effect: there are no window pools beside full ones.")
    if (settings.mamba_full_memory_ratio is not None or settings.max_mamba_cache_size is not None) and not states:
        found.append("--mamba-full-memory-ratio and --max-mamba-cache-size have no effect: this model has no states.")
    if settings.mamba_full_memory_ratio is not None and kinds == {"state"}:
        found.append("--mamba-full-memory-ratio has no effect: there are no pools beside the states.")
    if settings.speculation is not None and settings.speculation.num_layers and settings.device is not None:
        found.append("weights of a draft that the model does not bring itself are not in the ledger.")
    return found


def _uneven_heads(plan: Plan) -> list[str]:
    """What to know of heads that do not divide over the ranks."""
    ranks, heads = plan.settings.parallel.attention_tp, plan.spec.query_heads
    if ranks == 1:
        return []
    found = (
        [f"{heads} query heads do not divide over {ranks} ranks; most engines refuse that."] if heads % ranks else []
    )
    kv_heads = {call.kv_heads for call in plan.spec.calls if isinstance(call, AttentionCall)}
    if kv_heads and max(kv_heads) < ranks and plan.settings.parallel.dcp == 1:
        found.append(
            f"{max(kv_heads)} KV heads on {ranks} ranks: each head is held by {ranks // max(kv_heads)} of them."
        )
    return found
