"""Replicas of Serve: what they say of their servers, and where they listen.

Nothing keeps a list of them: Serve's controller does, and replicas are asked.
"""

from __future__ import annotations

import logging
from typing import Any

import grpc
import grpc.aio
import ray
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from quire.routing.upstream import Upstream

logger = logging.getLogger(__name__)

EVERY_S = 1.0
"""Seconds between two questions."""

_ANSWER_S = 5.0
_LOOPBACK, _ALL = "127.0.0.1", "[::]"


async def upstreams_of(replicas: DeploymentHandle[Any]) -> list[Upstream] | None:
    """The server of each replica that works. None if they are not known now."""
    try:
        answers = await replicas.broadcast("upstream").results_async(timeout_s=_ANSWER_S, return_exceptions=True)
    except DeploymentUnavailableError:
        return []
    except Exception as error:  # the controller starts again, or a replica hangs
        logger.warning("replicas of %s are not known now: %r", replicas.deployment_name, error)
        return None
    return [answer for answer in answers if isinstance(answer, Upstream)]


def keep_on_loopback() -> None:
    """Replicas of Serve listen for each other on all interfaces, whatever the address of their node. Where that is the
    loopback address, this process does not. Call it in a replica's constructor: it listens after that."""
    if ray.util.get_node_ip_address() != _LOOPBACK:
        return
    kind = type(grpc.aio.server())
    listen = kind.add_insecure_port

    def on_loopback(self: grpc.aio.Server, address: str) -> int:
        port: int = listen(self, address.replace(_ALL, _LOOPBACK))
        return port

    kind.add_insecure_port = on_loopback
