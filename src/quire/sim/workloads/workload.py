"""Parts that workloads are made of: fresh text, conversations, and a draft that collects requests.

Nothing here holds tokens: sizes and names are drawn when a workload is made, tokens come from the names later.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate
from typing import TypeVar

from quire.sim.pieces import Piece, piece_key
from quire.sim.trace_request import PlannedPieces
from quire.spec.events import Namespace

Choice = TypeVar("Choice")

NOMINAL_STEP_S = 0.02
"""How long a token is taken to last when the order of requests that follow one another is drafted."""


class Draft:
    """A workload while it is being made. Everything drawn comes from one seeded generator."""

    def __init__(self, name: str, seed: int) -> None:
        self.random = random.Random(f"{name}/{seed}")
        self.requests: list[PlannedPieces] = []
        self._seed = piece_key(name, seed)
        self._pieces = 0

    def text(self, length: int) -> Piece:
        """Text that nothing else in the workload begins like."""
        self._pieces += 1
        return Piece(piece_key(self._seed, self._pieces), length)

    def between(self, low: int, high: int) -> int:
        """A whole number from `low` to `high`, both included, all alike."""
        return self.random.randint(low, high)

    def gap(self, mean_s: float) -> float:
        """Seconds until something that happens every `mean_s` seconds, at random, to the microsecond."""
        return round(self.random.expovariate(1.0) * mean_s, 6)

    def popular(self, choices: Sequence[Choice], exponent: float = 1.0) -> Choice:
        """One of `choices`, the n-th with a weight of `n ** -exponent`."""
        weights = accumulate((at + 1) ** -exponent for at in range(len(choices)))
        return self.random.choices(choices, cum_weights=tuple(weights))[0]

    def add(
        self,
        prompt: Sequence[Piece],
        output: Piece,
        *,
        arrival: float,
        request_id: str = "",
        session: str = "",
        namespace: Namespace = Namespace(),  # noqa: B008 - a frozen value
        after: str = "",
        think: float = 0.0,
        priority: int = 0,
        abort_after: int | None = None,
    ) -> str:
        """Adds a request and returns its id."""
        request_id = request_id or str(len(self.requests))
        request = PlannedPieces(
            request_id=request_id,
            prompt=tuple(prompt),
            output=(output,),
            arrival=round(arrival, 6),
            session=session,
            namespace=namespace,
            after=after,
            think=round(think, 6),
            priority=priority,
            abort_after=abort_after,
        )
        self.requests.append(request)
        return request_id


class Conversation:
    """Turns in which each prompt is everything said before and something new."""

    def __init__(
        self,
        draft: Draft,
        session: str,
        opening: Sequence[Piece],
        *,
        arrival: float,
        namespace: Namespace = Namespace(),  # noqa: B008 - a frozen value
        priority: int = 0,
    ) -> None:
        self._draft = draft
        self._session = session
        self._said = list(opening)
        self._arrival = arrival
        self._namespace = namespace
        self._priority = priority
        self._last = ""
        self._turns = 0

    def turn(self, user: Sequence[Piece], output_tokens: int, *, think: float = 0.0) -> None:
        """Adds the next turn: it arrives `think` seconds after the one before has finished, the first at once."""
        think = think if self._last else 0.0
        self._said.extend(user)
        output = self._draft.text(output_tokens)
        self._last = self._draft.add(
            self._said,
            output,
            arrival=self._arrival + think,
            request_id=f"{self._session}.{self._turns}",
            session=self._session,
            namespace=self._namespace,
            after=self._last,
            think=think,
            priority=self._priority,
        )
        self._arrival += think + output_tokens * NOMINAL_STEP_S
        self._said.append(output)
        self._turns += 1
