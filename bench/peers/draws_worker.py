"""Draws of tokens from logits in a process of its own, for `kernels/draws.py`: by Quire, or by vLLM's functions.

draw -> {"us"}     CPU microseconds of one step: `rows` of `width` logits float32, all with the same `params`
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from bench.peers.worker import answer_requests
from torch import Tensor


def quire_draws(rows: int, params: dict[str, Any]) -> Callable[[Tensor], Any]:
    """Quire's sampler, with requests whose terms are those of the step before."""
    import numpy as np

    from quire.engine.device.sampler import Sampler
    from quire.scheduler.request import Request
    from quire.scheduler.sampling_params import SamplingParams
    from quire.scheduler.step import TERMS, Places, terms_of

    sampler, prompt = Sampler([]), np.ones(1, dtype=np.int32)
    requests = [
        Request(str(row), prompt, SamplingParams(seed=row, **params), max_tokens=9, index=0) for row in range(rows)
    ]
    places = Places(np.array(list(map(terms_of, requests)), dtype=TERMS), np.zeros(rows, dtype=np.int64), requests)
    return lambda logits: sampler.draw(logits, places).tokens


def operators_draws(rows: int, params: dict[str, Any]) -> Callable[[Tensor], Any]:
    """Quire's sampler without its library."""
    from quire.kernels.native.library import use_native

    use_native(False)
    return quire_draws(rows, params)


def vllm_draws(rows: int, params: dict[str, Any]) -> Callable[[Tensor], Any]:
    """What vLLM's sampler calls, with tensors that it has made for the batch before."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p, random_sample

    temperature = torch.full((rows, 1), params["temperature"])
    k = torch.full((rows,), params["top_k"]) if "top_k" in params else None
    p = torch.full((rows,), params["top_p"]) if "top_p" in params else None
    if params["temperature"] == 0:
        return lambda logits: logits.argmax(dim=-1)

    def draw(logits: Tensor) -> Tensor:
        scaled = apply_top_k_top_p(logits.div_(temperature), k, p)
        return random_sample(scaled.softmax(dim=-1, dtype=torch.float32), {})

    return draw


class Drawer:
    """One way to draw."""

    def __init__(self, name: str) -> None:
        self._make = {"quire": quire_draws, "operators": operators_draws, "vllm": vllm_draws}[name]

    @torch.inference_mode()
    def draw(self, rows: int, width: int, scale: float, params: dict[str, Any], bursts: int) -> dict[str, float]:
        """The least of some bursts. Logits are normal numbers times `scale`."""
        torch.set_num_threads(1)
        given = torch.randn(rows, width, generator=torch.Generator().manual_seed(1)) * scale
        call, found = self._make(rows, params), float("inf")
        for _ in range(bursts):
            logits = given.clone()  # a draw may overwrite them
            began = time.thread_time()
            call(logits)
            found = min(found, time.thread_time() - began)
        return {"us": found * 1e6}


if __name__ == "__main__":
    answer_requests(Drawer)
