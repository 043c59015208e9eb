"""What an engine adds to a `TransferNode`: its settings, its identity, and requests that compute prompts for others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from quire.engine.config import EngineConfig
from quire.engine.messages import EngineRequest
from quire.errors import InvalidInput
from quire.loop import Part
from quire.memory.host_pool import HostPool
from quire.plan.budget import MemoryPlan
from quire.prefix.hashing import chain_pages, layout_identity, namespace_seed
from quire.scheduler.sampling_params import SamplingParams
from quire.spec.dtype import DType
from quire.spec.events import Namespace
from quire.spec.ids import Ids
from quire.spec.kv_format import kv_format
from quire.transfer.handshake import Identity
from quire.transfer.node import TransferNode

if TYPE_CHECKING:
    from quire.engine.core import EngineCore


def open_transfer(
    config: EngineConfig, identity: Callable[[int], Identity], host: HostPool | None, wake: Callable[[], None]
) -> TransferNode | None:
    """The connections of an engine that has a role, else None."""
    if config.role is None or host is None:
        return None
    assert config.transfer_secret is not None
    node = TransferNode(
        identity,
        host,
        epoch=config.weights_epoch,
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
    if node.connector.kind != "tcp":
        host.why_fixed = f"it is registered with {node.connector.kind}."
    return node


def transfer_parts(engine: EngineCore) -> Iterator[Part]:
    """The part for prompts that engines compute for each other; none without a role."""
    if engine.transfer is not None and engine.offload.tiers is not None:

        def begin(request_id: str, tokens: Ids, namespace: Namespace) -> None:
            engine.add(prompt_for_peer(request_id, tokens, namespace, pooled=engine.model.pooler is not None))

        engine.transfer.tiers, engine.transfer.begin = engine.offload.tiers, begin
        yield engine.transfer


def connections_of(engine: EngineCore) -> TransferNode:
    """Raises InvalidInput for an engine without a role."""
    if engine.transfer is None:
        raise InvalidInput("this engine has no role.", fix="start it with --role both and QUIRE_TRANSFER_SECRET.")
    return engine.transfer


def identity_of(config: EngineConfig, plan: MemoryPlan, model: bytes, weights_epoch: int, *, dtype: DType) -> Identity:
    """What engines that exchange pages have in common. `model` is the hash of its weights, `dtype` is theirs."""
    identity = layout_identity(model, [group.layout.fingerprint() for group in plan.groups])
    one_page = np.zeros(plan.page_size, dtype=np.int32).tobytes()
    (key,) = chain_pages(namespace_seed(Namespace(), identity), one_page, len(one_page))
    return Identity(
        model=model.hex(),
        weights_epoch=weights_epoch,
        page_size=plan.page_size,
        kv_format=kv_format(config.kv_dtype, dtype).name,
        tensor_parallel=config.tensor_parallel_size,
        layouts={group.name: group.layout.fingerprint() for group in plan.groups},
        namespaces=key.hex(),
    )


def prompt_for_peer(request_id: str, tokens: Ids, namespace: Namespace, *, pooled: bool = False) -> EngineRequest:
    """A request that computes a prompt for another engine. It draws one token, which nothing reads."""
    return EngineRequest(
        request_id=request_id,
        prompt=tokens.tobytes(),
        params=SamplingParams(max_tokens=1, temperature=0.0, pooled=pooled),
        adapter=namespace.adapter,
        salt=namespace.salt,
        is_for_peer=True,
    )
