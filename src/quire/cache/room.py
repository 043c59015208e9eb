"""Room: what groups share, how much of it there is, and whether more frames fit. Of most groups it is their own frames,
of two an arena.

What groups have free is never added: in an arena all of them would be promised the same bytes. One predicate counts
all groups of a room together, and everything that asks for room asks it.

    sum over groups of stride * max(frames that stay + frames wanted, places below frames that must not move)  <=  total

Frames with wrong bytes, which are set apart, are holes: frames of both groups lie around them.

The size of a room is a limit on the ids of its *outer* group, whose frames lie at the end of the memory:

    frames  1 ... limit ... last        no outer frame beyond the limit is handed out
            |-- in use, free --|-- released --|
                               frames in use there move to free ones below, or stay until they are freed
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from quire.memory.allocator import Arena, GroupFrames, Move
from quire.memory.allocator.id_pool import IdPool
from quire.plan.budget import MemoryPlan
from quire.prefix.reach import Reach
from quire.spec.arena import SPARED
from quire.spec.ids import Ids

Frames = Sequence[int] | Mapping[int, int]
"""A number of frames for each group of a cache, by its index."""


class InRoom(Protocol):
    """A group (`quire.cache.groups`). Eviction cannot free `num_held` of its frames, and `num_free` are free now."""

    index: int
    name: str
    reach: Reach
    room: Room
    quarantined: list[int]

    def use_again(self, frame: int) -> None: ...

    @property
    def frames(self) -> GroupFrames[Any]: ...

    @property
    def num_free(self) -> int: ...

    @property
    def num_held(self) -> int: ...


class Room:
    """The room of `groups`: `total` units, of which a frame of each takes its stride. `fixed` says which frames of a
    group must not move now, None: all. In this class one group has own frames, which move if the room gets smaller."""

    is_shared = False

    def __init__(
        self, groups: Sequence[InRoom], strides: Sequence[int], total: int, fixed: Callable[[int], Ids | None]
    ) -> None:
        self.groups = tuple(groups)
        self.strides = tuple(strides)
        self.total = self._most = total
        self._fixed = fixed
        self.outer, self._step = self.groups[0], self.strides[0]
        self.limit = self.asked = self.ids.limit
        self.spared = 0
        """Units that no request is promised while others run: they are left to what is cached."""
        self.indices = tuple(group.index for group in groups)
        for group in groups:
            group.room = self

    def lack(self, counts: Frames, *, settled: bool = False) -> int:
        """Units missing if each group has so many frames; at most 0: they fit. `settled`: once all frames can move."""
        taken = 0
        for group, stride in zip(self.groups, self.strides, strict=True):
            places = self._places(group, counts[group.index])
            taken += stride * (places if settled else self._at_least(group, places))
        return taken - self.total

    def short_of(self, group: InRoom, wanted: int, others: int = 0) -> int:
        """How many of `wanted` frames a group lacks after evictions, if neighbours get `others` each; <= 0: none."""
        counts = {each.index: each.num_held + (wanted if each is group else others) for each in self.groups}
        return -(-self.lack(counts) // self.strides[self.groups.index(group)])

    def has(self, wanted: Frames) -> bool:
        """Whether the groups can allocate so many frames more, and nothing is evicted or moved for it."""
        return all(wanted[group.index] <= group.num_free for group in self.groups)

    # -- the size

    @property
    def ids(self) -> IdPool:
        """Those of the outer group. Their limit is that of the room, from `inwards` on."""
        found: IdPool = self.outer.frames.allocator.ids
        return found

    @property
    def leaving(self) -> int:
        """Units that are to leave: those that run may use them, and nothing new is promised them."""
        return (self.limit - self.asked) * self._step

    def size_in(self, plan: MemoryPlan) -> int:
        """The units that this room has in a plan."""
        return plan.split[self.outer.index]

    def limit_for(self, units: int) -> int:
        """The limit of the outer group for so many units, or a few more, since whole frames leave."""
        return self.ids.size - max(0, self._most - units) // self._step

    def resize(self, limit: int) -> None:
        """Have this limit, as long as the one that is `asked` for is too low."""
        self.limit = limit
        self.total = self._most - (self.ids.size - limit) * self._step

    def last_of(self, group: InRoom, limit: int) -> int:
        """The last frame of a group in the memory of so many outer frames."""
        return limit

    def inwards(self, most: Frames) -> Iterator[Move]:
        """What has to move for the limit, at most so many frames of each group. Each is moved before the next is asked
        for. Frames beyond that were set apart leave with their memory."""
        yield from self._retreats(most)
        if self.limit != self.ids.limit:
            self.ids.resize(self.limit)
        for group in self.groups:
            last = self.last_of(group, self.limit)
            for frame in [each for each in group.quarantined if each > last]:
                group.use_again(frame)
        at = self.outer.index
        if self.ids.num_beyond and (fixed := self._fixed(at)) is not None:
            yield Move(at, *self.ids.inwards(fixed, most[at]))

    def _retreats(self, most: Frames) -> Iterator[Move]:
        """What moves first, and may raise the limit."""
        yield from ()

    def make_way(self, wanted: Frames) -> Move | None:
        """What has to move so that groups get what they want, which fits. Changes nothing."""
        return None

    def _places(self, group: InRoom, count: int) -> int:
        """The places that so many frames of a group take. Those that were set apart beyond the limit will leave."""
        return count - sum([each > self.limit for each in group.quarantined])

    def _at_least(self, group: InRoom, places: int) -> int:
        """So many places, or those that a group takes at least."""
        return places


class SharedRoom(Room):
    """The room of an arena. If it `caches`, a part is spared for what is cached: those that run fill all they get."""

    is_shared = True

    def __init__(
        self, groups: Sequence[InRoom], arena: Arena, fixed: Callable[[int], Ids | None], *, caches: bool
    ) -> None:
        super().__init__(groups, arena.layout.strides, arena.layout.room, fixed)
        self.arena, self._caches = arena, caches
        self.outer, self._step = self.groups[arena.layout.upper], self.strides[arena.layout.upper]
        self.asked = self.ids.limit
        self.resize(self.asked)

    def size_in(self, plan: MemoryPlan) -> int:
        assert plan.arena is not None
        return plan.arena.room

    def resize(self, limit: int) -> None:
        super().resize(limit)
        self.ids.resize(limit)
        self.spared = self.total // SPARED if self._caches else 0

    def last_of(self, group: InRoom, limit: int) -> int:
        return limit if group is self.outer else self.arena.layout.most(group.index, self.ids.size - limit)

    def _retreats(self, most: Frames) -> Iterator[Move]:
        """The limit stays where frames still lie in the way."""
        nothing = [0] * len(self.groups)
        for group in self.groups:
            if (fixed := self._fixed(group.index)) is not None:
                yield self.arena.retreat(group.index, nothing, fixed, most[group.index])
        while (lack := self.arena.lack(self.arena.extents_with(nothing))) > 0:
            self.resize(self.limit_for(self.total + lack))

    def has(self, wanted: Frames) -> bool:
        return self.arena.lack(self.arena.extents_with([wanted[group.index] for group in self.groups])) <= 0

    def make_way(self, wanted: Frames) -> Move | None:
        move = None if self.has(wanted) else self.arena.make_way([wanted[group.index] for group in self.groups])
        if move is not None:
            fixed = self._fixed(move.group)
            assert fixed is not None and not {*move.sources.tolist()} & {*fixed.tolist()}, (
                "a frame moved that must stay"
            )
        return move

    def _places(self, group: InRoom, count: int) -> int:
        pool = self.arena.pools[group.index]
        return pool.places_for(max(0, count - pool.num_apart)) - pool.num_closed

    def _at_least(self, group: InRoom, places: int) -> int:
        pool = self.arena.pools[group.index]
        least = pool.extent - pool.num_closed
        if places < least and (fixed := self._fixed(group.index)) is not None:  # else no frame lies further out
            least = pool.places_of(fixed) - pool.num_closed
        return max(places, least)
