"""Parts of a loop over a cache with `Offloads`: retentions expire, and requests wait for transfers between tiers."""

from __future__ import annotations

import logging
from collections.abc import Callable

from quire.counters import Section
from quire.loop.part import Part
from quire.offload.deletion import Stored
from quire.offload.offloading import Tiered
from quire.offload.retention import Retention

logger = logging.getLogger(__name__)

_MOVES_S = 0.005  # to wait for bytes when there is nothing to compute


class RetentionPart(Part):
    """The retentions of one cache."""

    def __init__(self, retention: Retention) -> None:
        self._retention = retention

    def before_schedule(self) -> None:
        self._retention.expire()

    def counters(self) -> list[Section]:
        return [("", self._retention.counters())]


class TiersPart(Part):
    """The lower tiers of one cache. `end` closes what carries and stores bytes: its arguments process ended transfers,
    and stop deletions, which may be long. `more` are counters of the medium."""

    def __init__(
        self,
        offload: Tiered,
        end: Callable[[Callable[[], object], Callable[[], None]], None],
        more: Callable[[], object],
    ) -> None:
        self._offload, self._end, self._more = offload, end, more
        self._is_closed = False

    @property
    def is_due(self) -> bool:
        tiers = self._offload.tiers
        return not tiers.mover.idle or tiers.deletion.is_due or tiers.archiver.is_due

    def idle(self) -> None:
        self._offload.ahead.wait_moves(_MOVES_S)

    def counters(self) -> list[Section]:
        return [*self._offload.tiers.sections(), ("tiers", self._more())]

    def close(self) -> None:
        """Wait for a while for transfers to the store, and log what is not stored. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        tiers = self._offload.tiers
        tiers.archiver.hasten()
        self._end(self._offload.ahead.settle_moves, tiers.deletion.end)
        states = [*tiers.deletion.scopes.values()]
        if hidden := states.count(Stored.HIDDEN):
            logger.warning(
                "%d flushes are not at their end: no engine finds their records, but they are stored until one looks "
                "there, or `quire store gc` is run",
                hidden,
            )
        if held := states.count(Stored.HELD):
            logger.warning("%d flushes have not reached the store: flush again when it answers", held)
        if pending := len(tiers.archiver.pending):
            logger.warning(
                "what is on the host of %d prompts was not all stored: the store took no more of it", pending
            )
