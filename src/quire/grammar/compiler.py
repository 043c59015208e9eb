"""Compiler: llguidance's matchers of grammars, made in threads and kept for requests that ask for the same."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from quire.counters import counter, gauge
from quire.errors import InvalidInput, Overloaded
from quire.spec.grammar import WHITE_SPACE, Grammar

MOST_KEPT = 64
MOST_KEPT_CHARACTERS = 1 << 20
"""Compiled grammars that are kept, and characters of their texts together."""

NUM_THREADS = 2
MOST_PENDING = 16
"""Grammars that may be in hand or wait for a thread."""

_MOST_MESSAGE = 300


@dataclass(kw_only=True)
class CompilerCounters:
    """Grammars that requests asked for."""

    compiled: int = counter("Grammars that were compiled.", name="grammars_compiled")
    cache_hits: int = counter("Grammars that were asked for while they were kept.", name="grammar_cache_hits")
    refused: int = counter("Requests whose grammar was refused.", name="grammars_refused")
    kept: int = gauge("Compiled grammars that are kept.", name="grammars_kept")


class Compiler:
    """Grammars over the tokens of one tokenizer. `tokenizer` returns its JSON (`Tokenizer.portable`) in a thread, once,
    when the first grammar is asked for. `eos` are the tokens with which a complete text ends."""

    def __init__(self, tokenizer: Callable[[], str | None], vocabulary: int, eos: Sequence[int]) -> None:
        self.totals = CompilerCounters()
        self._load = tokenizer
        self._vocabulary = vocabulary
        self._eos = list(eos)
        self._kept: OrderedDict[Grammar, Future[LLMatcher]] = OrderedDict()
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="quire-grammar")
        self._tokenizer: LLTokenizer | None = None
        self._loading = threading.Lock()

    def compile(self, grammar: Grammar) -> Future[LLMatcher]:
        """Its matcher at the start, for `deep_copy`. The future raises InvalidInput for a grammar that cannot be
        compiled, allows no token or is too complex."""
        found = self._kept.get(grammar)
        if found is not None:
            self._kept.move_to_end(grammar)
            self.totals.cache_hits += 1
            return found
        if self.num_pending >= MOST_PENDING:
            raise Overloaded(f"{self.num_pending} grammars wait to be compiled.", retry_after_s=1.0)
        found = self._kept[grammar] = self._threads.submit(self._compiled, grammar)
        self.totals.compiled += 1
        while len(self._kept) > MOST_KEPT or sum(len(each.text) for each in self._kept) > MOST_KEPT_CHARACTERS:
            done = next((each for each, future in self._kept.items() if future.done()), None)
            if done is None:
                break
            del self._kept[done]
        return found

    @property
    def num_pending(self) -> int:
        """Grammars that are being compiled, or wait for it."""
        return sum(not future.done() for future in self._kept.values())

    @property
    def is_loaded(self) -> bool:
        """Whether it has its tokenizer."""
        return self._tokenizer is not None

    def counters(self) -> CompilerCounters:
        """Counters now."""
        return replace(self.totals, kept=len(self._kept))

    def close(self) -> None:
        """Threads end with the grammar that they have."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _compiled(self, grammar: Grammar) -> LLMatcher:
        try:
            matcher = LLMatcher(self._tokens(), _source(grammar), log_level=0, limits=_limits())
        except ValueError as error:  # no JSON
            raise InvalidInput(f"the grammar cannot be read: {error}.") from None
        first = b"" if matcher.is_error() else matcher.compute_bitmask()
        message = " ".join(matcher.get_error().split())
        if message.startswith("NoExtension") or not (message or any(first)):
            raise InvalidInput("the grammar allows no text.")
        if message:
            raise InvalidInput(f"the grammar is not supported: {message[:_MOST_MESSAGE]}.", fix="simplify it.")
        return matcher

    def _tokens(self) -> LLTokenizer:
        with self._loading:
            if self._tokenizer is None:
                content = self._load()
                if content is None or not self._eos:
                    what = "end-of-sequence token" if content is not None else "tokenizer of the tokenizers library"
                    raise InvalidInput(f"a grammar needs an {what}, which this model lacks.", fix="leave it out.")
                try:
                    self._tokenizer = LLTokenizer(content, n_vocab=self._vocabulary, eos_token=self._eos)
                except ValueError as error:
                    raise InvalidInput(f"grammars cannot use the tokenizer of this model: {error}.") from None
            return self._tokenizer


def _source(grammar: Grammar) -> str:
    if grammar.kind == "json":
        return LLMatcher.grammar_from_json_schema(grammar.text, overrides={"whitespace_pattern": WHITE_SPACE})
    if grammar.kind == "lark" and grammar.text.lstrip().startswith("{"):
        raise ValueError("it begins with a brace")  # llguidance would read its own JSON
    made = LLMatcher.grammar_from_regex if grammar.kind == "regex" else LLMatcher.grammar_from_lark
    return made(grammar.text)


def _limits() -> LLParserLimits:
    """Limits of one grammar: of the work of its lexer in a step, and of the states that it keeps."""
    return LLParserLimits(step_lexer_fuel=100_000, max_lexer_states=20_000, verbose_errors=False)
