"""Watch: what must be true of a cache after every operation: its own laws, what it holds, and what its frames contain.

Three things that know nothing of each other are compared: the cache, a model made of sets, and the device's memory.
What is cached of every page, in every group, is what its place in the tree promises, and what requests hold is theirs.
"""

from __future__ import annotations

from itertools import count

from quire.cache import KVCache
from quire.cache.audit import Auditor, audit
from quire.offload import offload_of
from quire.prefix.node import Node, nodes_below
from tests.fuzz.device import Device
from tests.fuzz.names import Names, Page
from tests.fuzz.plain_cache import PlainCache, Sequence
from tests.fuzz.raw import raw_data
from tests.fuzz.snapshot import GroupSnapshot, RequestSnapshot, Snapshot


class Watch:
    """The checks of one cache. `snapshot` is what the last one saw, `ends` the last names of the pages it saw cached,
    each with its page id; `num_hidden` others were flushed, and a transfer holds them. Raises AssertionError or
    AuditFailure."""

    def __init__(self, cache: KVCache, names: Names, device: Device, model: PlainCache) -> None:
        self._cache = cache
        self._names = names
        self._device = device
        self._model = model
        self._edges: dict[Node, tuple[bytes, int, int]] = {}  # key, name of the parent, own name
        self.ends: dict[int, int] = {}
        self.num_hidden = 0
        self._promised: list[Page | None] = []  # by page id: what the tree promises
        self._known: list[Page | None] = []  # by page id: what the tree promises, and what requests own
        self._expected: list[tuple[int, int, int]] = [(-1, -1, -1)]  # what the model said of requests
        self._executed = 0
        self._changes = count()
        self.snapshot, self.raw = Snapshot(cache.parts), raw_data(cache)
        self._read_tree(self.snapshot)
        self._has_tiers = offload_of(cache).tiers is not None
        self._auditor = Auditor(cache.parts, self._changes.__next__)

    def check(self) -> None:
        """All of it. O(pages) in small numbers, and less where little has changed since the last check."""
        before, model, executed = self.raw, self._model, self._device.num_executed
        raw = self.raw = raw_data(self._cache)
        if self._has_tiers or raw != before:  # half of all operations change none of what the audit reads
            audit(self._cache.parts)
            self.snapshot = Snapshot(self._cache.parts)
        snapshot = self.snapshot
        done = self._auditor.advance(0.0)  # one slice of the audit of servers, while the cache goes on changing
        assert done is None or not done.faults, done.faults
        tree, rows = raw.tree != before.tree, raw.requests != before.requests
        device = executed != self._executed
        self._executed = executed
        changed = False
        if tree:
            self._read_tree(snapshot)
        model.settle_evictions(self.ends.keys())
        self._check_tree(snapshot)
        expected = [(s.allocated, s.committed, s.pinned) for s in model.live]
        if tree or rows or device or expected != self._expected:
            self._expected = expected
            self._known = self._promised.copy()
            self._check_requests(snapshot, self._known)
            changed = True
        for at, group in enumerate(snapshot.groups):
            if not changed and raw.groups[at] == before.groups[at]:
                continue
            if group.group.reach.in_place:
                self._check_carried(group, snapshot.requests)
            else:
                self._check_pages(group, self._known)

    def resident(self, group: int) -> set[int]:
        """Cached pages, by their last names, that have a frame in that group."""
        column = self.snapshot.groups[group].column
        return {end for end, page in self.ends.items() if column[page]}

    def name_of(self, node: Node) -> int:
        """The last name of an edge that the last check saw."""
        return self._edges[node][2]

    # -- the tree

    def _read_tree(self, snapshot: Snapshot) -> None:
        """Name every edge, and say what its pages promise."""
        names, edges, known = self._names, self._edges, {}
        ends: dict[int, int] = {}
        hidden = {node for root in self._cache.tree.hidden_roots for node in nodes_below(root)}
        self.num_hidden = 0
        wanted: list[Page | None] = [None] * (self._cache.pages.num_pages + 1)
        for root in snapshot.roots:
            known[root] = names.root(root.namespace)
        for node, pages in snapshot.edges:
            assert node.parent is not None
            above = known[node.parent]
            seen = edges.get(node)
            if seen is not None and seen[0] is node.key and seen[1] == above:
                name = seen[2]
            else:
                name = names.follow(above, node.key)
                edges[node] = (node.key, above, name)
            known[node] = name
            count = len(pages)
            for page, content, end in zip(pages, names.pages[name][-count:], names.ends[name][-count:], strict=True):
                wanted[page] = content
                if node not in hidden:
                    ends[end] = page
            self.num_hidden += count if node in hidden else 0
        self.ends, self._promised = ends, wanted
        if len(edges) > 4 * len(known) + 16:
            self._edges = {node: edge for node, edge in edges.items() if node in known}

    def _check_tree(self, snapshot: Snapshot) -> None:
        if self.ends.keys() != self._model.cached:
            raise AssertionError(
                f"the tree does not hold what was committed and not evicted: it lacks "
                f"{self._shown(self._model.cached - self.ends.keys())} and should not have "
                f"{self._shown(self.ends.keys() - self._model.cached)}"
            )
        expected = sorted([name for name in self._model.leases() if self._names.path[name]])
        requests = [
            *[row.kv.lease for row in snapshot.requests],
            *(each.lease for each in self._cache.fences.waiting if each.lease is not None),
        ]
        leased = sorted([self.name_of(lease.node) for lease in requests if lease.node.parent is not None])
        if leased != expected:
            raise AssertionError(
                f"leases hold {self._shown(set(leased))}, and should hold {self._shown(set(expected))}"
            )
        free = self._model.free() - self.num_hidden
        if snapshot.num_free != free:
            raise AssertionError(f"{snapshot.num_free} pages are free, and {free} should be")

    # -- requests

    def _check_requests(self, snapshot: Snapshot, wanted: list[Page | None]) -> None:
        """Lengths are the model's, and what the device has executed of private pages is the request's own."""
        size, names = self._cache.page_size, self._names
        for row, s in zip(snapshot.requests, self._model.live, strict=True):
            assert row.kv is s.kv, "live requests are not in the order in which they began"
            lengths = (row.allocated, row.committed, row.shared, len(row.pages))
            expected = (s.allocated, s.committed, s.pinned, -(-s.allocated // size))
            if lengths != expected:
                raise AssertionError(f"a request has (allocated, committed, pages shared, pages) {lengths}: {expected}")
            path = names.path[s.name]
            whole, rest = divmod(s.executed, size)
            for page, content in zip(row.pages[s.pinned : whole], names.pages[s.name][s.pinned : whole], strict=True):
                wanted[page] = content
            if rest and whole >= s.pinned:
                wanted[row.pages[whole]] = path[whole * size : whole * size + rest]

    # -- frames

    def _check_pages(self, group: GroupSnapshot, wanted: list[Page | None]) -> None:
        held = self._device.pages[group.group.index]
        for page, frame in enumerate(group.column):
            if frame:
                content = wanted[page]
                if content is not None and held[frame] is not content and held[frame][: len(content)] != content:
                    raise AssertionError(
                        f"page {page} has frame {frame} in group '{group.group.name}', which holds {held[frame]} and "
                        f"should hold {content}"
                    )

    def _check_carried(self, group: GroupSnapshot, rows: list[RequestSnapshot]) -> None:
        held, name = self._device.carried[group.group.index], group.group.name
        for end, page in self.ends.items():
            frame = group.column[page]
            if frame and held[frame] != end:
                raise AssertionError(
                    f"page {page} has frame {frame} in group '{name}', which holds {held[frame]} and should hold {end}"
                )
        for row, s in zip(rows, self._model.live, strict=True):
            if s.executed == s.launched > s.begun:
                self._check_own(group, row, s)

    def _check_own(self, group: GroupSnapshot, row: RequestSnapshot, s: Sequence) -> None:
        """What a request carries is what its tokens give, where no step in flight rewrites it."""
        frames = group.group.frames_of(row.kv.row).tolist()
        end = self._names.path[s.name][s.executed - 1]
        if frames and end not in [self._device.carried[group.group.index][frame] for frame in frames]:
            raise AssertionError(
                f"a request of {s.executed} tokens carries frames {frames} in group '{group.group.name}', and none "
                f"holds {end}"
            )

    def _shown(self, names: set[int]) -> str:
        tokens = [self._names.tokens(name).tolist() for name in sorted(names)]
        return str(tokens[:3]) + (f" and {len(tokens) - 3} more" if len(tokens) > 3 else "")
