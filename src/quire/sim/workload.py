"""Workload and Conversation: what the generators of workloads are made with.

Nothing here holds tokens: seeds and lengths are drawn when a workload is made, and tokens are computed from them later.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

from quire.sim.trace_request import Draft, Text, TraceRequest, text_seed
from quire.spec.events import Namespace

Choice = TypeVar("Choice")

NOMINAL_STEP_S = 0.02
"""Assumed time of a decode step, for the estimated arrivals of follow-ups."""


class Workload:
    """A workload while it is being made. All random numbers come from one seeded generator."""

    def __init__(self, name: str, seed: int) -> None:
        self.random = random.Random(f"{name}/{seed}")
        self.requests: list[Draft] = []
        self._seed = text_seed((name, seed))
        self._num_texts = 0

    def text(self, low: int, high: int | None = None) -> Text:
        """A text of `low` tokens, or of a random number from `low` to `high`; no other text begins like it."""
        length = low if high is None else self.between(low, high)
        self._num_texts += 1
        return Text((self._seed, self._num_texts), length)

    def between(self, low: int, high: int) -> int:
        """A uniform whole number from `low` to `high`, both included."""
        return self.random.randint(low, high)

    def arrivals(self, count: int, rate: float) -> Iterator[tuple[int, float]]:
        """Numbers from 0 on and times of a Poisson process of `rate` a second, from 0 on, to the microsecond."""
        arrival = 0.0
        for number in range(count):
            yield number, arrival
            arrival += round(self.random.expovariate(1.0) * (1 / rate), 6)

    def spread(self, low: float, high: float) -> float:
        """A number from `low` to `high` whose logarithm is uniform: most are small, and a few are large."""
        return math.exp(self.random.uniform(math.log(low), math.log(high)))

    def popular(self, choices: Sequence[Choice], exponent: float = 1.0) -> Choice:
        """One of `choices`, the n-th with a weight of `n ** -exponent`."""
        weights = accumulate((at + 1) ** -exponent for at in range(len(choices)))
        return self.random.choices(choices, cum_weights=tuple(weights))[0]

    def add(self, prompt: Sequence[Text], output: Text, arrival: float, *ends: Text, **fields: Any) -> None:
        """Add a request whose output ends with `ends`. `fields` are others of a `TraceRequest`. Its id is its number
        unless they name it."""
        fields.setdefault("request_id", str(len(self.requests)))
        output_texts = (output, *ends)
        self.requests.append(
            TraceRequest(prompt=tuple(prompt), output=output_texts, arrival=round(arrival, 6), **fields)
        )


@dataclass(slots=True)
class Conversation:
    """Turns whose prompts are all that was `said` so far and a new text. The next turn arrives at `arrival`, or as long
    as its user thinks after that."""

    load: Workload
    session: str
    said: list[Text]
    arrival: float
    namespace: Namespace = Namespace()  # noqa: RUF009 - a frozen value
    num_turns: int = 0

    def turn(self, user: Text, output_tokens: int, *, think: float = 0.0) -> None:
        """Add the next turn. It arrives `think` seconds after the one before has finished; the first has no wait."""
        self.said.append(user)
        output = self.load.text(output_tokens)
        fields: dict[str, Any] = {"session": self.session, "namespace": self.namespace}
        if self.num_turns:
            fields |= {"after": f"{self.session}.{self.num_turns - 1}", "think": round(think, 6)}
        else:
            think = 0.0
        request_id = f"{self.session}.{self.num_turns}"
        self.load.add(self.said, output, self.arrival + think, request_id=request_id, **fields)
        self.arrival += think + output_tokens * NOMINAL_STEP_S
        self.said.append(output)
        self.num_turns += 1
