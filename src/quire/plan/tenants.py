"""Tenants of a planned engine: what their floors and ceilings are in bytes and tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.plan.plan import Plan
from quire.settings.tenants import Amount, TenantTerms, check_tenants


def tenants_as_dict(terms: Sequence[TenantTerms], plan: Plan) -> list[dict[str, Any]]:
    """Each tenant as `quire plan --json` tells it. Raises InvalidInput if the plan cannot keep these terms."""
    memory = plan.memory
    check_tenants(terms, memory.pool_bytes)
    floors = [each.floor.of(memory.pool_bytes) for each in terms]

    def of(share: float) -> dict[str, int]:
        return {"bytes": int(share * memory.pool_bytes), "tokens": int(share * memory.num_tokens)}

    found = []
    for each, floor in zip(terms, floors, strict=True):
        ceiling = min(1.0, (each.ceiling or Amount(share=1.0)).of(memory.pool_bytes))
        most = min(ceiling, 1 - sum(floors) + floor)
        found.append(
            {
                "name": each.name,
                "floor": of(floor),
                "ceiling": of(ceiling),
                "weight": each.weight,
                "largest_request": min(plan.largest_request, int(most * memory.num_tokens) + 1),
            }
        )
    return found
