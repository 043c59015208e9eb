"""ScriptedRequest, whose output is known; and Scripts: what the running requests of a replay compute and draw."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast
from zlib import crc32

import numpy as np

from quire.cache.running import Lengths
from quire.errors import WrongContent
from quire.plan.budget import MemoryPlan
from quire.scheduler.request import Request
from quire.scheduler.sampling_params import SamplingParams
from quire.scheduler.step import Step, StepRows
from quire.sim.trace_request import Hashes, TraceRequest, page_digests, prefix_hashes
from quire.spec.ending import Ending
from quire.spec.ids import Ids

_FEW_PAGES = 16384
"""Up to this many reads, a step is compared as one table, padding included."""

_PARAMS = SamplingParams(max_tokens=None, ignore_eos=True)


class ScriptedRequest(Request):
    """A request of a trace in the real scheduler. `script` is its prompt and all of its output, int32.

    Times are seconds of the virtual clock, None until they are known: `arrived` and `admitted` (for the first time),
    `first_token`, `finished`.
    """

    def __init__(self, request: TraceRequest, arrived: float, *, is_for_peer: bool = False) -> None:
        output = request.output if len(request.output) else np.zeros(1, dtype=np.int32)
        super().__init__(
            request.request_id,
            request.prompt,
            _PARAMS,
            max_tokens=len(output),
            namespace=request.namespace,
            priority=request.priority,
            is_for_peer=is_for_peer,
        )
        self.script: Ids = np.concatenate((request.prompt, output))
        self.session = request.session
        self.abort_after = request.abort_after
        self.acceptance = request.acceptance
        self.calls_tool = request.calls_tool
        self.arrived = arrived
        self.admitted: float | None = None
        self.first_token: float | None = None
        self.finished: float | None = None


def ending_of(request: Request) -> Ending | None:
    """How its output ends, if the trace says so."""
    [found] = scripted([request])
    if found.calls_tool is None:
        return None
    return Ending.TOOL if found.calls_tool else Ending.ANSWER


def scripted(requests: Iterable[Request]) -> list[ScriptedRequest]:
    """The requests of a replay by their type: its scheduler has no others."""
    return cast("list[ScriptedRequest]", list(requests))


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents that a step writes and has to read, in every group: hashes of tokens and digests of pages."""

    written: Hashes
    """uint64 `[num_tokens]`. Where a draft is wrong, these are other numbers, there and behind it."""
    before: Hashes
    """Hash of the token before each work, uint64 `[works]`; 0: there is none."""
    last: Hashes
    """The last page of each work, which is not full, uint64 `[works, slots]`; arbitrary behind its last token."""
    whole: list[tuple[Lengths, Hashes]]
    """Pages before that: works of similar lengths, and their pages, uint64 `[works, pages]`. Less than half of a large
    table is padding."""


class Scripts:
    """Scripts by row of the cache: `tokens`, int32 `[rows, positions]`, has the prompt and all output of each request
    that `enter` was told of. With `checks` there are contents too."""

    def __init__(self, plan: MemoryPlan, *, checks: bool) -> None:
        shape = plan.max_requests, plan.pages_per_row * plan.tokens_per_page
        self.page_size = plan.page_size
        # Memory is allocated when it is written, so a row costs as much as its longest request.
        self.tokens: Ids = np.zeros(shape, dtype=np.int32)
        self.seeds = np.zeros(plan.max_requests, dtype=np.uint64)  # seed of the request in each row
        self.acceptances = np.zeros(plan.max_requests)  # as recorded; not a number: none was
        self._serials: Lengths = np.zeros(plan.max_requests, dtype=np.int64)
        self._checks = checks
        self._hashes: Hashes = np.zeros(shape, dtype=np.uint64)
        self._pages = self._hashes.reshape(plan.max_requests, -1, plan.page_size)
        self._digests: Hashes = np.zeros(self._pages.shape[:2], dtype=np.uint64)

    def enter(self, batch: StepRows) -> None:
        """Write the rows of requests that are new in them."""
        rows, serials = batch.rows, batch.serials
        fresh = (self._serials[rows] != serials).nonzero()[0]
        if not len(fresh):
            return
        for row, request in zip(rows[fresh], scripted(batch.requests[at] for at in fresh.tolist()), strict=True):
            length = len(request.script)
            self.tokens[row, :length] = request.script
            self.seeds[row] = crc32(request.request_id.encode())
            self.acceptances[row] = np.nan if request.acceptance is None else request.acceptance
            if self._checks:
                self._hashes[row, :length] = prefix_hashes(request.namespace, request.script)
                whole = length // self.page_size
                self._digests[row, :whole] = page_digests(self._pages[row, :whole])
        self._serials[rows] = serials

    def contents(self, step: Step, ends: Lengths) -> Contents:
        """Contents of a step whose works end at `ends` without their drafts. Raises WrongContent if the tokens of a
        prompt are not those of its script; single tokens are compared when their request ends."""
        rows, starts = step.batch.rows, step.starts
        pages = np.minimum(ends // self.page_size, self._pages.shape[1] - 1)
        widths = -(-ends // self.page_size)
        parts = [np.arange(len(rows))]
        if int(widths.max()) * len(rows) > _FEW_PAGES:
            classes = np.frexp(widths)[1]  # widths of one class differ by less than a factor of two
            parts = [np.flatnonzero(classes == each) for each in np.unique(classes)]
        return Contents(
            written=self._written(step, ends),
            before=np.where(starts > 0, self._hashes[rows, starts - 1], np.uint64(0)),
            last=self._pages[rows, pages],
            whole=[(works, self._digests[rows[works], : int(widths[works].max())]) for works in parts],
        )

    def _written(self, step: Step, ends: Lengths) -> Hashes:
        rows = np.repeat(step.batch.rows, step.counts)
        written: Hashes = self._hashes[rows, step.positions]
        if len(rows) == len(step):
            return written
        works = np.repeat(np.arange(len(step)), step.counts)
        wrong = step.tokens != self.tokens[rows, step.positions]
        wrong[step.future] = False
        drafted = step.positions >= ends[works]
        foreign = np.flatnonzero(wrong & ~drafted & (ends - step.starts > 1)[works])
        if len(foreign):
            request = step.requests[works[foreign[0]]]
            raise WrongContent(f"request '{request.request_id}' computes tokens that are not its own.")
        so_far = np.cumsum(wrong & drafted)
        return np.where(so_far > so_far[step.offsets[:-1]][works], ~written, written)
