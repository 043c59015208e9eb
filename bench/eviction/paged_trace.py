"""PagedTrace: the requests of a trace in pages, as arrays, to keep in a file and to replay in order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import numpy.typing as npt

from quire.errors import InvalidInput
from quire.sim.hit_bounds import HitBounds, PagedRequest, paged_requests
from quire.sim.trace_request import TraceRequest
from quire.spec.events import Namespace
from quire.spec.ids import Ids

Counts = npt.NDArray[np.int64]


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

    def bounds(self) -> HitBounds:
        """The hits of the best possible cache."""
        found = HitBounds((), self.page_size)
        for request in self:
            found.add(request)
        return found
