"""ResizedMachine: random operations on ids of a pool whose size changes, checked against plain lists."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from quire.errors import InvalidFree, OutOfPages
from quire.memory.allocator.id_pool import IdPool, Reuse
from quire.testing.choices import Choices

REUSES: tuple[Reuse, ...] = ("first", "last", "sorted")


class ResizedMachine:
    """`queue` is what is free, in the order of use, and `later` what is free and not in order yet. `owned` are ids that
    are out, by the name of their owner, and `aside` those that are neither."""

    OPERATIONS = (
        "take",
        "take",
        "take",
        "free",
        "free",
        "wrong_free",
        "resize",
        "resize",
        "inwards",
        "inwards",
        "set_aside",
        "clear",
    )
    EVENTS = (
        "refused",
        "moved",
        "fixed in the way",
        "moved beyond the limit",
        "none further in",
        "too many at once",
        "freed beyond the limit",
        "came again",
        "not copied",
    )

    def __init__(self, choices: Choices) -> None:
        self.size = choices.between(1, 16)
        self.reuse = choices.one_of(REUSES)
        self.pool = IdPool(self.size, self.reuse, group="full")
        self.limit = self.size
        self.queue, self.later = list(range(1, self.size + 1)), list[int]()
        self.owned: dict[int, int] = {}
        self.names = 0
        self.aside: list[int] = []
        self.happened: Counter[str] = Counter()

    def step(self, choices: Choices) -> None:
        operation = choices.one_of(self.OPERATIONS)
        getattr(self, operation)(choices)
        self.happened[operation] += 1
        self.check()

    # -- operations

    def take(self, choices: Choices) -> None:
        for each in self._next(choices.between(0, 5), self.pool.take):
            self.names += 1
            self.owned[self.names] = each

    def set_aside(self, choices: Choices) -> None:
        """Ids for a batch, or those of the last batch come back."""
        if self.aside:
            self.pool.put(np.array(self.aside, dtype=np.int32))
            self._free(self.aside)
            self.aside = []
        else:
            self.aside = self._next(choices.between(0, 3), self.pool.set_aside)

    def free(self, choices: Choices) -> None:
        names = self._some(choices)
        ids = np.array([self.owned.pop(name) for name in names], dtype=np.int32)
        self.pool.take_back(ids)
        self.pool.put(ids)
        self._free(ids.tolist())

    def wrong_free(self, choices: Choices) -> None:
        """An id that is not out, also one that left with a smaller size."""
        wrong = choices.one_of([each for each in range(self.size + 2) if each not in self.owned.values()])
        with pytest.raises(InvalidFree):
            self.pool.take_back(np.array([wrong], dtype=np.int32))

    def resize(self, choices: Choices) -> None:
        before, self.limit = self.limit, choices.between(0, self.size)
        self.pool.resize(self.limit)
        taken = {*self.owned.values(), *self.aside}
        self.queue, self.later = [each for each in range(1, self.limit + 1) if each not in taken], []
        self.happened["came again"] += any(each > before for each in self.queue)

    def inwards(self, choices: Choices) -> None:
        """What is outermost moves to the lowest free ids, but for what must stay and what is too much at once."""
        fixed = {self.owned[name] for name in self._some(choices)}
        beyond = sorted(each for each in self.owned.values() if each > self.limit)
        free = sorted([*self.queue, *self.later])
        most = 1 if choices.chance(60) else self.size
        movable = [each for each in beyond if each not in fixed]
        places = [each for each in range(1, self.size + 1) if each in free or self._is_withdrawn(each)]
        moving, targets = list[int](), list[int]()
        for source, target in zip(reversed(movable[-most:]), places, strict=False):
            if target < source:
                moving.insert(0, source)
                targets.append(target)
        found = self.pool.inwards(np.array(sorted(fixed), dtype=np.int32), most)
        assert [each.tolist() for each in found] == [moving, targets]
        assert all(each.dtype == np.int32 for each in found)
        self.queue, self.later = free, []
        self.check()
        if choices.chance(40):  # nothing was copied, so nothing has changed
            self.happened["not copied"] += bool(moving)
            return
        self.pool.moved(*found)
        after = dict(zip(moving, targets, strict=True))
        self.owned = {name: after.get(each, each) for name, each in self.owned.items()}
        self.queue, self.later = [each for each in free if each not in targets], []
        self.happened["moved"] += bool(moving)
        self.happened["fixed in the way"] += any(each in fixed for each in beyond)
        self.happened["moved beyond the limit"] += any(each > self.limit for each in targets)
        self.happened["none further in"] += len(moving) < len(movable[-most:])
        self.happened["too many at once"] += len(movable) > most == len(moving)

    def clear(self, choices: Choices) -> None:
        if choices.chance(20):
            self.pool.clear()
            self.queue, self.later, self.owned, self.aside = list(range(1, self.limit + 1)), [], {}, []

    # -- checks

    def check(self) -> None:
        pool, owned = self.pool, sorted(self.owned.values())
        num_free = len(self.queue) + len(self.later)
        assert (pool.size, pool.limit) == (self.size, self.limit)
        assert pool.num_free == num_free
        assert pool.num_used == len(owned) + len(self.aside)
        assert pool.num_withdrawn == self.size - num_free - pool.num_used, "an id is lost"
        assert np.flatnonzero(pool.is_out(slice(None))).tolist() == owned
        assert pool.num_beyond == sum(each > self.limit for each in (*owned, *self.aside))
        assert pool.last_present == max(self.limit, *owned, 0)

    # -- inside

    def _next(self, count: int, take: object) -> list[int]:
        assert callable(take)
        if count > len(self.queue) + len(self.later):
            with pytest.raises(OutOfPages) as caught:
                take(count)
            assert (caught.value.wanted, caught.value.free) == (count, len(self.queue) + len(self.later))
            self.happened["refused"] += 1
            return []
        if count > len(self.queue):
            self.queue, self.later = sorted([*self.queue, *self.later]), []
        expected, self.queue = self.queue[:count], self.queue[count:]
        assert take(count).tolist() == expected
        return expected

    def _free(self, ids: list[int]) -> None:
        within = [each for each in ids if each <= self.limit]
        self.happened["freed beyond the limit"] += len(within) < len(ids)
        if self.reuse == "sorted":
            self.later += within
        else:
            self.queue = [*within, *self.queue] if self.reuse == "first" else [*self.queue, *within]

    def _is_withdrawn(self, at: int) -> bool:
        return at > self.limit and at not in self.owned.values() and at not in self.aside

    def _some(self, choices: Choices) -> list[int]:
        rest = sorted(self.owned)
        return [rest.pop(choices.below(len(rest))) for _ in range(min(len(rest), choices.below(4)))]


def run_resized(seed: int, steps: int) -> Counter[str]:
    """A machine with that seed for that many steps; returns what has happened."""
    choices = Choices.seeded(seed)
    machine = ResizedMachine(choices)
    for _ in range(steps):
        machine.step(choices)
    return machine.happened
