"""Tenants of an engine: its part, and what the server asks of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from quire.errors import InvalidInput
from quire.loop import Part
from quire.loop.tenants import TenantsPart, parts_for_tenants

if TYPE_CHECKING:
    from quire.engine.core import EngineCore


def tenant_parts(engine: EngineCore) -> Iterator[Part]:
    """The part that counts for tenants; none without them."""
    yield from parts_for_tenants(engine.cache)


def tenants_of_engine(engine: EngineCore) -> TenantsPart:
    """The tenants. Raises InvalidInput where there are none."""
    part = engine.part(TenantsPart)
    if part is None:
        raise InvalidInput("this engine has no tenants.", fix="start it with --tenants FILE.")
    return part
