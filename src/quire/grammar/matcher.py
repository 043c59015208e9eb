"""Matcher: where one sequence is in its grammar."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llguidance import LLMatcher

from quire.spec.ids import Ids


class Matcher:
    """`state` is that after the first `num_outputs` tokens of a sequence. After one of `eos` it stays as it is, and
    `has_ended` is true: the sequence ends there. `mask_s` is the time of a processor that `num_masks` and drafts have
    taken. `is_quick` is whether its masks are computed with those of others, None before the first one. `start`, which
    is copied, belongs to all sequences of one compiled grammar."""

    def __init__(self, start: LLMatcher, eos: frozenset[int]) -> None:
        self.start = start
        self.state = start.deep_copy()
        self.num_outputs = 0
        self.has_ended = False
        self.num_masks = 0
        self.mask_s = 0.0
        self.is_quick: bool | None = None
        self._eos = eos

    def advance(self, outputs: Ids, more: Sequence[int] = ()) -> None:
        """The sequence has these outputs, and `more` behind them. Tokens that were seen before are the same ones."""
        new = [*outputs[self.num_outputs :].tolist(), *more]
        self.num_outputs += len(new)
        if new and new[-1] in self._eos:
            self.has_ended = True
            new.pop()
        if new and not self.state.is_error():
            self.state.consume_tokens(new)

    def error(self) -> str:
        """Why it cannot go on; "" if it can."""
        return " ".join(self.state.get_error().split())

    def visit(
        self, tokens: Sequence[int], parents: Sequence[int] | None, at: Callable[[int], object] = lambda place: None
    ) -> list[bool]:
        """Which tokens the grammar allows after the outputs. `at(i)` is called in the state after each of these but
        end-of-sequence.

        Token i follows token `parents[i]`, an earlier one, or the outputs if that is -1; without `parents` each follows
        the one before. The state is the same afterwards: tokens are taken back, and nothing is copied.
        """
        following: list[list[int]] = [[] for _ in range(len(tokens) + 1)]
        for place in reversed(range(len(tokens))):
            following[(place - 1 if parents is None else parents[place]) + 1].append(place)
        allowed, depth = [False] * len(tokens), 0
        waiting = [(place, 0) for place in following[0]]
        while waiting:
            place, above = waiting.pop()
            if depth > above:
                self.state.rollback(depth - above)
                depth = above
            if tokens[place] in self._eos:
                allowed[place] = self.state.is_accepting()
            elif self.state.try_consume_tokens([tokens[place]]):
                allowed[place], depth = True, above + 1
                at(place)
                waiting += [(each, depth) for each in following[place + 1]]
        if depth:
            self.state.rollback(depth)
        return allowed
