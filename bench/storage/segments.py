"""Hits of a store that evicts whole segments of a log, beside one that evicts the least recently used record.

    python -m bench.storage.segments                        three workloads, pages of 64 tokens, in a minute
    python -m bench.storage.segments --json RESULT.json

Each request reads the records of its prompt up to the first that is missing, and writes those of its prompt and output
that are missing. A page is a record. `records` evicts the least recently used record. The others append to the last of
64 segments: `oldest` evicts the segment that was written first, `coldest` the one whose last use is longest ago, and
`copied` the oldest, of which it writes those records again that were read since they were written.
"""

from __future__ import annotations

from collections import OrderedDict

from bench.eviction.paged_trace import PagedTrace
from bench.harness import machine, new_parser, save

from quire.sim.trace import open_trace

SEGMENTS = 64
PAGE = 64
TRACES = ("sessions:requests=1000", "chat:requests=1000", "agent-sessions")


class Records:
    """Evicts the least recently used record."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.written = capacity, 0
        self._used: OrderedDict[int, None] = OrderedDict()

    def read(self, page: int) -> bool:
        """Whether the page is there; it is used now."""
        if page not in self._used:
            return False
        self._used.move_to_end(page)
        return True

    def write(self, page: int) -> None:
        """Store a page."""
        if len(self._used) == self.capacity:
            self._used.popitem(last=False)
        self._used[page] = None
        self.written += 1


class Segments:
    """Evicts a whole segment: the `oldest` or the `coldest`; with `copies`, pages that were read stay."""

    def __init__(self, capacity: int, kind: str) -> None:
        self.written = 0
        self._size, self._kind = max(1, capacity // SEGMENTS), kind
        self._most = capacity // self._size
        self._place: dict[int, int] = {}
        self._pages: OrderedDict[int, list[int]] = OrderedDict({0: []})
        self._last: dict[int, int] = {0: 0}
        self._read: set[int] = set()
        self._clock = self._newest = 0

    def read(self, page: int) -> bool:
        """Whether the page is there; it is used now."""
        segment = self._place.get(page)
        if segment is None:
            return False
        self._clock += 1
        self._last[segment] = self._clock
        self._read.add(page)
        return True

    def write(self, page: int) -> None:
        """Store a page at the end of the log."""
        again = [page]
        while again:
            if len(self._pages[self._newest]) == self._size:
                again += self._next()
            some = again.pop()
            self._clock += 1
            self._last[self._newest] = self._clock
            self._pages[self._newest].append(some)
            self._place[some] = self._newest
            self.written += 1

    def _next(self) -> list[int]:
        """Begin a segment, and evict one if there are too many. Returns what is to be written again."""
        self._newest += 1
        self._pages[self._newest], self._last[self._newest] = [], self._clock
        if len(self._pages) <= self._most:
            return []
        old = next(iter(self._pages))
        if self._kind == "coldest":
            old = min((each for each in self._pages if each != self._newest), key=self._last.__getitem__)
        gone = self._pages.pop(old)
        for page in gone:
            del self._place[page]
        kept = [page for page in gone if page in self._read] if self._kind == "copied" else []
        self._read.difference_update(gone)
        return kept[: self._size - 1]


def hits(trace: PagedTrace, store: Records | Segments) -> float:
    """The share of the prompts' whole pages that the store has."""
    found = asked = 0
    for request in trace:
        pages = request.pages.tolist()
        asked += request.lookup_pages
        for page in pages[: request.lookup_pages]:
            if not store.read(page):
                break
            found += 1
        for page in reversed(pages):  # the first counts as used last
            if not store.read(page):
                store.write(page)
    return found / asked


def main() -> None:
    """Measure and print."""
    given = new_parser("Compare a log of segments with records that are evicted one by one.").parse_args()
    rows = []
    for name in TRACES:
        trace = PagedTrace.of(open_trace(name, limit=50 if given.toy else None, seed=1), PAGE)
        pages = int(trace.ids.max()) + 1
        for part in (16, 8, 4):
            capacity = max(SEGMENTS, pages // part)
            row = {"trace": name, "pool": f"1/{part}"}
            for kind in ("records", "oldest", "coldest", "copied"):
                store = Records(capacity) if kind == "records" else Segments(capacity, kind)
                row[kind] = round(hits(trace, store), 4)
                row[f"{kind}_written"] = store.written
            rows.append(row)
            cells = ", ".join(f"{kind} {row[kind]:.1%}" for kind in ("records", "oldest", "coldest", "copied"))
            copies = row["copied_written"] / row["records_written"]
            print(f"{name} {row['pool']}: {cells} ({copies:.2f} times the writes of `records`)", flush=True)
    save(given.json, {**machine(), "rows": rows})


if __name__ == "__main__":
    main()
