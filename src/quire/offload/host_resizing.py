"""HostResizing: how many host frames each group has, up to those of its pool, while transfers run.

As on the device (`quire.cache.resizing`): copies that are used least leave first, sessions at rest end for those that
these hold, then the outermost records move inwards, but for those that transfers read or write. Those move later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from quire.cache.resizing import MOVED_BYTES
from quire.offload.host_groups import HostGroup
from quire.offload.tiering import Tiering
from quire.spec.ids import Ids


class HostResizing:
    """The size of the host tier of one cache. `move(group, sources, targets)` copies records at once. `give_way()` ends
    the row of a session, if there is one."""

    def __init__(self, tiers: Tiering, move: Callable[[int, Ids, Ids], None], give_way: Callable[[], bool]) -> None:
        self._tiers, self._move, self._give_way = tiers, move, give_way
        self.goal: Sequence[int] = tuple(host.num_frames for host in tiers.hosts)
        self.num_moved = 0

    @property
    def reached(self) -> bool:
        """Whether each group has the frames of the goal, and uses none beyond."""
        pools = [(host.allocator.ids, self.goal[host.index]) for host in self._tiers.hosts]
        return all(ids.limit == goal and not ids.num_beyond for ids, goal in pools)

    @property
    def extents(self) -> list[int]:
        """The last frame of each group that has to have memory."""
        return [host.allocator.ids.last_present for host in self._tiers.hosts]

    def go_on(self) -> None:
        """Go on towards the goal. At most `MOVED_BYTES` of a group move."""
        for host in self._tiers.hosts:
            ids, wanted = host.allocator.ids, self.goal[host.index]
            used = ids.size + 1
            while wanted < ids.num_used and (ids.num_used < used or self._give_way()):
                used = ids.num_used
                self._tiers.host_room(host, host.num_free + used - wanted)
            ids.resize(wanted)
            for frame in [each for each in host.quarantined if each > wanted]:  # they leave with their memory
                host.quarantined.remove(frame)
                host.free_frames(np.array([frame], dtype=np.int32))
            most = max(1, MOVED_BYTES // host.record_bytes)
            sources, targets = ids.inwards(self._fixed(host), most)
            if len(sources):
                self._move(host.index, sources, targets)
                ids.moved(sources, targets)
                host.table.rebind(sources, targets)
                self.num_moved += len(sources)

    def _fixed(self, host: HostGroup) -> Ids:
        """Frames beyond the limit that transfers read or write, or that no page has."""
        ids = host.allocator.ids
        beyond = ids.limit + 1 + np.flatnonzero(ids.is_out(slice(ids.limit + 1, None))).astype(np.int32)
        loads = [part.host for each in self._tiers.moving.values() for part in each.parts if part.group == host.index]
        still = np.concatenate([np.array([*host.reads], dtype=np.int32), *loads])
        return beyond[~np.isin(beyond, host.table.frame) | np.isin(beyond, still)]
