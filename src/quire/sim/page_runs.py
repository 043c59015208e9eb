"""PageRuns: the pages of a trace, put together into runs that are always used as a whole.

A radix tree over every request of the trace, in order. Its nodes are cut where requests part, where one ends, and where
the part of a prompt ends that may be found in a cache; so whoever uses one page of a node uses all of it, and what can
be said of a trace's pages can be said of some thousand nodes instead of millions of pages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from quire.errors import InvalidInput
from quire.sim.trace_request import Trace, TraceRequest
from quire.spec.events import Namespace
from quire.spec.ids import Ids

_Keys = npt.NDArray[np.int32] | npt.NDArray[np.uint64]
"""What each page of a run says: its token where a page is one token, otherwise a 64-bit number made of its tokens."""


@dataclass(slots=True, eq=False)
class Run:
    """Consecutive pages that are always used together. When a run is cut it stays itself as the lower part."""

    parent: Run | None
    keys: _Keys
    end: int
    """Pages from the beginning of the prefix to the end of this run."""
    children: dict[int, Run] = field(default_factory=dict)
    number: int = -1

    @property
    def num_pages(self) -> int:
        """Pages of this run alone."""
        return len(self.keys)


@dataclass(frozen=True, slots=True)
class PageUse:
    """What one request does to pages."""

    last: Run
    """Where its prompt and output end, in whole pages; the run and all above it are used."""
    lookup_pages: int
    """Whole pages of the prompt that may be found in a cache: at least the prompt's last token is computed."""
    hit_pages: int
    """Those of them that requests before this one had."""
    held_pages: int
    """What it occupies when it ends, the page that is not full included."""

    def runs(self) -> Iterator[Run]:
        """The runs it uses, deepest first."""
        run: Run | None = self.last
        while run is not None and run.parent is not None:
            yield run
            run = run.parent


class PageRuns:
    """The page uses of a trace, one for each request that runs, and the runs they are made of.

    A request that its client leaves while it waits is not there; one whose client leaves later has the tokens its
    client saw. Costs memory for what is different in the trace: 8 bytes for a page, 4 where a page is one token.
    """

    def __init__(self, trace: Trace, page_size: int) -> None:
        if page_size < 1:
            raise InvalidInput(f"a page of {page_size} tokens holds nothing.", fix="use a page size of at least 1.")
        self.page_size = page_size
        self.prompt_tokens = 0
        self.uses: list[PageUse] = []
        self._roots: dict[Namespace, Run] = {}
        random = np.random.Generator(np.random.PCG64(page_size))
        self._weights = random.integers(1 << 63, size=page_size, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
        for request in trace:
            if request.abort_after != 0:
                self._add(request)
        self.runs = [run for root in self._roots.values() for run in _below(root)]
        for number, run in enumerate(self.runs):
            run.number = number

    @property
    def num_pages(self) -> int:
        """Different pages."""
        return sum(run.num_pages for run in self.runs)

    def _add(self, request: TraceRequest) -> None:
        root = self._roots.get(request.namespace)
        if root is None:
            root = self._roots[request.namespace] = Run(None, self._keys(request.prompt[:0]), 0)
        output = request.output[: request.abort_after]
        keys = self._keys(np.concatenate((request.prompt, output)))
        lookup = (len(request.prompt) - 1) // self.page_size
        run, known = _descend(root, keys)
        if known < len(keys):
            below = Run(run, keys[known:].copy(), len(keys))
            run.children[int(keys[known])] = below
            run = below
        _cut_above(run, lookup)
        tokens = len(request.prompt) + len(output)
        held = max(len(keys), -(-(tokens - 1) // self.page_size))
        self.prompt_tokens += len(request.prompt)
        self.uses.append(PageUse(run, lookup, min(known, lookup), held))

    def _keys(self, tokens: Ids) -> _Keys:
        """A key for each whole page. Two different pages have the same one about once in 2 ** 64 comparisons."""
        if self.page_size == 1:
            return tokens
        whole = len(tokens) - len(tokens) % self.page_size
        pages = tokens[:whole].reshape(-1, self.page_size).astype(np.uint64)
        return np.asarray(pages @ self._weights)


def _descend(root: Run, keys: _Keys) -> tuple[Run, int]:
    """The run that ends where `keys` and the tree part, cut there if it went on, and how many pages that is."""
    run, at = root, 0
    while at < len(keys):
        child = run.children.get(int(keys[at]))
        if child is None:
            break
        same = _num_same(child.keys, keys[at : at + child.num_pages])
        at += same
        if same < child.num_pages:
            return _cut(child, same), at
        run = child
    return run, at


def _num_same(one: _Keys, other: _Keys) -> int:
    """How many pages two sequences begin with alike."""
    length = min(len(one), len(other))
    different = one[:length] != other[:length]
    first = int(different.argmax()) if length else 0
    return first if length and different[first] else length


def _cut(run: Run, pages: int) -> Run:
    """Cuts `run` after some of its pages; the upper part, which is new."""
    assert run.parent is not None
    upper = Run(run.parent, run.keys[:pages], run.end - run.num_pages + pages)
    run.parent.children[int(run.keys[0])] = upper
    upper.children[int(run.keys[pages])] = run
    run.parent, run.keys = upper, run.keys[pages:]
    return upper


def _cut_above(run: Run, end: int) -> None:
    """Sees to it that one of the runs from the root to `run` ends after `end` pages."""
    while run.parent is not None and run.end - run.num_pages > end:
        run = run.parent
    start = run.end - run.num_pages
    if start < end < run.end:
        _cut(run, end - start)


def _below(root: Run) -> Iterator[Run]:
    """Every run under a root, which has no pages itself."""
    waiting = list(root.children.values())
    while waiting:
        run = waiting.pop()
        yield run
        waiting.extend(run.children.values())
