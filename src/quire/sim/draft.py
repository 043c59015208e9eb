"""The parts of workloads: random texts, arrival times and conversations; and `Draft`, which collects requests.

Nothing here stores tokens: seeds and lengths are drawn when a workload is created, and tokens derive from them later.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TypeVar

from typing_extensions import Unpack

from quire.sim.synthetic_text import Text, text_seed
from quire.sim.trace_request import Planned, RequestFields
from quire.spec.events import Namespace

Choice = TypeVar("Choice")

NOMINAL_STEP_S = 0.02
"""Assumed time of a decode step, for the estimated arrivals of follow-ups."""


class Draft:
    """A workload while it is being made. All random numbers come from one seeded generator."""

    def __init__(self, name: str, seed: int) -> None:
        self.random = random.Random(f"{name}/{seed}")
        self.requests: list[Planned] = []
        self._seed = text_seed(name, seed)
        self._num_texts = 0

    def text(self, low: int, high: int | None = None) -> Text:
        """A text of `low` tokens, or of a random number from `low` to `high`; no other text begins like it."""
        length = low if high is None else self.between(low, high)
        self._num_texts += 1
        return Text(text_seed(self._seed, self._num_texts), length)

    def between(self, low: int, high: int) -> int:
        """A uniform whole number from `low` to `high`, both included."""
        return self.random.randint(low, high)

    def poisson(self, rate: float) -> Iterator[float]:
        """Endless arrival times of a Poisson process of `rate` a second, from 0 on, to the microsecond."""
        arrival = 0.0
        while True:
            yield arrival
            arrival += round(self.random.expovariate(1.0) * (1 / rate), 6)

    def popular(self, choices: Sequence[Choice], exponent: float = 1.0) -> Choice:
        """One of `choices`, the n-th with a weight of `n ** -exponent`."""
        weights = accumulate((at + 1) ** -exponent for at in range(len(choices)))
        return self.random.choices(choices, cum_weights=tuple(weights))[0]

    def add(
        self,
        prompt: Sequence[Text],
        output: Text,
        *,
        arrival: float,
        request_id: str = "",
        **fields: Unpack[RequestFields],
    ) -> str:
        """Add a request and return its id."""
        request_id = request_id or str(len(self.requests))
        self.requests.append(Planned.of_texts(request_id, prompt, output, round(arrival, 6), **fields))
        return request_id


class Conversation:
    """Turns whose prompts are the whole conversation so far and a new text."""

    def __init__(
        self,
        draft: Draft,
        session: str,
        opening: Sequence[Text],
        *,
        arrival: float,
        namespace: Namespace = Namespace(),  # noqa: B008 - a frozen value
    ) -> None:
        self._draft = draft
        self._session = session
        self._said = list(opening)
        self._arrival = arrival
        self._namespace = namespace
        self._last = ""
        self._num_turns = 0

    def turn(self, user: Text, output_tokens: int, *, think: float = 0.0) -> None:
        """Add the next turn. It arrives `think` seconds after the one before has finished; the first has no wait."""
        think = think if self._last else 0.0
        self._said.append(user)
        output = self._draft.text(output_tokens)
        self._last = self._draft.add(
            self._said,
            output,
            arrival=self._arrival + think,
            request_id=f"{self._session}.{self._num_turns}",
            session=self._session,
            namespace=self._namespace,
            after=self._last,
            think=round(think, 6),
        )
        self._arrival += think + output_tokens * NOMINAL_STEP_S
        self._said.append(output)
        self._num_turns += 1
