"""What replicas say of their servers. Nothing keeps a list of them: Serve's controller does, and replicas are asked."""

from __future__ import annotations

import logging
from typing import Any

from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from quire.routing.upstream import Upstream

logger = logging.getLogger(__name__)

EVERY_S = 1.0
"""Seconds between two questions."""

_ANSWER_S = 5.0


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
