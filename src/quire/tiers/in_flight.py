"""InFlight: transfers that a mover has taken and not handed back, how many bytes that is, and which are overdue."""

from __future__ import annotations

import math
from collections.abc import Mapping

from quire.tiers.transfer import Lane, Transfer


class InFlight:
    """Bounded per lane, in transfers and in bytes; `most_bytes` replaces the bounds of the table. A transfer larger
    than the bound is taken when it is alone."""

    def __init__(self, most_bytes: Mapping[Lane, int]) -> None:
        self._most_bytes = most_bytes
        self._bytes: dict[Lane, int] = {}
        self._transfers: dict[Lane, int] = {}
        self._watched: set[Transfer] = set()  # that have a deadline, which has not passed
        self.next_deadline = math.inf  # at the earliest; the transfer may have ended

    def take(self, transfer: Transfer, now: float) -> bool:
        """Count a transfer in; its deadline runs from now. False: there is no room, and nothing was changed."""
        lane = transfer.lane
        count, num_bytes = self._transfers.get(lane, 0), self.num_bytes(lane) + transfer.num_bytes
        if count and (num_bytes > self._most_bytes.get(lane, lane.most_bytes) or count >= lane.most_transfers):
            return False
        self._bytes[lane], self._transfers[lane] = num_bytes, count + 1
        transfer.expires_at = now + transfer.limit_s
        if transfer.expires_at < math.inf:
            self._watched.add(transfer)
            self.next_deadline = min(self.next_deadline, transfer.expires_at)
        return True

    def give_back(self, transfer: Transfer) -> None:
        """Count a transfer out."""
        self._bytes[transfer.lane] -= transfer.num_bytes
        self._transfers[transfer.lane] -= 1
        self._watched.discard(transfer)
        assert self._transfers[transfer.lane] >= 0, "a transfer was handed back twice"

    def overdue(self, now: float) -> list[Transfer]:
        """Transfers that have not ended and whose deadline has passed since the last call, the earliest first."""
        if now < self.next_deadline:
            return []
        passed = [transfer for transfer in self._watched if transfer.done or transfer.expires_at <= now]
        self._watched.difference_update(passed)
        self.next_deadline = min((transfer.expires_at for transfer in self._watched), default=math.inf)
        return sorted((transfer for transfer in passed if not transfer.done), key=lambda late: late.expires_at)

    def num_bytes(self, lane: Lane) -> int:
        """Bytes of the transfers of a lane."""
        return self._bytes.get(lane, 0)

    @property
    def num_transfers(self) -> int:
        """On all lanes."""
        return sum(self._transfers.values())
