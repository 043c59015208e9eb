"""HitBounds: the hits of the best possible cache on a trace, with unlimited memory (ideal) and in a pool (optimum).

Both serve one request at a time, in the order of the trace, each done before the next one arrives. Prompts and outputs
become cached, in whole pages; at most all but the last token of a prompt is found.

For concurrent requests neither is a strict bound, but both are close to one. Concurrent requests hold memory together
and cannot use pages that another has not written yet, so they hit less. But another order than the trace's may hit
more: for example, a scheduler may delay a request until the one that writes its prefix is done.

Equal pages have equal ids, wherever they are. So a tree with pages of one "token", which is such an id, hits and evicts
exactly what a tree of the tokens does, with 4 bytes a page.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from quire.errors import InvalidInput
from quire.sim.trace_request import TraceRequest, page_digests
from quire.spec.events import Namespace
from quire.spec.ids import Ids

PageKeys = npt.NDArray[np.int32] | npt.NDArray[np.uint64]
"""A number for each page. Two different pages have the same one about once in 2 ** 64 comparisons, or never."""
Keys = TypeVar("Keys", bound=PageKeys)


@dataclass(frozen=True, slots=True)
class PagedRequest(Generic[Keys]):
    """One request. `pages` are those of its prompt and output, if they are whole."""

    namespace: Namespace
    session: str
    arrival: float
    priority: int
    ending: int
    """How its output ends: 1 an answer, 2 a call of a tool, 0 unknown."""
    pages: Keys
    prompt_tokens: int
    output_tokens: int
    page_size: int

    @property
    def lookup_pages(self) -> int:
        """Whole pages of the prompt that may be found in a cache: at least the prompt's last token is computed."""
        return (self.prompt_tokens - 1) // self.page_size

    @property
    def held_pages(self) -> int:
        """Pages that it holds when it ends, including one that is not full."""
        return max(len(self.pages), -(-(self.prompt_tokens + self.output_tokens - 1) // self.page_size))


def paged_requests(trace: Iterable[TraceRequest], page_size: int) -> Iterator[PagedRequest[PageKeys]]:
    """The requests that run, without those whose client leaves while they wait. If a client leaves later, the tokens
    that it saw are its output. The number of a page is its token, or a 64-bit hash of several. Raises InvalidInput for
    pages of no tokens."""
    if page_size < 1:
        raise InvalidInput(f"a page of {page_size} tokens holds nothing.", fix="use a page size of at least 1.")
    for request in trace:
        if request.abort_after == 0:
            continue
        output = request.output[: request.abort_after]
        tokens = np.concatenate((request.prompt, output))
        whole = tokens[: len(tokens) // page_size * page_size].reshape(-1, page_size)
        yield PagedRequest(
            request.namespace,
            request.session,
            request.arrival,
            request.priority,
            0 if request.calls_tool is None else 1 + request.calls_tool,
            tokens if page_size == 1 else page_digests(whole.astype(np.uint64)),
            len(request.prompt),
            len(output),
            page_size,
        )


NEVER = -1


class HitBounds:
    """The bounds of one trace in pages of `page_size` tokens.

    Its requests are those of `paged_requests`. Memory: 8 bytes for each different page, 4 if a page is one token.
    Raises InvalidInput for pages of no tokens.
    """

    def __init__(self, trace: Iterable[TraceRequest], page_size: int) -> None:
        self._page_size = page_size
        self.uses: list[_PageUse] = []
        """Pages of each request, as nodes that all requests share."""
        self._roots: dict[Namespace, PageNode] = {}
        self.prompt_tokens = 0
        self.ideal_hit_tokens = 0
        """Hits of a cache that never evicts."""
        self.working_set_tokens = 0
        """Different whole pages of all prompts and outputs, which that cache holds at the end."""
        for request in paged_requests(trace, page_size):
            self.add(request)

    @property
    def ideal_hit_rate(self) -> float:
        """Share of the prompt tokens that a cache without evictions hits."""
        return self.ideal_hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def optimal_hit_tokens(self, pool_tokens: int) -> int:
        """The most prompt tokens that any eviction policy could hit in a pool of `pool_tokens` (`optimal_hits`)."""
        return sum(self.optimal_hits(pool_tokens))

    def optimal_hits(self, pool_tokens: int) -> list[int]:
        """What each request hits, in tokens, if as much as possible is hit in a pool of `pool_tokens`, knowing the
        future. Requests that do not fit the pool, or do not run, have no entry.

        Why this is the optimum. A page that is used twice is worth keeping in between if the second use looks it up
        (other uses write it anyway). It is then worth one page. While a request is served its own pages are in the
        pool, so the pages of others have at most the rest. So the algorithm chooses as many intervals as possible, with
        a limit on those that overlap. It goes through time. Whenever there are too many, it evicts the interval that
        ends last: any other choice would conflict with no fewer later intervals (Belady). Pages that are never looked
        up again are not kept at all.

        Why the tree does not change the result. A page is useful only with all pages before it. If a page is looked up,
        those are too, at the same time. So the last interval before that use ends together for all of them, and theirs
        began no earlier than the page's own. If the deepest page is evicted first among intervals that end together, a
        page that is kept until its lookup has everything before it. So the best choice without the tree's rule can be
        made to obey the rule. Other ways to break ties keep as many pages, so the count does not depend on them.

        Nodes represent their pages, and are evicted page by page. A request that does not fit the pool is refused, and
        uses nothing. Costs O(uses * log(uses)).
        """
        pool_pages = pool_tokens // self._page_size
        uses = [use for use in self.uses if use.held_pages <= pool_pages]
        furthest: list[
            tuple[int, int, PageNode]
        ] = []  # minus the request that looks it up, minus its end; may be stale
        num_kept = 0
        found = []
        for use, upcoming in zip(uses, next_lookups(uses), strict=True):
            hits = 0
            for node in use.nodes():
                hits += node.kept
                num_kept -= node.kept
                node.kept = 0
            while (excess := num_kept - (pool_pages - use.held_pages)) > 0:
                node = furthest[0][-1]
                if not node.kept:
                    heappop(furthest)
                    continue
                evicted = min(node.kept, excess)
                node.kept -= evicted
                num_kept -= evicted
            for node, lookup in zip(use.nodes(), upcoming, strict=True):
                if lookup != NEVER:
                    node.kept = len(node.keys)
                    num_kept += len(node.keys)
                    heappush(furthest, (-lookup, -node.end, node))
            found.append(hits * self._page_size)
        return found

    def add(self, request: PagedRequest[PageKeys] | PagedRequest[Ids]) -> None:
        """Append a request in pages of this size."""
        keys, lookup = request.pages, request.lookup_pages
        root = self._roots.get(request.namespace)
        if root is None:
            root = self._roots[request.namespace] = PageNode(None, keys[:0], 0)
        node, known = root.descend(keys)
        if known < len(keys):
            rest = node.children[int(keys[known])] = PageNode(node, keys[known:].copy(), len(keys))
            node = rest
        node.split_above(lookup)
        self.prompt_tokens += request.prompt_tokens
        self.ideal_hit_tokens += min(known, lookup) * self._page_size
        self.working_set_tokens += (len(keys) - known) * self._page_size
        self.uses.append(_PageUse(node, lookup, request.held_pages))


@dataclass(frozen=True, slots=True)
class _PageUse:
    """The pages of one request: its prompt and output end at the end of `last`, in whole pages."""

    last: PageNode
    lookup_pages: int
    """Whole pages of the prompt that may be found in a cache: at least the prompt's last token is computed."""
    held_pages: int
    """Pages that it holds when it ends, including one that is not full."""

    def nodes(self) -> Iterator[PageNode]:
        """The nodes it uses, deepest first."""
        node = self.last
        while node.parent is not None:
            yield node
            node = node.parent


@dataclass(slots=True, eq=False)
class PageNode:
    """Consecutive pages that are always used together, in a radix tree over all requests.

    Nodes are split where requests diverge, where one ends, and at the end of the part of a prompt that may be found. So
    the bounds are computed on some thousand nodes instead of millions of pages. A split node becomes the lower part.
    """

    parent: PageNode | None
    keys: PageKeys
    end: int
    """Pages from the beginning of the prefix to the end of this node."""
    children: dict[int, PageNode] = field(default_factory=dict)
    kept: int = 0
    """Pages that the optimum keeps until the next lookup; none once all requests are done."""

    def descend(self, keys: PageKeys) -> tuple[PageNode, int]:
        """The node that ends where `keys` and the tree diverge, split there if needed, and the number of its pages."""
        node, at = self, 0
        while at < len(keys):
            child = node.children.get(int(keys[at]))
            if child is None:
                break
            length = min(len(child.keys), len(keys) - at)
            different = np.flatnonzero(child.keys[:length] != keys[at : at + length])
            same = int(different[0]) if len(different) else length
            at += same
            if same < len(child.keys):
                return child.split(same), at
            node = child
        return node, at

    def split(self, pages: int) -> PageNode:
        """Split after some of its pages; returns the upper part, which is new."""
        assert self.parent is not None
        upper = PageNode(self.parent, self.keys[:pages], self.end - len(self.keys) + pages)
        self.parent.children[int(self.keys[0])] = upper
        upper.children[int(self.keys[pages])] = self
        self.parent, self.keys = upper, self.keys[pages:]
        return upper

    def split_above(self, end: int) -> None:
        """Ensure that one of the nodes from the root to this one ends after `end` pages."""
        node = self
        while node.parent is not None and node.end - len(node.keys) > end:
            node = node.parent
        start = node.end - len(node.keys)
        if start < end < node.end:
            node.split(end - start)


def next_lookups(uses: list[_PageUse]) -> list[list[int]]:
    """For each request, for each node that it uses, deepest first: the next request that uses the node, if that looks
    it up."""
    upcoming: dict[PageNode, int] = {}
    found = []
    for now in range(len(uses) - 1, -1, -1):
        use = uses[now]
        found.append([upcoming.get(node, NEVER) for node in use.nodes()])
        for node in use.nodes():
            upcoming[node] = now if node.end <= use.lookup_pages else NEVER
    found.reverse()
    return found
