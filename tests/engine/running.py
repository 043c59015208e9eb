"""Run token prompts through an `EngineCore`, and what `transformers` generates for the same prompts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import numpy as np
import torch

from quire.engine.config import engine_config
from quire.engine.core import EngineCore
from quire.engine.messages import EngineRequest
from quire.models.hf import LoadedModel
from quire.scheduler.sampling_params import SamplingParams

AUDIT_EVERY = 7


def core_for(model: LoadedModel, *, pages: int | None = None, page_size: int = 16, **settings: Any) -> EngineCore:
    """An engine on a model that is loaded already, with room for exactly `pages` pages."""
    per_page = sum(group.layout.bytes_per_frame for group in model.groups(page_size))
    memory = 64 * 2**20 if pages is None else per_page * (pages + 1)
    config = engine_config(model=model.name, page_size=page_size, kv_memory=memory, **settings)
    return EngineCore(config, model=model)


def run(
    core: EngineCore,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    name: str = "r",
) -> list[list[int]]:
    """Add all prompts at once and step until idle; the tokens of each. Audits the cache on the way and at the end."""
    many = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    tokens: dict[str, list[int]] = {}
    for i, (prompt, p) in enumerate(zip(prompts, many, strict=True)):
        core.add(
            EngineRequest(
                request_id=f"{name}-{i}", prompt=np.array(prompt, dtype=np.int32).tobytes(), params=p, index=0
            )
        )
        tokens[f"{name}-{i}"] = []
    for step in count():
        if not core.has_work():
            break
        for output in core.step():
            tokens[output.request_id].extend(output.token_ids)
        if step % AUDIT_EVERY == 0:
            core.audit()
    core.audit()
    return list(tokens.values())


@torch.inference_mode()
def generated(model: Any, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Greedy tokens of plain `transformers` generation, whatever its end-of-sequence token."""
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
