"""ArenaMachine: random operations on an arena, checked against a plain list of bytes, each with its owner."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from quire.errors import OutOfPages
from quire.memory.allocator.arena import Arena
from quire.spec.arena import ArenaLayout
from quire.spec.ids import Ids
from quire.testing.choices import Choices


class ArenaMachine:
    """Frames have names. `bytes[at]` is the name of the frame that has that byte, 0 for none, -1 for padding. `apart`
    are names of frames that stay where they are, with bytes that none may have."""

    OPERATIONS = (
        "alloc",
        "alloc",
        "grow",
        "grow",
        "free",
        "free",
        "fix",
        "group",
        "set_apart",
        "use_again",
        "starve",
        "resize",
        "clear",
    )
    EVENTS = (
        "moved",
        "moved over a hole",
        "not copied",
        "refused",
        "refused with room elsewhere",
        "fixed frame in the way",
        "both around a hole",
        "starved",
        "any mix",
        "smaller",
        "larger",
        "moved inwards",
        "retreated for a size",
        "in the way of a size",
        "beyond the limit",
    )

    def __init__(self, choices: Choices) -> None:
        small, large = choices.between(1, 4), choices.between(1, 9)
        strides = (small, large) if choices.chance(50) else (large, small)
        self.strides = strides
        budget = 2 * (small + large) + choices.between(0, 20 * max(strides))
        self.arena = Arena(ArenaLayout(budget, strides), ("one", "other"))
        self.low = strides.index(max(strides)) if small != large else 1
        self.last = budget // strides[1 - self.low] - 1
        self.limit = self.last  # of the upper ids
        self.bytes = [0] * budget
        for group in (0, 1):
            self._write(group, 0, -1)
        self.frames: tuple[dict[int, int], dict[int, int]] = ({}, {})  # name to id, by group
        self.fixed: set[int] = set()  # names of frames that must not move
        self.apart: tuple[list[int], list[int]] = ([], [])
        self.names = 0
        self.happened: Counter[str] = Counter()

    def step(self, choices: Choices) -> None:
        operation = choices.one_of(self.OPERATIONS)
        getattr(self, operation)(choices)
        self.happened[operation] += 1
        self.check()

    # -- operations

    def alloc(self, choices: Choices) -> None:
        """Ids for one group as both lie: those nearest to its end that are free."""
        group, count = choices.below(2), choices.between(0, 6)
        pool = self.arena.pools[group]
        free = self._free(group)
        if count > len(free):
            with pytest.raises(OutOfPages) as caught:
                pool.take(count)
            assert (caught.value.wanted, caught.value.free) == (count, len(free))
            self.happened["refused"] += 1
            return
        ids = pool.take(count)
        assert ids.dtype == np.int32 and ids.tolist() == sorted(free[:count])
        self._own(group, ids)

    def grow(self, choices: Choices) -> None:
        """Room for ids of both groups together, with moves; it is there exactly if all that stays fits beside it. Half
        of the time as many are wanted as fit."""
        wanted = [choices.between(0, 5), choices.between(0, 5)]
        group = choices.below(2)
        while choices.chance(95) and self._fits(self._places([n + (g == group) for g, n in enumerate(wanted)])):
            wanted[group] += 1
        fixed = self._fixed_extents()
        counts = self._places(wanted)
        needed = [max(count, low) for count, low in zip(counts, fixed, strict=True)]
        fits = self._fits(needed)
        pools = self.arena.pools
        told = [pool.places_for(pool.num_live + n) for pool, n in zip(pools, wanted, strict=True)]
        assert counts == told or not self._fits(counts)
        assert (self.arena.lack(needed) <= 0) == fits
        assert fixed == [
            pool.places_of(self._ids(g, self.fixed - {*self.apart[g]})) for g, pool in enumerate(self.arena.pools)
        ]
        if not fits:
            self.happened["fixed frame in the way"] += self._fits(counts)
            elsewhere = [n <= len(self._free(g)) for g, n in enumerate(wanted)]
            self.happened["refused with room elsewhere"] += all(elsewhere)
            return
        for group, pool in enumerate(self.arena.pools):
            assert pool.extent == self._live_extent(group)
        move = self.arena.make_way(wanted)
        if move is not None and choices.chance(20):  # nothing was copied, so nothing has changed
            self.happened["not copied"] += 1
            return
        if move is not None:
            self._move(move.group, move.sources.tolist(), move.targets.tolist())
            self.arena.pools[move.group].moved(move.sources, move.targets)
            asked = sum(n * stride for n, stride in zip(wanted, self.strides, strict=True))
            moved = (len(move.sources) - 1) * self.strides[move.group]
            assert any(self.apart) or moved < asked, "more has moved than was asked for"
        self.happened["moved"] += move is not None
        self.happened["moved over a hole"] += move is not None and any(self.apart)
        self.happened["both around a hole"] += all(
            n - pool.size + pool.limit > pool.num_live + more
            for n, pool, more in zip(counts, pools, wanted, strict=True)
        )
        for group, count in enumerate(wanted):
            self._own(group, self.arena.pools[group].take(count))

    def starve(self, choices: Choices) -> None:
        """One group or both lose all of their frames. Any number of it fits then, and all that is left is the
        other's."""
        if not choices.chance(20):
            return
        group, both = choices.below(2), choices.chance(50)
        self.fixed.clear()
        for each in (0, 1) if both else (group,):
            self._free_all(each, [name for name in self.frames[each] if name not in self.apart[each]])
        wanted, alone = [0, 0], choices.chance(50)
        wanted[group] = 0 if alone else choices.between(0, self.arena.layout.most(group))
        while wanted[group] and not self._fits(self._places(wanted)):
            wanted[group] -= 1
        while self._fits(self._places([n + (g != group) for g, n in enumerate(wanted)])):
            wanted[1 - group] += 1
        move = self.arena.make_way(wanted)
        if move is not None:
            self._move(move.group, move.sources.tolist(), move.targets.tolist())
            self.arena.pools[move.group].moved(move.sources, move.targets)
        for each, count in enumerate(wanted):
            self._own(each, self.arena.pools[each].take(count))
        taken = sum(stride * n for stride, n in zip(self.strides, self._places([0, 0]), strict=True))
        left = self.arena.layout.room - taken
        assert any(self.apart) or left < self.strides[1 - group], "what is empty has not all of the arena"
        self.happened["starved"] += 1
        self.happened["any mix"] += both and all(wanted)

    def free(self, choices: Choices) -> None:
        group = choices.below(2)
        names = [name for name in self.frames[group] if name not in self.apart[group] and choices.chance(30)]
        self._free_all(group, names)

    def _free_all(self, group: int, names: list[int]) -> None:
        ids = self._ids(group, names)
        self.arena.pools[group].take_back(ids)
        self.arena.pools[group].put(ids)
        for name in names:
            self._write(group, self.frames[group].pop(name), 0)
            self.fixed.discard(name)

    def fix(self, choices: Choices) -> None:
        """Other frames must not move."""
        self.fixed = {name for frames in self.frames for name in frames if choices.chance(10)}

    def group(self, choices: Choices) -> None:
        """Ids are set aside; some of them are allocated, and the others are free again."""
        group = choices.below(2)
        pool = self.arena.pools[group]
        ids = pool.set_aside(choices.between(0, pool.num_free))
        taken = choices.between(0, len(ids))
        pool.mark_out(ids[:taken])
        pool.put(ids[taken:])
        self._own(group, ids[:taken])

    def set_apart(self, choices: Choices) -> None:
        """A frame in use is not used again."""
        group = choices.below(2)
        names = [name for name in self.frames[group] if name not in self.apart[group]]
        if names and choices.chance(80):
            self.apart[group].append(choices.one_of(names))
            self.arena.pools[group].set_apart(self.frames[group][self.apart[group][-1]])

    def use_again(self, choices: Choices) -> None:
        """The first frame that was set apart is free."""
        group = choices.below(2)
        if self.apart[group] and choices.chance(60):
            self._use(group, self.apart[group][0])

    def _use(self, group: int, name: int) -> None:
        self.apart[group].remove(name)
        at = self.frames[group].pop(name)
        self.arena.pools[group].use_again(at)
        self.arena.pools[group].take_back(np.array([at]))
        self.arena.pools[group].put(np.array([at], dtype=np.int32))
        self._write(group, at, 0)
        self.fixed.discard(name)

    def resize(self, choices: Choices) -> None:
        """Another size: groups retreat, the limit stays where frames lie in the way, and others move inwards."""
        upper, before = 1 - self.low, self.limit
        pool, most = self.arena.pools[upper], choices.one_of((1, 3, 1000))
        least = self.last - len(pool._used)
        self.limit = self.last if choices.chance(60) else choices.between(least, self.last)
        while not self._fits(self._places([0, 0])):
            self.limit += 1
        pool.resize(self.limit)
        for group in (0, 1):
            move = self.arena.retreat(group, [0, 0], self._ids(group, self.fixed), most)
            assert len(move.sources) <= most
            self._move(group, move.sources.tolist(), move.targets.tolist())
            self.arena.pools[move.group].moved(move.sources, move.targets)
            self.happened["retreated for a size"] += bool(len(move.sources))
        wanted = self.limit
        while not self._fits([max(self._live_extent(g), n) for g, n in enumerate(self._places([0, 0]))]):
            self.limit += 1
        pool.resize(self.limit)
        self.happened["in the way of a size"] += self.limit > wanted
        for group in (0, 1):
            for name in [name for name in self.apart[group] if self._is_beyond(group, self.frames[group][name])]:
                self._use(group, name)
        beyond = {at for name, at in self.frames[upper].items() if at > self.limit and name not in self.fixed}
        free = self._inside(upper)
        ids, targets = (each.tolist() for each in pool.inwards(self._ids(upper, self.fixed), most))
        count = min(len(beyond), most)
        assert ids == sorted(sorted(beyond)[len(beyond) - count :]) and targets == sorted(free[:count])
        self._move(upper, ids, targets)
        pool.moved(np.array(ids, dtype=np.int32), np.array(targets, dtype=np.int32))
        self.happened["moved inwards"] += count > 0
        self.happened["smaller"] += self.limit < before
        self.happened["larger"] += self.limit > before
        self.happened["beyond the limit"] += pool.num_beyond > 0

    def clear(self, choices: Choices) -> None:
        if choices.chance(10):
            for group, pool in enumerate(self.arena.pools):
                pool.clear()
                for at in self.frames[group].values():
                    self._write(group, at, 0)
                self.frames[group].clear()
                self.apart[group].clear()
            self.fixed.clear()

    # -- checks

    def check(self) -> None:
        for group, pool in enumerate(self.arena.pools):
            ids = set(self.frames[group].values())
            assert set(np.flatnonzero(pool.is_out(slice(None))).tolist()) == ids
            assert (pool.num_used, pool.num_apart) == (len(ids), len(self.apart[group]))
            assert pool.num_free == len(self._free(group))
            beyond = [at for at in ids if group != self.low and at > self.limit]
            assert pool.num_beyond == len(beyond)
            assert pool.num_withdrawn == (group != self.low) * (self.last - self.limit) - len(beyond)
            assert pool.last_present == max(pool.limit, *beyond, 0)
            for name, at in self.frames[group].items():
                first = self._first(group, at)
                assert self.bytes[first : first + self.strides[group]] == [name] * self.strides[group]

    # -- the model

    def _first(self, group: int, at: int) -> int:
        """The first byte of a frame."""
        return at * self.strides[group] + (self.strides[1 - self.low] if group == self.low else 0)

    def _order(self, group: int) -> list[int]:
        """All ids of a group, the nearest to its end first."""
        ids = range(1, len(self.bytes) // self.strides[group])
        return [*ids] if group == self.low else [*reversed(ids)]

    def _free(self, group: int) -> list[int]:
        """Ids that a group can have as the other lies, beside those that its frames beyond the limit need."""
        inside = self._inside(group)
        beyond = sum(
            self._is_closed(group, at) for name, at in self.frames[group].items() if name not in self.apart[group]
        )
        return inside[: max(0, len(inside) - beyond)]

    def _inside(self, group: int) -> list[int]:
        """Ids whose bytes have no owner, all of the other group's are beyond, and so is what these need."""
        apart = {*self.apart[1 - group]}
        others = [self._first(1 - group, at) for name, at in self.frames[1 - group].items() if name not in apart]
        if group == self.low:
            low, high = 0, min(others, default=len(self.bytes))
            needed = self._places([0, 0])[1 - group]
            high = min(high, (self.last + 1 - needed) * self.strides[1 - group])
        else:
            low, high = max(others, default=self._first(self.low, 0)) + self.strides[self.low], len(self.bytes)
        stride, own = self.strides[group], set(self.frames[group].values())
        free = [at for at in self._order(group) if at not in own and not self._is_closed(group, at)]
        inside = [at for at in free if not self._is_hole(group, at)]
        return [at for at in inside if low <= self._first(group, at) and self._first(group, at) + stride <= high]

    def _is_closed(self, group: int, at: int) -> bool:
        return group != self.low and at > self.limit

    def _is_beyond(self, group: int, at: int) -> bool:
        """Whether a frame has bytes beyond those of the limit."""
        return self._first(group, at + 1) > self._first(1 - self.low, self.limit + 1)

    def _fixed_extents(self) -> list[int]:
        return [self._extent(group, self.fixed - {*self.apart[group]}) for group in (0, 1)]

    def _live_extent(self, group: int) -> int:
        return self._extent(group, {*self.frames[group]} - {*self.apart[group]})

    def _is_hole(self, group: int, at: int) -> bool:
        """Whether a frame would have bytes of one that is set apart."""
        apart, first = {*self.apart[0], *self.apart[1]}, self._first(group, at)
        return any(name in apart for name in self.bytes[first : first + self.strides[group]])

    def _places(self, wanted: list[int]) -> list[int]:
        """Places that the frames of each group take with so many more, and the holes among them."""
        found = []
        for group, n in enumerate(wanted):
            count, places = len(self.frames[group]) - len(self.apart[group]) + n, 0
            order = self._order(group)
            while count or (places < len(order) and self._is_closed(group, order[places])):
                open_ = places >= len(order) or not self._is_closed(group, order[places])
                count -= open_ and (places >= len(order) or not self._is_hole(group, order[places]))
                places += 1
            found.append(places)
        return found

    def _fits(self, counts: list[int]) -> bool:
        """Whether the first ids of each group, so many, have bytes of their own."""
        low = self._first(self.low, counts[self.low]) + self.strides[self.low]
        return low <= self._first(1 - self.low, self.last + 1 - counts[1 - self.low])

    def _extent(self, group: int, names: set[int] | None) -> int:
        order = self._order(group)
        ids = [at for name, at in self.frames[group].items() if names is None or name in names]
        return max((order.index(at) + 1 for at in ids), default=0)

    def _ids(self, group: int, names: set[int] | list[int]) -> Ids:
        return np.array([self.frames[group][name] for name in names if name in self.frames[group]], dtype=np.int32)

    def _own(self, group: int, ids: Ids) -> None:
        for at in ids.tolist():
            self.names += 1
            first = self._first(group, at)
            assert not any(self.bytes[first : first + self.strides[group]]), "bytes of another frame were handed out"
            self._write(group, at, self.names)
            self.frames[group][self.names] = at

    def _move(self, group: int, sources: list[int], targets: list[int]) -> None:
        assert sources == sorted(set(sources)) and set(sources).isdisjoint(targets)
        name_of = {at: name for name, at in self.frames[group].items()}
        for source, target in zip(sources, targets, strict=True):
            name, first = name_of[source], self._first(group, target)
            assert name not in self.fixed, "a frame was moved that must not move"
            assert not any(self.bytes[first : first + self.strides[group]]), "a frame was moved over another"
            self._write(group, source, 0)
            self._write(group, target, name)
            self.frames[group][name] = target

    def _write(self, group: int, at: int, name: int) -> None:
        first, stride = self._first(group, at), self.strides[group]
        self.bytes[first : first + stride] = [name] * stride


def run_arena(seed: int, steps: int) -> Counter[str]:
    """A machine with that seed for that many steps; returns what has happened."""
    choices = Choices.seeded(seed)
    machine = ArenaMachine(choices)
    for _ in range(steps):
        machine.step(choices)
    return machine.happened
