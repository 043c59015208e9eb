"""PagedTrace: the requests of a trace as arrays of page ids, for replays that need no tokens.

Equal pages have equal ids, wherever they are. So a tree with pages of one "token", which is such an id, hits and evicts
exactly what a tree of the tokens does, with 4 bytes a page.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from quire.errors import InvalidInput
from quire.sim.prefix_hash import page_digests
from quire.sim.trace_request import TraceRequest
from quire.spec.events import Namespace
from quire.spec.ids import Ids

Counts = npt.NDArray[np.int64]
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
    """Of its output: 1 an answer, 2 a call of a tool, 0 unknown."""
    pages: Keys
    prompt_tokens: int
    output_tokens: int
    page_size: int

    @property
    def lookup_pages(self) -> int:
        """Whole pages of the prompt that may be found in a cache: at least the prompt's last token is computed."""
        return (self.prompt_tokens - 1) // self.page_size

    @property
    def prompt_pages(self) -> int:
        """Whole pages of the prompt."""
        return self.prompt_tokens // self.page_size

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


@dataclass(frozen=True, slots=True, eq=False)
class PagedTrace:
    """The requests of `paged_requests`, in order. All arrays but `ids` have an entry for each."""

    page_size: int
    ids: Ids
    """Pages of all requests, one after the other: int32, dense from 0 on."""
    ends: Counts
    """Where the pages of each request end."""
    prompt_tokens: Counts
    output_tokens: Counts
    arrivals: npt.NDArray[np.float64]
    priorities: Counts
    endings: Counts
    sessions: npt.NDArray[np.str_]
    adapters: npt.NDArray[np.str_]
    salts: npt.NDArray[np.str_]

    @classmethod
    def of(cls, trace: Iterable[TraceRequest], page_size: int) -> PagedTrace:
        """The pages of a trace. Raises InvalidInput for pages of no tokens, and if no request runs."""
        keys, rows = [], []
        for each in paged_requests(trace, page_size):
            keys.append(each.pages)
            row = each.prompt_tokens, each.output_tokens, each.arrival, each.priority, each.ending
            rows.append((*row, each.session, each.namespace.adapter, each.namespace.salt))
        if not rows:
            raise InvalidInput("no request of the trace runs.", fix="use another trace.")
        ids = np.unique(np.concatenate(keys), return_inverse=True)[1].astype(np.int32)
        ends = np.cumsum([len(each) for each in keys])
        return cls(page_size, ids, ends, *(np.array(column) for column in zip(*rows, strict=True)))

    def __len__(self) -> int:
        return len(self.ends)

    def __iter__(self) -> Iterator[PagedRequest[Ids]]:
        start = 0
        namespaces: dict[tuple[str, str], Namespace] = {}
        columns = (self.ends, self.prompt_tokens, self.output_tokens, self.arrivals, self.priorities, self.endings)
        names = (self.sessions, self.adapters, self.salts)
        for row in zip(*(column.tolist() for column in (*columns, *names)), strict=True):
            end, prompt, output, arrival, priority, ending, session, adapter, salt = row
            namespace = namespaces.setdefault((adapter, salt), Namespace(adapter=adapter, salt=salt))
            pages = self.ids[start:end]
            yield PagedRequest(namespace, session, arrival, priority, ending, pages, prompt, output, self.page_size)
            start = end

    def save(self, path: Path) -> None:
        """Write it to `path`, an `.npz` file."""
        np.savez(path, **{field.name: getattr(self, field.name) for field in fields(self)})

    @classmethod
    def load(cls, path: Path) -> PagedTrace:
        """Read what `save` wrote."""
        with np.load(path) as found:
            return cls(int(found["page_size"]), *(found[field.name] for field in fields(cls)[1:]))
