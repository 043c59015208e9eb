"""Compiler: llguidance's matchers of grammars, made in a thread and kept for requests that ask for the same."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from llguidance import LLMatcher, LLTokenizer

from quire.counters import counter, gauge
from quire.errors import InvalidInput, Overloaded
from quire.grammar.trial import Trial, compiled
from quire.spec.grammar import Grammar

MOST_KEPT = 64
MOST_KEPT_CHARACTERS = 1 << 20
"""Compiled grammars that are kept, and characters of their texts together."""

MOST_PENDING = 16
MOST_PENDING_OF_ONE = 4
"""Grammars that may be in hand or wait for the thread: of all, and of one owner."""


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
        self._pending: dict[Future[LLMatcher], str] = {}  # with who asked for it first
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="quire-grammar")
        self._tokens: tuple[LLTokenizer, Trial] | None = None
        self._is_closed = False

    def compile(self, grammar: Grammar, owner: str = "") -> Future[LLMatcher]:
        """Its matcher at the start, for `deep_copy`. The future raises InvalidInput for a grammar that cannot be
        compiled, allows no token or is too complex; with another error it is not kept. Raises Overloaded if too many
        wait, of all or of a named owner."""
        found = self._kept.get(grammar)
        if found is not None and _stays(found):
            self._kept.move_to_end(grammar)
            self.totals.cache_hits += 1
            return found
        self._pending = {future: who for future, who in self._pending.items() if not future.done()}
        own = sum(bool(owner) and who == owner for who in self._pending.values())
        if len(self._pending) >= MOST_PENDING or own >= MOST_PENDING_OF_ONE:
            of = f", {own} of them this client's" if own else ""
            raise Overloaded(f"{len(self._pending)} grammars wait to be compiled{of}.", retry_after_s=1.0)
        found = self._kept[grammar] = self._thread.submit(self._compiled, grammar)
        self._pending[found] = owner
        self.totals.compiled += 1
        while len(self._kept) > MOST_KEPT or sum(len(each.text) for each in self._kept) > MOST_KEPT_CHARACTERS:
            done = next((each for each, future in self._kept.items() if future.done()), None)
            if done is None:
                break
            del self._kept[done]
        return found

    def counters(self) -> CompilerCounters:
        """Counters now."""
        return replace(self.totals, kept=len(self._kept))

    def close(self) -> None:
        """The thread ends with the grammar that it has."""
        self._is_closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._tokens is not None:
            self._tokens[1].close()

    def _compiled(self, grammar: Grammar) -> LLMatcher:
        tokens, trial = self._loaded()
        trial.check(grammar)
        return compiled(tokens, grammar)

    def _loaded(self) -> tuple[LLTokenizer, Trial]:
        if self._tokens is None:
            content = self._load()
            if content is None or not self._eos:
                what = "end-of-sequence token" if content is not None else "tokenizer of the tokenizers library"
                raise InvalidInput(f"a grammar needs an {what}, which this model lacks.", fix="leave it out.")
            try:
                tokens = LLTokenizer(content, n_vocab=self._vocabulary, eos_token=self._eos)
            except ValueError as error:
                raise InvalidInput(f"grammars cannot use the tokenizer of this model: {error}.") from None
            self._tokens = tokens, Trial(content, self._vocabulary, self._eos)
            if self._is_closed:  # meanwhile
                self._tokens[1].close()
        return self._tokens


def _stays(future: Future[LLMatcher]) -> bool:
    """Whether its result is for all who ask for it: it is not an error that passes."""
    return not future.done() or isinstance(future.exception(), InvalidInput | None)
