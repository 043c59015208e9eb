"""Request: one sequence on its way through the engine."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

import msgspec
import numpy as np

from quire.cache.request_kv import CacheUse, RequestKV
from quire.cache.running import Lengths
from quire.cache.session import SessionGrant, Turn
from quire.observe.explain import Explanation
from quire.scheduler.prefetching import PromptFetch
from quire.scheduler.sampling_params import SamplingParams
from quire.spec.events import Namespace
from quire.spec.ids import Ids
from quire.spec.pages import ALL_TOKENS

KNOWN, LAUNCHED, SETTLED, PENDING, DRAFTED, ACCEPTED = range(6)
"""The entries of `Request.lengths`, in this order."""


@dataclass(frozen=True, slots=True)
class Following:
    """A request waits until `leader` has committed `num_pages` pages; `num_cached` tokens were cached before."""

    leader: RequestKV
    num_pages: int
    num_cached: int


class Begun(msgspec.Struct, kw_only=True):
    """What another engine drew of a sequence that this one continues: `outputs`, int32 as bytes, and its counts."""

    outputs: bytes
    use: CacheUse = CacheUse()
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def tokens(self) -> Ids:
        """The outputs, int32, a read-only view."""
        return np.frombuffer(self.outputs, dtype=np.int32)


class RequestState(Enum):
    """WAITING has no memory, RUNNING has a `RequestKV`, FINISHED is over."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Request:
    """A sequence's tokens and how many of them are known, launched and settled.

        |-- settled --|-- launched, not settled --|-- known, not launched --|  others may be `pending`
        0             num_settled                 num_launched              num_tokens

    `pending` tokens are drawn by a step in flight and are not on the host yet. Settled tokens do not change any more;
    only they are committed. `num_drafted` and `num_accepted` count drafts, of all its steps. While it runs, tokens and
    lengths are views of its row in `RunningRows`, where steps advance all requests at once. One that another engine has
    `begun` is as if it had been preempted.
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
        is_for_peer: bool = False,
        session_id: str = "",
        last_turn: bool = False,
        owner: str = "",
        most_cached: int = ALL_TOKENS,
        begun: Begun | None = None,
    ) -> None:
        self.request_id = request_id
        self.params = params
        self.max_tokens = max_tokens
        self.stop_ids = stop_ids
        self.index = index
        self.namespace = namespace
        self.priority = priority
        self.explain = explain  # its client wants the explanation
        self.is_for_peer = is_for_peer  # another engine has asked for it
        self.session_id = session_id  # "" for none
        self.last_turn = last_turn  # no turn of its session follows
        self.owner = owner  # who may see its session and its explanation
        self.most_cached = most_cached  # tokens of it that may come from the cache
        self.turn: Turn | None = None  # a turn of its session, set by the scheduler
        self.grant: SessionGrant | None = None  # what its session holds, when it has ended
        self.queued_s = 0.0  # set by the loop, on its clock
        self.arrival = 0
        self.order: tuple[int, int] = (-priority, 0)
        """The lowest is admitted first and preempted last: higher priority, then earlier arrival."""
        self.opening = 0  # set by the scheduler: a hash of its namespace and its first page
        self.num_prompt_tokens = len(prompt)
        self.state = RequestState.WAITING
        self.kv: RequestKV | None = None
        self.read_ahead = not most_cached  # whether its prompt was looked up in storage, or need not be
        self.prefetch: PromptFetch | None = None  # fetches pages of its prompt from storage, while it waits
        self.prefetched: list[PromptFetch] = []  # ended prefetches whose pages are held until it begins
        self.fetched: tuple[float, float] | None = None  # when the first of them began, and the last was done
        self.follows: Following | None = None  # the leader it waits for, when it was last considered
        self.is_remembered = True  # when it ends, by what drafts: not after a flush of its namespace
        self.is_new = True  # until it is one of `Step.admitted`
        begun = begun or Begun(outputs=b"")
        # The tokens cached at its first admission; None before.
        self.use: CacheUse | None = begun.use if begun.outputs else None
        self.explanation: Explanation | None = None  # why tokens of its first admission were not cached
        self.num_preemptions = 0
        self.wait_reason = "has not been considered yet"
        self.finish_reason: str | None = None
        self.stop_token: int | None = None
        self.end: object | None = None  # what the eviction policy has of it, when it has ended
        self._tokens: Ids = np.concatenate((prompt, begun.tokens()), dtype=np.int32)
        counts = (len(self._tokens), 0, 0, 0, begun.num_draft_tokens, begun.num_accepted_tokens)
        self._lengths: Lengths = np.array(counts, dtype=np.int64)

    def bind(self, tokens: Ids, lengths: Lengths) -> None:
        """The request runs: from now on its tokens and lengths are in these arrays, which have room for all."""
        tokens[: self.num_tokens] = self.tokens
        lengths[:] = self._lengths
        self._tokens, self._lengths = tokens, lengths

    def unbind(self) -> None:
        """The request stops running, and gets copies of its tokens and lengths."""
        self._tokens, self._lengths = self.tokens.copy(), self._lengths.copy()

    def set_arrival(self, number: int) -> None:
        """The scheduler gives it its place in the order of arrival."""
        self.arrival, self.order = number, (-self.priority, number)

    @property
    def tokens(self) -> Ids:
        """All tokens on the host, prompt and output, int32: a view, valid until a step settles."""
        return self._tokens[: self._lengths[KNOWN]]

    def tokens_before(self, num_outputs: int) -> Ids:
        """The prompt and the first outputs, drafts among them that its next step computes: a view."""
        return self._tokens[: self.num_prompt_tokens + num_outputs]

    @property
    def output_tokens(self) -> Ids:
        """Tokens drawn so far, a view."""
        return self._tokens[self.num_prompt_tokens : self._lengths[KNOWN]]

    @property
    def num_tokens(self) -> int:
        """Tokens on the host, prompt and output."""
        return int(self._lengths[KNOWN])

    @property
    def num_launched(self) -> int:
        """Tokens that steps have computed or are computing."""
        return int(self._lengths[LAUNCHED])

    @property
    def num_settled(self) -> int:
        """Tokens whose step has finished."""
        return int(self._lengths[SETTLED])

    @property
    def pending(self) -> int:
        """Tokens that a step in flight draws."""
        return int(self._lengths[PENDING])

    @property
    def num_drafted(self) -> int:
        """Drafts that its settled steps computed."""
        return int(self._lengths[DRAFTED])

    @property
    def num_accepted(self) -> int:
        """Drafts that are among its outputs."""
        return int(self._lengths[ACCEPTED])

    @property
    def num_cached(self) -> int:
        """Tokens cached at its first admission; 0 before."""
        return self.use.num_cached_tokens if self.use is not None else 0

    @property
    def num_outputs(self) -> int:
        """Tokens drawn so far, pending ones not counted."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_known(self) -> int:
        """Tokens that exist, on the host or pending on the device."""
        return self.num_tokens + self.pending

    @property
    def in_prefill(self) -> bool:
        """Whether tokens known before its last admission are still to be settled."""
        return self.num_known - self.num_launched > 1 or self.num_settled < self.num_prompt_tokens

    def start_at(self, num_tokens: int) -> None:
        """How many of its first tokens are cached, or 0 after a preemption."""
        self._lengths[LAUNCHED] = self._lengths[SETTLED] = num_tokens
