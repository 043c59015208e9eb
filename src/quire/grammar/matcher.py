"""Matcher: where one sequence is in its grammar; `compiled` is where each begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from quire.errors import InvalidInput
from quire.spec.grammar import WHITE_SPACE, Grammar
from quire.spec.ids import Ids

_MOST_MESSAGE = 300


class Matcher:
    """`state` is that after the first `num_outputs` tokens of a sequence. After one of `eos` it stays as it is, and
    `has_ended` is true: the sequence ends there. `mask_s` is the time of a processor that `num_masks` have taken."""

    def __init__(self, start: LLMatcher, eos: frozenset[int]) -> None:
        """`start` is copied."""
        self.state = start.deep_copy()
        self.num_outputs = 0
        self.has_ended = False
        self.num_masks = 0
        self.mask_s = 0.0
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


def compiled(tokens: LLTokenizer, grammar: Grammar) -> LLMatcher:
    """A matcher at the start. Raises InvalidInput for a grammar that is not supported, or allows no token."""
    try:
        matcher = LLMatcher(tokens, _source(grammar), log_level=0, limits=limits())
    except ValueError as error:  # no JSON
        raise InvalidInput(f"the grammar cannot be read: {error}.") from None
    first = b"" if matcher.is_error() else matcher.compute_bitmask()
    message = " ".join(matcher.get_error().split())
    if message.startswith("NoExtension") or not (message or any(first)):
        raise InvalidInput("the grammar allows no text.")
    if message:
        raise InvalidInput(f"the grammar is not supported: {message[:_MOST_MESSAGE]}.", fix="simplify it.")
    return matcher


def _source(grammar: Grammar) -> str:
    if grammar.kind == "json":
        return LLMatcher.grammar_from_json_schema(grammar.text, overrides={"whitespace_pattern": WHITE_SPACE})
    if grammar.kind == "lark" and grammar.text.lstrip().startswith("{"):
        raise ValueError("it begins with a brace")  # llguidance would read its own JSON
    made = LLMatcher.grammar_from_regex if grammar.kind == "regex" else LLMatcher.grammar_from_lark
    return made(grammar.text)


def limits() -> LLParserLimits:
    """Limits of one grammar: of the work of its lexer in a step, and of the states that it keeps."""
    return LLParserLimits(step_lexer_fuel=100_000, max_lexer_states=20_000, verbose_errors=False)
