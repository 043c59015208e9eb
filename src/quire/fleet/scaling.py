"""How many engines a fleet needs. Serve's controller calls it: its other counts are of calls, and requests are none."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

IN_FLIGHT = "in_flight"
"""What replicas report: the requests that their engine runs or queues."""


def wanted_replicas(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """As many as have the target number of requests each; those there are while none of them reports. Serve holds the
    result within bounds, and delays it."""
    reported = (context.aggregated_metrics or {}).get(IN_FLIGHT) or {}
    if not reported:
        return context.target_num_replicas, {}
    return math.ceil(sum(reported.values()) / context.config.target_ongoing_requests), {}
