"""Request: one sequence on its way through the engine."""

from __future__ import annotations

from enum import Enum, auto

import numpy as np

from quire.cache.request_kv import RequestKV
from quire.observe.explain import Explanation
from quire.offload.prefetch import Prefetch
from quire.scheduler.sampling_params import SamplingParams
from quire.spec.events import Namespace
from quire.spec.ids import Ids


class RequestState(Enum):
    """WAITING has no memory, RUNNING has a `RequestKV`, FINISHED is over."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Request:
    """A sequence's tokens and how far they are: known, launched, settled.

        |-- settled --|-- launched, not settled --|-- known, not launched --|  one more may be `pending`
        0             num_settled                 num_launched              num_tokens

    `pending` tokens have been drawn by a step in flight and are not on the host yet (0 or 1). Settled tokens are in the
    cache for good; only they are committed.
    """

    def __init__(
        self,
        request_id: str,
        prompt: Ids,
        params: SamplingParams,
        *,
        max_tokens: int,
        stop_ids: frozenset[int] = frozenset(),
        index: int = 0,
        namespace: Namespace = Namespace(),  # noqa: B008 - a frozen value
        priority: int = 0,
        explain: bool = False,
    ) -> None:
        self.request_id = request_id
        self.params = params
        self.max_tokens = max_tokens
        self.stop_ids = stop_ids
        self.index = index
        self.namespace = namespace
        self.priority = priority
        self.explain = explain  # its client wants the explanation
        self.arrival = 0  # set by the scheduler: its place in the order of arrival
        self.num_prompt_tokens = len(prompt)
        self.state = RequestState.WAITING
        self.kv: RequestKV | None = None
        self.read_ahead = False  # whether storage was asked for its prompt
        self.prefetch: Prefetch | None = None  # what of its prompt comes from storage while it waits
        self.prefetched: list[Prefetch] = []  # what has come of it, which is held until it begins
        self.num_launched = 0
        self.num_settled = 0
        self.pending = 0
        self.num_cached = -1  # of its first admission; -1 before
        self.num_host = self.num_storage = 0  # of these, from host memory and from storage
        self.explanation: Explanation | None = None  # of its first admission, where the cache explains
        self.num_preemptions = 0
        self.wait_reason = "has not been considered yet"
        self.finish_reason: str | None = None
        self.stop_token: int | None = None
        self._tokens = np.empty(len(prompt) + min(max_tokens, 256), dtype=np.int32)
        self._tokens[: len(prompt)] = prompt
        self.num_tokens = len(prompt)

    @property
    def order(self) -> tuple[int, int]:
        """Who goes first, and who is preempted last: higher priority, then earlier arrival."""
        return (-self.priority, self.arrival)

    @property
    def tokens(self) -> Ids:
        """All tokens on the host, prompt and output, int32: a view, valid until the next `append`."""
        return self._tokens[: self.num_tokens]

    @property
    def output_tokens(self) -> Ids:
        """Tokens drawn so far, a view."""
        return self._tokens[self.num_prompt_tokens : self.num_tokens]

    @property
    def num_outputs(self) -> int:
        """Tokens drawn so far, pending ones not counted."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_known(self) -> int:
        """Tokens that exist, on the host or pending on the device."""
        return self.num_tokens + self.pending

    @property
    def num_ready(self) -> int:
        """Tokens that could be launched now: none once the last one it may draw is on its way."""
        known = self.num_tokens + self.pending
        if known - self.num_prompt_tokens >= self.max_tokens or (self.pending and self.params.needs_history):
            return 0
        return known - self.num_launched

    @property
    def in_prefill(self) -> bool:
        """Whether tokens known before it was last admitted are still to be settled."""
        return self.num_known - self.num_launched > 1 or self.num_settled < self.num_prompt_tokens

    def append(self, token: int) -> None:
        """Add a drawn token."""
        if self.num_tokens == len(self._tokens):
            self._tokens = np.concatenate((self._tokens, np.empty(len(self._tokens), dtype=np.int32)))
        self._tokens[self.num_tokens] = token
        self.num_tokens += 1
        if token in self.stop_ids and self.num_outputs >= self.params.min_tokens:
            self.finish_reason, self.stop_token = "stop", token
        elif self.num_outputs >= self.max_tokens:
            self.finish_reason = "length"
