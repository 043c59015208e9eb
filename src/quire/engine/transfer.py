"""What an engine adds to a `TransferNode`: its settings, its identity, and requests that compute prompts for others."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from quire.engine.config import EngineConfig
from quire.engine.messages import EngineRequest, TokenOutput
from quire.memory.host_pool import HostPool
from quire.plan.budget import MemoryPlan
from quire.prefix.hashing import chain_pages, layout_identity, namespace_seed
from quire.scheduler.sampling_params import SamplingParams
from quire.spec.events import Namespace
from quire.spec.ids import Ids
from quire.transfer.handshake import Identity
from quire.transfer.node import TransferNode


def transfer_node(config: EngineConfig, identity: Identity, host: HostPool, wake: Callable[[], None]) -> TransferNode:
    """The connections of an engine that has a role."""
    assert config.role is not None and config.transfer_secret is not None
    return TransferNode(
        identity,
        host,
        role=config.role,
        secret=config.transfer_secret,
        listen=config.transfer_listen,
        peers=config.prefill_peers.split(",") if config.prefill_peers else (),
        connector=config.transfer_connector,
        unauthenticated=config.transfer_unauthenticated,
        seconds=config.transfer_seconds,
        least_tokens=config.transfer_min_tokens,
        label=config.transfer_name or "",
        wake=wake,
    )


def identity_of(config: EngineConfig, plan: MemoryPlan, model: bytes, weights_epoch: int) -> Identity:
    """What engines that exchange pages have in common. `model` is the hash of its weights."""
    identity = layout_identity(model, [group.layout.fingerprint() for group in plan.groups])
    one_page = np.zeros(plan.page_size, dtype=np.int32).tobytes()
    (key,) = chain_pages(namespace_seed(Namespace(), identity), one_page, len(one_page))
    return Identity(
        model=model.hex(),
        weights_epoch=weights_epoch,
        page_size=plan.page_size,
        kv_format=config.kv_dtype,
        tensor_parallel=config.tensor_parallel_size,
        layouts={group.name: group.layout.fingerprint() for group in plan.groups},
        namespaces=key.hex(),
    )


def prompt_for_peer(request_id: str, tokens: Ids, namespace: Namespace) -> EngineRequest:
    """A request that computes a prompt for another engine. It draws one token, which nothing reads."""
    return EngineRequest(
        request_id=request_id,
        prompt=tokens.tobytes(),
        params=SamplingParams(max_tokens=1, temperature=0.0),
        adapter=namespace.adapter,
        salt=namespace.salt,
        is_for_peer=True,
    )


def is_for_peer(output: TokenOutput, transfer: TransferNode) -> bool:
    """Whether an output is of a prompt for another engine, which learns that it has ended."""
    if output.request_id not in transfer.prefill.ids:
        return False
    if output.finish_reason is not None:
        transfer.prefill.ended(output.request_id, output.error)
    return True
