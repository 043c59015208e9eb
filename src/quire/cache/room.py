"""Room: what groups share, and whether more frames fit. Of most groups it is their own frames, of two an arena.

What groups have free is never added: in an arena all of them would be promised the same bytes. One predicate counts
all groups of a room together, and everything that asks for room asks it.

    sum over groups of stride * max(frames that stay + frames wanted, places below frames that must not move)  <=  total

Frames with wrong bytes, which are set apart, are holes: frames of both groups lie around them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from quire.memory.allocator import Arena, GroupFrames, Move
from quire.prefix.reach import Reach
from quire.spec.ids import Ids

SPARED = 4
"""One part of an arena in so many is spared: docs/decisions/088-one-arena-from-two-ends.md."""
Frames = Sequence[int]
"""A number of frames for each group of a cache, by its index."""


class InRoom(Protocol):
    """A group (`quire.cache.groups`). Eviction cannot free `num_held` of its frames, and `num_free` are free now."""

    index: int
    name: str
    reach: Reach
    room: Room

    @property
    def frames(self) -> GroupFrames[Any]: ...

    @property
    def num_free(self) -> int: ...

    @property
    def num_held(self) -> int: ...


class Room:
    """The room of `groups`: `total` units, of which a frame of each takes its stride. In this class one group has
    frames of its own, and none of them moves."""

    is_shared = False

    def __init__(self, groups: Sequence[InRoom], strides: Sequence[int], total: int) -> None:
        self.groups = tuple(groups)
        self.strides = tuple(strides)
        self.total = total
        self.leaving = 0
        """Units that are to leave: those that run may use them, and nothing new is promised them."""
        self.spared = 0
        """Units that no request is promised while others run: they are left to what is cached."""
        self.indices = tuple(group.index for group in groups)
        for group in groups:
            group.room = self

    def lack(self, counts: Frames, *, settled: bool = False) -> int:
        """Units that are missing if each group has so many frames; at most 0: they fit. With `settled`, once all frames
        can move."""
        taken = 0
        for group, stride in zip(self.groups, self.strides, strict=True):
            places = self._places(group, counts[group.index])
            taken += stride * (places if settled else max(places, self._least(group)))
        return taken - self.total

    def obtainable(self, group: InRoom, others: int = 0) -> int:
        """Frames that a group can have if all that can be evicted is, and its neighbours get so many each."""
        left, own = self.total, 1
        for each, stride in zip(self.groups, self.strides, strict=True):
            if each is group:
                own = stride
            else:
                left -= stride * max(self._places(each, each.num_held + others), self._least(each))
        return self._frames(group, left // own) - group.num_held

    def has(self, wanted: Frames) -> bool:
        """Whether the groups can allocate so many frames more, and nothing is evicted or moved for it."""
        return all(wanted[group.index] <= group.num_free for group in self.groups)

    def resized(self, leaving: int) -> None:
        """The group has other frames, of which so many are to leave."""
        self.total, self.leaving = self.groups[0].frames.limit, leaving

    def make_way(self, wanted: Frames) -> Move | None:
        """What has to be copied so that groups get what they want, which fits. Changes nothing; `done` follows."""
        return None

    def done(self, move: Move) -> None:
        """These frames have been copied."""

    def set_apart(self, group: InRoom, frame: int) -> None:
        """A frame in use has wrong bytes: none has these until `use_again`."""

    def use_again(self, group: InRoom, frame: int) -> None:
        """A frame that was set apart is about to be freed."""

    def _places(self, group: InRoom, count: int) -> int:
        """The places that so many frames of a group take."""
        return count

    def _frames(self, group: InRoom, places: int) -> int:
        """Frames at so many places."""
        return places

    def _least(self, group: InRoom) -> int:
        """The places that a group takes at least."""
        return 0


class SharedRoom(Room):
    """The room of an arena. `fixed` says which frames of a group must not move now, None: all of them. If it `caches`,
    a part of it is spared: requests that run fill whatever they get, and then compute what was cached before."""

    is_shared = True

    def __init__(
        self, groups: Sequence[InRoom], arena: Arena, fixed: Callable[[int], Ids | None], *, caches: bool
    ) -> None:
        super().__init__(groups, arena.layout.strides, arena.layout.room)
        self.spared = self.total // SPARED if caches else 0
        self.arena = arena
        self._fixed = fixed

    def has(self, wanted: Frames) -> bool:
        return self.arena.lack(self.arena.extents_with([wanted[group.index] for group in self.groups])) <= 0

    def make_way(self, wanted: Frames) -> Move | None:
        move = self.arena.make_way([wanted[group.index] for group in self.groups])
        if move is None:
            return None
        fixed = self._fixed(move.group)
        assert fixed is not None and not np.isin(move.sources, fixed).any(), "a frame was moved that must stay"
        return move

    def done(self, move: Move) -> None:
        self.arena.done(move)

    def set_apart(self, group: InRoom, frame: int) -> None:
        self.arena.set_apart(group.index, frame)

    def use_again(self, group: InRoom, frame: int) -> None:
        self.arena.use_again(group.index, frame)

    def _places(self, group: InRoom, count: int) -> int:
        pool = self.arena.pools[group.index]
        return pool.places_for(max(0, count - pool.num_apart))

    def _frames(self, group: InRoom, places: int) -> int:
        pool = self.arena.pools[group.index]
        return pool.ids_in(max(0, places)) + pool.num_apart

    def _least(self, group: InRoom) -> int:
        pool, fixed = self.arena.pools[group.index], self._fixed(group.index)
        return pool.extent if fixed is None else pool.places_of(fixed)


def rooms_of(
    groups: Sequence[InRoom], arena: Arena | None, fixed: Callable[[int], Ids | None], *, caches: bool
) -> list[Room]:
    """The rooms of a cache: one arena of all its groups, or one for each."""
    if arena is not None:
        return [SharedRoom(groups, arena, fixed, caches=caches)]
    return [Room([group], [1], group.frames.num_frames) for group in groups]
