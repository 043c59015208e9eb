"""Step: what one turn of the engine computes, as arrays. The scheduler makes it, runner and kernels read it, and
`Scheduler.settle` gets it back with the drawn tokens.

A step has *works*, each of another request; those with one token each come first. Work i computes `counts[i]` tokens
from position `starts[i]` on; all works lie one after the other in the flat batch:

    work          0   1   2 - - - - - -   3 - - -
    flat          .   .   . . . . . . .   . . . .
    offsets       0   1   2               9        13
    draws         ^   ^               ^      ^ ^ ^        flat places after which a token is drawn

A work draws no token (a chunk of a prompt), one token, or several: after its last known token it may compute drafts,
and it draws after that token and after each draft. The number of accepted ones is known when the step has settled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.cache.request_kv import RequestKV
from quire.cache.running import Lengths, Rows, RunningBatch
from quire.scheduler.request import Request
from quire.spec.ids import Bools, Ids

MOST_STOPS = 4
"""Stop tokens of a request up to which all requests are compared at once."""

TERMS = np.dtype(
    [
        ("prompt", np.int64),  # tokens of it
        ("limit", np.int64),  # tokens at which it ends
        ("least", np.int64),  # outputs before which no stop token ends it
        ("most_pending", np.int64),  # pending tokens with which it may still continue
        ("stops", np.int32, (MOST_STOPS,)),  # padded with -1
        ("many_stops", np.bool_),  # the request has more stop tokens
        ("stops_early", np.bool_),  # the request has a stop token
        ("temperature", np.float64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("top_k", np.int64),
        ("seed", np.uint64),
        ("seeded", np.bool_),
        ("index", np.uint64),
        ("arrival", np.uint64),
        ("opening", np.int64),
        ("greedy", np.bool_),
        ("adjusts", np.bool_),  # its logits are changed before a draw
        ("logprobs", np.bool_),
        ("constrained", np.bool_),  # a grammar says what may be drawn
    ]
)
"""Fields of a request that do not change while it runs."""

Terms = npt.NDArray[Any]
_SEEDS = 2**64


def terms_of(request: Request) -> tuple[Any, ...]:
    """The entry of a request, in the order of `TERMS`."""
    params, stops = request.params, sorted(request.stop_ids)
    many = len(stops) > MOST_STOPS
    padded = [] if many else stops
    return (
        request.num_prompt_tokens,
        request.num_prompt_tokens + request.max_tokens,
        params.min_tokens,
        0 if params.needs_history else 1,
        (*padded, *(-1,) * (MOST_STOPS - len(padded))),
        many,
        bool(stops),
        params.temperature,
        params.top_p,
        params.min_p,
        params.top_k,
        (params.seed or 0) % _SEEDS,
        params.seed is not None,
        request.index,
        request.arrival,
        request.opening,
        params.greedy,
        bool(params.logit_bias) or params.needs_history,
        params.logprobs is not None,
        params.grammar is not None,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """The draws of a step: the terms of each request, and the index among the request's outputs.

    `terms` is the same object in two steps in which the same requests draw one token each.
    """

    terms: Terms
    outputs: Lengths
    requests: Sequence[Request]

    def __len__(self) -> int:
        return len(self.outputs)


class StepRows(RunningBatch):
    """The batch of requests in consecutive steps, and the data that is the same in all these steps.

    `base` is where the tokens of each row begin in `RunningRows.flat`. `table` has the `TERMS` of all rows. Two counts
    change, and mean something while all decode step after step (`RunningRows.decodes_again`): the request that ends
    first still draws `left` tokens, and `in_flight` is 1 while the tokens of the last step are not known.
    """

    __slots__ = (
        "_table",
        "_terms",
        "_width",
        "base",
        "in_flight",
        "left",
        "limit",
        "most_pending",
        "ones",
        "prompt",
        "requests",
        "stops_early",
        "units",
    )

    def __init__(
        self, requests: list[Request], kvs: list[RequestKV], rows: Rows, serials: Lengths, table: Terms, width: int
    ) -> None:
        assert len(requests) == len(kvs) == len(rows)
        super().__init__(kvs, rows, serials)
        self._table, self._width = table, width
        self._terms: Terms | None = None
        self.requests = requests
        self.base: Lengths = rows * width
        self.prompt: Lengths = table["prompt"][rows]
        self.limit: Lengths = table["limit"][rows]
        self.most_pending: Lengths = table["most_pending"][rows]
        self.stops_early = bool(np.count_nonzero(table["stops_early"][rows]))  # whether any has stop tokens
        self.ones: Lengths = np.ones(len(rows), dtype=np.int64)
        self.units: Lengths = np.arange(len(rows) + 1)  # offsets where each has one token
        self.left = self.in_flight = 0

    @property
    def terms(self) -> Terms:
        """The entry of `TERMS` of each request, read once."""
        if self._terms is None:
            self._terms = self._table.take(self.rows)  # a tenth of the cost of indexing
        return self._terms

    def stopping(self, owners: Rows, tokens: Lengths, outputs: Lengths) -> Bools:
        """Which of these tokens are the last ones of their requests: drawn for the requests `owners`, as outputs number
        `outputs` (from 1)."""
        terms = self.terms
        found: Bools = (terms["stops"][owners] == tokens[:, None]).any(axis=1)
        for at in terms["many_stops"][owners].nonzero()[0].tolist():
            found[at] = int(tokens[at]) in self.requests[int(owners[at])].stop_ids
        return found & (outputs >= terms["least"][owners])

    def part(self, places: Rows) -> StepRows:
        """The batch of the requests at these places, in order."""
        at = places.tolist()
        requests, kvs = map(self.requests.__getitem__, at), map(self.kvs.__getitem__, at)
        rows, serials = self.rows[places], self.serials[places]
        return StepRows(list(requests), list(kvs), rows, serials, self._table, self._width)


@dataclass(slots=True, eq=False)
class Step:
    """See this module. Lengths are int64; `offsets` is `[works + 1]`, flat arrays are `[num_tokens]`.

    `tokens` are the input ids; `future` are the flat places of those that a step in flight still draws. `draw_counts`
    is the number of draws of each work, `drawers` the work of each draw. If drafts are a tree, `parents` is the
    preceding flat place of each; None: each follows the one before. With `is_decode` every work is the last token that
    its request has room for, as after `KVCache.extend(batch, 1)`; with `is_middle` also, none draws its first token or
    reaches its limit. `admitted` are the requests whose first admission was for this step.
    """

    batch: StepRows
    starts: Lengths
    counts: Lengths
    offsets: Lengths
    positions: Lengths
    draw_counts: Lengths
    drawers: Rows
    draws: Rows
    tokens: Lengths
    future: Rows
    is_decode: bool = False
    is_middle: bool = False
    parents: Ids | None = None
    _places: Places | None = field(default=None, init=False, repr=False)
    _ends: Lengths | None = field(default=None, init=False, repr=False)
    admitted: list[Request] = field(default_factory=list)
    proposals: tuple[Any, ...] = ()

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def requests(self) -> list[Request]:
        """The request of each work."""
        return self.batch.requests

    @property
    def ends(self) -> Lengths:
        """Where each work ends: tokens of its request when it is done."""
        if self._ends is None:
            self._ends = self.starts + self.counts
        return self._ends

    @property
    def num_tokens(self) -> int:
        """Tokens the step computes."""
        return len(self.positions)

    @property
    def computes_prompts(self) -> bool:
        """Whether any request computes tokens of its prompt, or may do so."""
        return bool((self.counts > np.maximum(self.draw_counts, 1)).any())

    @property
    def places(self) -> Places:
        """Its draws, for a sampler; made once."""
        if self._places is None:
            requests, terms, prompt = self.batch.requests, self.batch.terms, self.batch.prompt
            if not self.is_decode and not len(self.drawers) == len(self) == np.count_nonzero(self.draw_counts):
                requests = [requests[i] for i in self.drawers.tolist()]
                terms, prompt = terms.take(self.drawers), prompt[self.drawers]
            ends = self.ends if self.is_decode else self.positions[self.draws] + 1
            self._places = Places(terms, ends - prompt, requests)
        return self._places

    def continued(self, previous: Step) -> Rows:
        """For each of `future`, the draw of the step before that gives its token: the request's last one."""
        draw_of = np.zeros(int(previous.batch.rows.max()) + 1, dtype=np.intp)
        draw_of[previous.batch.rows[previous.drawers]] = np.arange(len(previous.drawers))
        works = np.searchsorted(self.offsets, self.future, side="right") - 1
        found: Rows = draw_of[self.batch.rows[works]]
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Settled:
    """The result of a step: `tokens`, the accepted ones, request by request.

    `counts[i]` of them, at least one, belong to `requests[i]`; `noted` lists the requests that got their first or last
    tokens.
    """

    requests: list[Request]
    counts: Lengths
    tokens: Lengths
    noted: list[int]
