"""The device of an engine, its plan, and the bytes of its pools when no size is given."""

from __future__ import annotations

from functools import partial

import torch

from quire.engine.config import EngineConfig
from quire.engine.cores import available_cores
from quire.engine.device.warm_up import Pads, warm_ups
from quire.engine.host_memory import host_memory
from quire.engine.planning import engine_plan
from quire.errors import InvalidInput
from quire.kernels.backend import AttentionBackend
from quire.kernels.native.library import use_native
from quire.plan.budget import MemoryPlan
from quire.plan.devices import graph_bytes, sampling_bytes
from quire.plan.plan import Plan
from quire.spec.model import ModelSpec
from quire.spec.speculation import get_topk

_AUTO_SHARE_CPU = 0.25  # share of the memory that is free after the weights are loaded
_AUTO_SHARE_DEVICE = 0.80  # likewise, on a GPU
_AUTO_MOST_CPU = 4 * 2**30


def free_bytes(device: torch.device) -> int:
    """The KV budget when none is given: a share of what is free now."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what torch keeps of tensors that are gone counts as used
        return int(torch.cuda.mem_get_info(device)[0] * _AUTO_SHARE_DEVICE)
    return default_kv_bytes(host_memory().available)


def default_kv_bytes(available: int) -> int:
    """The KV budget on a CPU when none is given, from the bytes of host memory that are available."""
    return min(_AUTO_MOST_CPU, int(available * _AUTO_SHARE_CPU))


def open_device(config: EngineConfig) -> tuple[torch.device, AttentionBackend]:
    """The device of an engine, and what computes attention there. From now on this process computes with the
    configured threads, and with or without native kernels. Raises InvalidInput if a demanded backend is not there."""
    use_native(config.native_kernels)
    torch.set_num_threads(config.threads or min(torch.get_num_threads(), available_cores()))
    device = resolve_device(config.device)
    backend = AttentionBackend(config.attention_backend, device)
    backend.check()
    return device, backend


def resolve_device(name: str) -> torch.device:
    """The device of that name, with its number; `auto` is the first GPU, else the CPU. Raises InvalidInput if it is not
    there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidInput(f"'{name}' is not a device.", fix="use cpu, cuda or cuda:N.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidInput(
            f"device '{name}' was asked for, and this machine has no CUDA device.", fix="use --device cpu."
        )
    if device.type == "cuda" and ":" not in name:
        return torch.device("cuda", torch.cuda.current_device())  # tensors have the number too
    return device


def largest_graph(config: EngineConfig, device: torch.device) -> int:
    """Requests of the largest CUDA graph of decode steps; 0 for none. Steps with drafts, or that swap latents in from
    host memory, are no decode steps of fixed shapes, and torch's operators follow a plan of each step."""
    eager = config.disable_cuda_graph or config.attention_backend == "torch"
    if device.type != "cuda" or eager or not config.has_fixed_steps:
        return 0
    return min(config.cuda_graph_max_bs, config.max_running_requests)


def warm_ups_of(config: EngineConfig, plan: MemoryPlan, device: torch.device) -> list[Pads]:
    """Steps that compile kernels at start; none where nothing is compiled."""
    if device.type != "cuda" or not config.warms_up:
        return []
    return warm_ups(plan.largest_request, config.max_num_batched_tokens, trees=get_topk(plan.speculation) > 1)


def plan_for(config: EngineConfig, device: torch.device, spec: ModelSpec, *drafts: ModelSpec) -> Plan:
    """The plan of an engine whose models are loaded: the target, and its draft if it has one. Raises PlanError."""
    graphs = graph_bytes(largest_graph(config, device), spec.vocab_size)
    draws = sampling_bytes(config.max_running_requests, spec.vocab_size) if device.type == "cuda" else 0
    plan = partial(engine_plan, config, spec, drafts, graph_bytes=graphs, sampling_bytes=draws)
    if config.kv_memory is not None:
        return plan(config.kv_memory)
    free = free_bytes(device) - graphs - draws
    found = plan(free)
    if features := found.memory.feature_bytes:
        found = plan(free - features)
    # No size was given, so the pools get no more bytes than all requests at their longest can use.
    useful = found.bytes_for(config.max_running_requests * found.context)
    return found if found.kv_bytes <= useful else plan(useful)
