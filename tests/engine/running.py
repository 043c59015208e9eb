"""Run token prompts through an `EngineCore`, and what `transformers` generates for the same prompts."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from fractions import Fraction
from itertools import count
from typing import Any

import numpy as np
import torch

from quire.engine.config import EngineConfig, engine_config
from quire.engine.core import EngineCore
from quire.engine.messages import EngineRequest
from quire.models.draft_head import LoadedHead
from quire.models.hf import LoadedModel
from quire.plan.budget import MemoryPlan
from quire.plan.planner import make_plan
from quire.plan.settings import PlanSettings
from quire.plan.speculation import with_draft_model
from quire.scheduler.sampling_params import SamplingParams
from quire.spec.record_size import records_bytes
from tests.engine.expected import expected_tokens

AUDIT_EVERY = 7
STEPS = 20_000  # more than any of these takes
AMPLE = 16 * 2**20  # bytes


def core_for(
    model: LoadedModel,
    *,
    pages: int | None = None,
    page_size: int | None = 16,
    draft: LoadedModel | LoadedHead | None = None,
    **settings: Any,
) -> EngineCore:
    """An engine on a model that is loaded already, with room for exactly `pages` pages."""
    if pages is not None:
        assert page_size is not None
        return tight_core(model, num_tokens=pages * page_size, page_size=page_size, draft=draft, **settings)
    settings = {"target_itl_ms": "off"} | settings  # whatever the time of steps, each has the same tokens
    config = engine_config(model=model.name, page_size=page_size, kv_memory=AMPLE, **settings)
    return EngineCore(config, model=model, draft=draft)


def add(core: EngineCore, request: EngineRequest) -> None:
    """Queue a request; one with a grammar is compiled first."""
    later = core.add(request)
    while later is not None and later.poll(time.monotonic() < later.until_s) is None:
        time.sleep(0.001)


def run(
    core: EngineCore,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    name: str = "r",
    *,
    salt: str = "",
) -> list[list[int]]:
    """Add all prompts at once and step until idle; the tokens of each. Audits the cache on the way and at the end."""
    many = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    tokens: dict[str, list[int]] = {}
    for i, (prompt, p) in enumerate(zip(prompts, many, strict=True)):
        add(
            core,
            EngineRequest(
                request_id=f"{name}-{i}", prompt=np.array(prompt, dtype=np.int32).tobytes(), params=p, salt=salt
            ),
        )
        tokens[f"{name}-{i}"] = []
    for step in count():
        if not core.has_work():
            break
        assert step < STEPS, f"it never ends: {core.statistics()['waiting_reason']}"
        for output in core.step():
            tokens[output.request_id].extend(output.token_ids)
        if step % AUDIT_EVERY == 0:
            core.audit()
    core.audit()
    return list(tokens.values())


@torch.inference_mode()
def generated(model: Any, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Greedy tokens of plain `transformers` generation, whatever its end-of-sequence token."""
    return expected_tokens(model, prompt, num_tokens, lambda: _generated(model, prompt, num_tokens))


def _generated(model: Any, prompt: Sequence[int], num_tokens: int) -> list[int]:
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    ids = torch.tensor([list(prompt)])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False)
    return [int(token) for token in out[0, len(prompt) :]]


def shared_prompts(seed: int, *, shared: int, tails: Sequence[int], vocabulary: int) -> list[list[int]]:
    """Prompts that begin alike and go on differently, with the given lengths of their own."""
    rng = np.random.default_rng(seed)
    prefix = rng.integers(1, vocabulary - 1, shared).tolist()
    return [prefix + rng.integers(1, vocabulary - 1, tail).tolist() for tail in tails]


def tight_core(
    model: LoadedModel,
    *,
    num_tokens: int,
    window_tokens: int = 0,
    draft: LoadedModel | LoadedHead | None = None,
    **settings: Any,
) -> EngineCore:
    """An engine whose pools hold `num_tokens` tokens, `window_tokens` of them in window pools, where it has any."""
    return EngineCore(_tight(model, num_tokens, window_tokens, settings, draft)[0], model=model, draft=draft)


def tiered_core(
    model: LoadedModel,
    *,
    num_tokens: int,
    window_tokens: int = 0,
    host: float = 4.0,
    draft: LoadedModel | LoadedHead | None = None,
    **settings: Any,
) -> EngineCore:
    """As `tight_core`, with host memory for `host` times the frames that the device has. Its user closes it."""
    settings = {"load": "always", "host_memory": "auto", **settings}
    if "storage" in settings:
        size = {} if "://" in settings["storage"] else {"storage_size": 64 << 20}
        settings = {"prefetch": "wait_complete", **size, **settings}
    found, plan = _tight(model, num_tokens, window_tokens, settings, draft)
    frames = [max(1, math.ceil(plan.frames_of(group) * host)) for group in range(len(plan.groups))]
    config = found.model_copy(update={"host_memory": records_bytes(plan.groups, frames)})
    return EngineCore(config, model=model, draft=draft)


def _tight(
    model: LoadedModel,
    num_tokens: int,
    window_tokens: int,
    settings: dict[str, Any],
    draft: LoadedModel | LoadedHead | None = None,
) -> tuple[EngineConfig, MemoryPlan]:
    config = engine_config(model=model.name, **{"target_itl_ms": "off"} | settings)
    reaches = [group.reach.kind for group in model.spec.groups(config.page_size or 16)]
    ratio = None
    if window_tokens and "full" in reaches and {"window", "chunk"} & set(reaches):
        ratio = Fraction(window_tokens, num_tokens)
    asked = PlanSettings(
        kv_memory=2**30,
        kv_dtype=config.kv_dtype,
        page_size=config.page_size,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_running_requests=config.max_running_requests,
        swa_full_tokens_ratio=ratio,
        max_mamba_cache_size=config.max_mamba_cache_size,
        speculative_config=config.speculative_config,
        hisparse=config.hisparse,
    )
    spec = model.spec
    if draft is not None:
        spec, asked = with_draft_model(spec, asked, draft.spec)
    memory = make_plan(spec, asked).bytes_for(num_tokens)
    found = config.model_copy(
        update={"kv_memory": memory, "swa_full_tokens_ratio": None if ratio is None else float(ratio)}
    )
    return found, make_plan(spec, asked.changed(kv_memory=memory)).memory
