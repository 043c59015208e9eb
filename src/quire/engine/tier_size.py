"""HostMemorySize: the host memory for pages of a serving engine gets smaller and larger."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from quire.engine.messages import MemorySize
from quire.errors import InvalidInput, RefusedCombination
from quire.offload.host_resizing import HostResizing
from quire.plan.budget import format_bytes
from quire.plan.host import host_frames
from quire.settings.setting import exact_bytes
from quire.spec.record_size import records_bytes

if TYPE_CHECKING:
    from quire.engine.core import EngineCore


class HostMemorySize:
    """The size of an engine's host memory for pages; of an engine without any, nothing."""

    def __init__(self, engine: EngineCore) -> None:
        self._plan = engine.plan
        self._pool = None if engine.tiers is None else engine.tiers.host
        self._why_fixed = "there is none." if engine.tiers is None else engine.tiers.host.why_fixed
        if engine.plan.groups_on_host:
            self._why_fixed = "pages that run have their latents there."
        self._resizing: HostResizing | None = None
        tiers = engine.offload.tiers
        if self._pool is not None and tiers is not None and not self._why_fixed:
            give_way = partial(engine.cache.sessions.give_way, by="less host memory")
            self._resizing = HostResizing(tiers, self._pool.move, give_way)
        num_bytes, asked = 0 if self._pool is None else self._pool.num_bytes, engine.config.host_memory
        self._most = self._asked = max(num_bytes, asked) if isinstance(asked, int) else num_bytes

    @property
    def reached(self) -> bool:
        """Whether it has the size that was asked for."""
        return self._resizing is None or self._resizing.reached

    def check(self, num_bytes: int) -> None:
        """Raise InvalidInput, PlanError or RefusedCombination if it cannot have so many bytes."""
        if self._resizing is None:
            raise RefusedCombination(
                f"the size of host memory is fixed: {self._why_fixed}", fix="leave host_bytes out."
            )
        if num_bytes > self._most:
            raise InvalidInput(
                f"{format_bytes(num_bytes)} of host memory were asked for, and this server has at most "
                f"{format_bytes(self._most)}.",
                fix=f"ask for at most {exact_bytes(self._most)}, or start the server with more --host-memory.",
            )
        host_frames(self._plan, num_bytes, option="--resize-host (host_bytes)")

    def aim(self, num_bytes: int) -> None:
        """Have so many bytes, as was checked; `go_on` gets there."""
        assert self._resizing is not None
        self._resizing.goal = host_frames(self._plan, num_bytes)
        self._asked = num_bytes

    def go_on(self) -> None:
        """Go on towards that size, and give back what no frame needs."""
        if self._resizing is None or self._pool is None or self._resizing.reached:
            return
        self._resizing.go_on()
        for group, last in enumerate(self._resizing.extents):
            self._pool.keep(group, last)

    def size(self) -> MemorySize | None:
        """The size now; None without host memory."""
        if self._pool is None:
            return None
        if self._resizing is None:
            return MemorySize(asked=self._most, reached=self._most, least=self._most, most=self._most)
        groups = self._plan.groups
        reached = records_bytes(groups, self._resizing.extents)
        least = records_bytes(groups, [1] * len(groups))
        return MemorySize(asked=self._asked, reached=reached, least=least, most=self._most)
