"""Batch: what one step computes."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.cache.request_kv import RequestKV
from quire.scheduler.request import Request


@dataclass(slots=True)
class Work:
    """`count` tokens of one request from position `start` on. With `samples`, its next token is drawn from the last.

    `kv` is the record it was scheduled on: a request that was preempted meanwhile has another one, or none.
    """

    request: Request
    kv: RequestKV
    start: int
    count: int
    samples: bool


@dataclass(slots=True)
class Batch:
    """Works of one step, each of another request, and the requests that were admitted in it for the first time."""

    works: list[Work] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens the step computes."""
        return sum(work.count for work in self.works)

    @property
    def computes_prompts(self) -> bool:
        """Whether any request computes more than the token after its last."""
        return self.num_tokens > len(self.works)
