"""LazyQueue beside a model: entries in their order, and which of their parts are valid."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire.lazy_queue import Entry, LazyQueue

Parts = tuple[int, ...]


class LazyQueueMachine(RuleBasedStateMachine):
    """Entries are pushed, become invalid in part or whole, and are popped."""

    @initialize(by_key=st.booleans(), sized=st.booleans())
    def start(self, by_key: bool, sized: bool) -> None:
        self.by_key, self.sized = by_key, sized
        self.keys: dict[int, int] = {}  # key: ticket
        self.valid: dict[int, Parts] = {}  # key: ticket; as pushed
        self.last = self.most_valid = 0
        self.queue: LazyQueue[Parts] = LazyQueue(self._live, by_key=by_key, size=len if sized else None)

    def _live(self, ticket: int, parts: Parts) -> Parts | None:
        return tuple(part for part in parts if part in self.valid.get(ticket, ())) or None

    @property
    def first(self) -> int | None:
        """The ticket that is next."""
        order = (lambda ticket: (self.keys[ticket], ticket)) if self.by_key else (lambda ticket: (0, ticket))
        return min(self.valid, key=order, default=None)

    @rule(count=st.integers(1, 40), size=st.integers(1, 3), key=st.integers(0, 3))
    def push(self, count: int, size: int, key: int) -> None:
        for _ in range(count):
            self.last += 1
            parts = tuple(range(size))
            self.keys[self.last], self.valid[self.last] = key, parts
            self.most_valid = max(self.most_valid, len(self.valid))
            self.queue.push(self.last, parts, key)

    @rule(data=st.data(), keeps=st.integers(0, 2))
    def invalidate(self, data: st.DataObject, keeps: int) -> None:
        for ticket in data.draw(st.lists(st.sampled_from(sorted(self.valid)), unique=True)) if self.valid else ():
            self.valid[ticket] = self.valid[ticket][:keeps]
            if not self.valid[ticket]:
                del self.valid[ticket]

    @rule(share=st.sampled_from((2, 3, 10)))
    def invalidate_most(self, share: int) -> None:
        self.valid = {ticket: parts for ticket, parts in self.valid.items() if ticket % share == 0}

    @rule(count=st.integers(1, 20))
    def pop(self, count: int) -> None:
        for _ in range(count):
            ticket, entry = self.first, self.queue.pop()
            if ticket is None:
                assert entry is None
                return
            key = self.keys[ticket]
            assert entry == Entry(key, ticket, self.valid.pop(ticket))

    @precondition(lambda self: not self.by_key)
    @rule()
    def pop_a_part(self) -> None:
        entry = self.queue.pop()
        if entry is not None and len(entry.item) > 1:
            self.queue.put_back(entry._replace(item=entry.item[1:]))
            self.valid[entry.ticket] = entry.item[1:]
        elif entry is not None:
            del self.valid[entry.ticket]

    @invariant()
    def it_has_what_is_valid(self) -> None:
        if not hasattr(self, "queue"):
            return
        assert sorted(self.queue) == sorted(self.valid.values())
        assert len(self.queue) >= (sum(map(len, self.valid.values())) if self.sized else len(self.valid))
        if not self.sized:
            assert len(self.queue) <= 90 + 3 * self.most_valid


TestLazyQueue = LazyQueueMachine.TestCase
TestLazyQueue.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
