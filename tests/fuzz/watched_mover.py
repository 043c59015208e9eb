"""WatchedMover: a virtual mover and its clock; what it hands back is checked against the laws of moving."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from quire.tiers.store import Store
from quire.tiers.transfer import GOOD, LANES, MISSING, REFUSED, Lane, Transfer
from tests.fuzz.choosing_mover import ChoosingMover
from tests.fuzz.host_records import HostRecords


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class WatchedMover(ChoosingMover):
    """A wait lets time pass until the next transfer ends. `wrong` has the laws that were broken, in words. A transfer
    that forgets may fail where the store `refuses`: it is tried again. `deadline_s` replaces the deadlines of lanes."""

    def __init__(
        self,
        records: HostRecords,
        store: Store | None,
        clock: Clock,
        *,
        bandwidths: Mapping[Lane, float],
        latency: Mapping[Lane, float],
        choose: Callable[[int], int] | None,
        most_bytes: Mapping[Lane, int],
        refuses: bool = False,
        deadline_s: float | None = None,
    ) -> None:
        super().__init__(
            records,
            store,
            seconds=clock,
            bandwidths=bandwidths,
            latency=latency,
            choose=choose,
            most_bytes=most_bytes,
        )
        self._clock = clock
        self._refuses = refuses
        self._deadline_s = deadline_s
        self.wrong: list[str] = []
        self.num_ended = dict.fromkeys(LANES, 0)

    def submit(self, move: Transfer) -> bool:
        """Its deadline is what was drawn, where its lane has one."""
        if move.lane.deadline_s < math.inf:
            move.deadline_s = self._deadline_s
        return super().submit(move)

    def wait(self, seconds: float) -> bool:
        """Time passes until something ends."""
        end = self.next_end
        if end is not None:
            self._clock.now = max(self._clock.now, end)
        return super().wait(seconds)

    def finished(self) -> list[Transfer]:
        """What has ended keeps the laws."""
        ended = super().finished()
        for move in ended:
            self.num_ended[move.lane] += 1
            if move.expired:
                if self._clock.now < move.expires_at:
                    self.wrong.append(f"a {move.lane} expired before its deadline")
            elif move.error and not (self._refuses and move.lane is Lane.DELETE):
                self.wrong.append(f"a {move.lane} failed: {move.error}")
            elif move.lane in (Lane.ARCHIVE, Lane.FETCH):
                self._check_pages(move)
        return ended

    def _check_pages(self, move: Transfer) -> None:
        """A page went in all of its groups or in none, and none went behind one that did not."""
        good: dict[bytes, bool] = {}
        for units, defects in zip(move.units, move.defects, strict=True):
            for page, defect in zip(units.pages, defects, strict=True):
                if good.setdefault(page, defect == GOOD) != (defect == GOOD):
                    self.wrong.append(f"a {move.lane} moved a page in one group and not in another")
            whole = [defect == GOOD for defect in defects]
            if whole != sorted(whole, reverse=True):
                self.wrong.append(f"a {move.lane} moved a page behind one that it did not move")
        named = {defect for defects in move.defects for defect in defects} - {GOOD, MISSING, REFUSED}
        if named and all(good.values()):
            self.wrong.append(f"a {move.lane} found {named} and moved everything")
