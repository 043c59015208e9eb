"""How many engines compute prompts, how many answer, and what travels between them, for a mix of requests."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from quire.errors import InvalidInput
from quire.plan.budget import MemoryPlan

MOST_BUSY: Final = 0.7
"""The planned share of time that an engine or a link works."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleLoad:
    """`requests_per_s` of mean lengths, of whose prompts the share `cached` is at the engine that answers. One engine
    computes `prefill_rate` prompt tokens a second, or answers `decode_rate` tokens a second, all requests together. A
    token has `token_bytes` on the link, which carries `link_rate` bytes a second into or out of an engine."""

    requests_per_s: float
    prompt_tokens: float
    output_tokens: float
    prefill_rate: float
    decode_rate: float
    token_bytes: float
    link_rate: float
    cached: float = 0.0

    def __post_init__(self) -> None:
        for name in ("requests_per_s", "prompt_tokens", "output_tokens", "prefill_rate", "decode_rate", "link_rate"):
            if getattr(self, name) <= 0:
                raise InvalidInput(f"{name} is {getattr(self, name):g}.", fix="give a number above zero.")
        if not 0 <= self.cached < 1:
            raise InvalidInput(f"{self.cached:g} of the prompts is cached.", fix="give a share from 0 to below 1.")


@dataclass(frozen=True, slots=True, kw_only=True)
class RolePlan:
    """Engines of each role. `prompt_s` is the mean time from a request to its last prompt page on the decode engine;
    `prompts_in_flight` are at once between the two. Host bytes are those of prompts in flight, and link bytes those a
    second, of each engine."""

    prefill: int
    decode: int
    prefill_busy: float
    decode_busy: float
    prompt_s: float
    prompts_in_flight: float
    prefill_host_bytes: int
    decode_host_bytes: int
    link_bytes_per_s: float
    prefill_link_bytes_per_s: float
    decode_link_bytes_per_s: float


def sent_bytes(plan: MemoryPlan, prompt_tokens: int) -> float:
    """Bytes that a resume after a prompt needs, of one rank: keys and values, of a window its tail, and a state."""
    num_bytes = 0.0
    for group in plan.groups:
        tokens = min(prompt_tokens, group.reach.tokens or prompt_tokens)
        num_bytes += group.layout.bytes_per_frame if group.reach.in_place else group.layout.bytes_per_token * tokens
    return num_bytes


def plan_roles(load: RoleLoad) -> RolePlan:
    """The fewest engines of each role of which none is busier than `MOST_BUSY`, nor its link.

        prefill engines  N = requests/s * D / MOST_BUSY              D: seconds for what a prompt lacks
        decode engines   M = requests/s * output / decode_rate / MOST_BUSY
        a prompt takes   W = D + busy * D / (2 * (1 - busy)) + bytes / link_rate
        in flight        L = requests/s * W

    The first two terms of W are the M/D/1 queue with which DistServe (Zhong et al., OSDI 2024, section 3.1) describes a
    prefill engine; L is Little's law. Bursts need more: replay a trace with `quire replay --prefill`.
    """
    rate, missing = load.requests_per_s, load.prompt_tokens * (1 - load.cached)
    seconds, num_bytes = missing / load.prefill_rate, missing * load.token_bytes
    linked = rate * num_bytes / load.link_rate
    decoding = rate * load.output_tokens / load.decode_rate
    prefill, decode = _engines(rate * seconds, linked), _engines(decoding, linked)
    busy = rate * seconds / prefill
    waits = seconds + busy * seconds / (2 * (1 - busy)) + num_bytes / load.link_rate
    held = rate * waits * num_bytes
    return RolePlan(
        prefill=prefill,
        decode=decode,
        prefill_busy=busy,
        decode_busy=decoding / decode,
        prompt_s=waits,
        prompts_in_flight=rate * waits,
        prefill_host_bytes=math.ceil(held / prefill),
        decode_host_bytes=math.ceil(held / decode),
        link_bytes_per_s=rate * num_bytes,
        prefill_link_bytes_per_s=rate * num_bytes / prefill,
        decode_link_bytes_per_s=rate * num_bytes / decode,
    )


def _engines(*work: float) -> int:
    """Engines for so many seconds of each kind of work in a second."""
    return max(1, *(math.ceil(seconds / MOST_BUSY - 1e-9) for seconds in work))
