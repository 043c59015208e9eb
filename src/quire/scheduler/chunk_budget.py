"""ChunkBudget: how much of prompts a step computes while other requests decode.

Each decoding request waits for the end of the step, so a chunk of a prompt is time between its tokens. The costs of a
step are learned from the steps before it (`CostFit`). While no request decodes, or with an infinite target, nothing is
limited. Otherwise prompts may add to a step

    with a target       target - alone
    without one         the larger of 2 * alone and backlog / 24

seconds. `alone` is the time of the step without prompts. So a step takes at most three times as long as its decodes
alone, unless prompts arrive faster than that computes them: then a first token comes after about 24 steps, and both
latencies grow together. Prompts are computed in order, and the first one always advances, by `least` tokens or to its
end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from quire.cache.running import Lengths
from quire.counters import counter, gauge
from quire.plan.step_cost import CostFit, CostModel
from quire.scheduler.step import Step

LEAST_TOKENS = 16
"""A smaller chunk costs more than its tokens."""

_ADDED = 2.0  # what prompts may add to a step without a target, times what it takes alone
_STEPS = 24  # in which the prompts that are known now are to be computed
_KEEPS = 0.97  # weight of earlier steps at each new one
_KEEPS_SHARE = 0.9  # weight of earlier prompts in the mean


@dataclass(frozen=True, slots=True)
class Backlog:
    """Prompts that are not computed: chunks `counts[i]` from `starts[i]` on of running requests, and `waiting` requests
    that could begin, with `waiting_tokens` known tokens together."""

    starts: Lengths
    counts: Lengths
    waiting: int
    waiting_tokens: int


@dataclass(kw_only=True)
class ChunkCounters:
    """Steps that a budget limited, and the last of them; `why` says for users what limited it."""

    PREFIX: ClassVar = "chunk_budget_"
    steps: int = counter("Steps in which requests decoded and prompts were limited (--target-itl-ms).")
    tokens: int = counter("Prompt tokens that such steps computed.")
    alone_seconds: float = gauge("What the last such step was expected to take without prompts.")
    budget_seconds: float = gauge("What prompts were allowed to add to it.")
    why: str = ""


class ChunkBudget:
    """The budget of one scheduler. A step with decodes may take `target_s` seconds; None: see the module."""

    def __init__(self, target_s: float | None = None, *, least: int = LEAST_TOKENS) -> None:
        self._target_s = target_s
        self._least = least
        self._fit = CostFit(_KEEPS)
        self._cost: CostModel | None = None
        self._computed = self._known = 0.0  # tokens of admitted prompts, recent ones more
        self._left_s = 0.0  # seconds left in the step that is being made
        self.spent = False
        """Whether the step that is being made takes no more of prompts."""
        self._alone_s = self._budget_s = 0.0  # seconds of the last limited step
        self._why = ""
        self._totals = ChunkCounters()

    def measured(self, step: Step, seconds: float) -> None:
        """A step took this time, and waited for nothing."""
        if self._target_s != math.inf and seconds > 0:
            drafts = 0 if step.is_decode else step.draw_counts - (step.draw_counts > 0)
            self._fit.add(step.starts, step.ends, seconds, drafts)

    def admitted(self, known: int, cached: int) -> None:
        """A prompt of `known` tokens begins, of which so many were cached."""
        self._known = self._known * _KEEPS_SHARE + known
        self._computed = self._computed * _KEEPS_SHARE + known - cached

    @property
    def limits(self) -> bool:
        """Whether it ever limits a step."""
        return self._target_s != math.inf

    @property
    def why(self) -> str:
        """What limited a step last, for users; empty while nothing has."""
        if not self._why:
            return ""
        return f"prompts may add {self._budget_s * 1e3:.3g} ms to this step, {self._why}"

    def begin(self, contexts: Lengths, num_drafts: int, backlog: Backlog) -> None:
        """A step is being made, in which requests decode with so many keys each, and drafts. Requests that decode in
        other steps, but wait for the end of this one, are among them."""
        self.spent = False
        cost = self._cost = self._fit.model() if self.limits and len(contexts) else None
        if cost is None:
            return
        self._alone_s = cost.launch + cost.seconds(contexts - 1, contexts) + cost.token * num_drafts
        if self._target_s is not None:
            self._budget_s = max(0.0, self._target_s - self._alone_s)
            self._why = f"which has a target of {self._target_s * 1e3:g} ms"
        else:
            pressed = self._backlog_s(cost, backlog) / _STEPS
            self._budget_s = max(_ADDED * self._alone_s, pressed)
            self._why = "twice its decodes" if pressed < self._budget_s else "a share of all that wait"
        self._left_s = self._budget_s
        self._totals.steps += 1

    def take(self, start: int, count: int, most: int) -> int:
        """How many tokens of a prompt, of which `count` are ready from token `start` on, the step computes; at most
        `most`, which is not 0. Not called once the budget is spent."""
        found = min(count, most)
        cost = self._cost
        if cost is None:
            return found
        chunk = max(self._least, cost.chunk_tokens(start, max(0.0, self._left_s)))
        if chunk + self._least < found:  # a few tokens more save a step
            found = int(chunk)
        self._left_s -= cost.chunk_seconds(start, found)
        self.spent = self._left_s < cost.chunk_seconds(0, self._least)
        self._totals.tokens += found
        return found

    def _backlog_s(self, cost: CostModel, backlog: Backlog) -> float:
        starts, counts = backlog.starts, backlog.counts
        tokens, pairs = float(counts.sum()), float((counts * (starts + (counts + 1) / 2)).sum())
        if backlog.waiting:
            share = self._computed / self._known if self._known else 1.0
            each = backlog.waiting_tokens / backlog.waiting
            tokens += share * backlog.waiting_tokens
            pairs += share * backlog.waiting_tokens * each * (1 - share / 2)
        return cost.token * tokens + cost.pair * pairs

    def counters(self) -> ChunkCounters:
        """Counters and gauges now."""
        return replace(self._totals, alone_seconds=self._alone_s, budget_seconds=self._budget_s, why=self.why)


def chunk_budget(target_itl_ms: float | str) -> ChunkBudget:
    """The budget of a setting: milliseconds, "auto" or "off"."""
    targets = {"auto": None, "off": math.inf}
    return ChunkBudget(targets[target_itl_ms] if isinstance(target_itl_ms, str) else target_itl_ms / 1e3)
