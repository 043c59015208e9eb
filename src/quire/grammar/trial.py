"""Trial: a process that compiles each grammar first, with limits.

llguidance cannot be stopped, and a grammar whose rules are in each other 1,000 times overflows its stack. That ends
this process, and the next grammar gets another one. A process ends with its standard input. It loads no numpy.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from quire.errors import GrammarNotTried, InvalidInput
from quire.spec.grammar import WHITE_SPACE, Grammar

CPU_S = 0.5
"""Time of a processor in which a grammar is compiled, or refused."""

THREAD_STACK_BYTES = 2 << 20
"""Stack of a thread where the system has no limit. A trial has a quarter of its engine's, and no more than this."""

_OF_GRAMMAR = (-signal.SIGPROF, -signal.SIGSEGV, -signal.SIGBUS)
"""How a trial ends if a grammar is too complex."""

_MOST_MESSAGE = 300
_NAMES = {"json": "the JSON schema", "regex": "the regular expression"}
_NICE = 5


class Trial:
    """Trials of grammars over the tokens of one tokenizer, one at a time: a caller is one thread."""

    def __init__(self, tokenizer: str, vocabulary: int, eos: Sequence[int]) -> None:
        """The process starts, and is waited for when there is a grammar."""
        self._setup = msgspec.json.encode((tokenizer, vocabulary, eos))
        self._lock = threading.Lock()
        self._is_closed = False
        self._process = self._started()

    def check(self, grammar: Grammar) -> None:
        """Raise InvalidInput for a grammar that cannot be compiled within the limits, and GrammarNotTried if something
        else has ended the process. Such a grammar may be tried again."""
        if self._process.poll() is not None:
            self._start()
        answer = self._answer(msgspec.json.encode(grammar))
        if not answer:
            code = self._process.wait()
            self._start()
            if code not in _OF_GRAMMAR:
                raise GrammarNotTried(f"the process that tries a grammar first has ended with code {code}.")
            what = f"takes over {CPU_S:g} s to compile, or its rules are too deep in each other"
            raise InvalidInput(f"the grammar {what}.", fix="simplify it.")
        found = msgspec.json.decode(answer, type=list[str])
        if found:
            raise InvalidInput(found[0], fix=found[1])

    def close(self) -> None:
        """End the process; no other one starts. Any thread may call it."""
        with self._lock:
            self._is_closed = True
            self._end()

    def _start(self) -> None:
        with self._lock:
            self._end()
            if self._is_closed:
                raise GrammarNotTried("the engine ends.")
            self._process = self._started()

    def _started(self) -> subprocess.Popen[bytes]:
        found = subprocess.Popen(
            [sys.executable, "-P", "-W", "ignore", "-m", "quire.grammar.trial"],  # -P: without the working directory
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,  # an interrupt of the server lets it finish
        )
        self._end = weakref.finalize(self, _end, found)
        self._unsent = self._setup
        return found

    def _answer(self, question: bytes) -> bytes:
        """Its line; none if the process ends instead."""
        assert self._process.stdin is not None and self._process.stdout is not None
        lines, self._unsent = (self._unsent, question) if self._unsent else (question,), b""
        try:
            self._process.stdin.write(b"".join(line + b"\n" for line in lines))
            self._process.stdin.flush()
            return self._process.stdout.readline()
        except (OSError, ValueError):  # a pipe that is broken, or closed
            return b""


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def compiled(tokens: LLTokenizer, grammar: Grammar) -> LLMatcher:
    """A matcher at the start. Raises InvalidInput for a grammar that is not supported, or allows no token."""
    try:
        matcher = LLMatcher(tokens, _source(grammar), log_level=0, limits=limits())
    except ValueError as error:  # no JSON
        raise InvalidInput(f"the grammar cannot be read: {error}.") from None
    first = b"" if matcher.is_error() else matcher.compute_bitmask()
    message = matcher.get_error().strip()
    if message.startswith("NoExtension") or not (message or any(first)):
        raise InvalidInput("the grammar allows no text.")
    if message:
        what = _NAMES.get(grammar.kind, "the grammar")
        raise InvalidInput(
            f"{what} cannot be compiled: {_reason(message, grammar.kind)}.", fix="correct or simplify it."
        )
    return matcher


def _reason(error: str, kind: str) -> str:
    """What an error of llguidance says, without the lines that show where: their text is llguidance's own."""
    said = error.partition("\n")[0].partition(" (in regex)")[0].rstrip(":")[:_MOST_MESSAGE]
    found = re.search("^error: (.*)", error, re.MULTILINE)  # a regular expression has one
    if found is None:
        return said
    return found[1] if kind == "regex" else f"{said}: {found[1]}"


def _source(grammar: Grammar) -> str:
    if grammar.kind == "json":
        return LLMatcher.grammar_from_json_schema(grammar.text, overrides={"whitespace_pattern": WHITE_SPACE})
    text = _translated(grammar.text) if grammar.kind == "ebnf" else grammar.text
    if grammar.kind != "regex" and text.lstrip().startswith("{"):
        raise ValueError("it begins with a brace")  # llguidance would read its own JSON
    made = LLMatcher.grammar_from_regex if grammar.kind == "regex" else LLMatcher.grammar_from_lark
    return made(text)


def _translated(text: str) -> str:
    from llguidance.gbnf_to_lark import any_to_lark  # takes 20 ms, which a plain start does not need

    try:
        return str(any_to_lark(text))
    except Exception as error:  # plain ones too, for rules that are not there
        raise ValueError(error) from None


def limits() -> LLParserLimits:
    """Limits of one grammar: of the work of its lexer in a step, and of the states that it keeps."""
    return LLParserLimits(step_lexer_fuel=100_000, max_lexer_states=20_000, verbose_errors=False)


def main() -> None:
    """Answer each grammar with why it is refused; with an empty list if it is not."""
    os.nice(_NICE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    stack, most = resource.getrlimit(resource.RLIMIT_STACK)
    stack = THREAD_STACK_BYTES if stack == resource.RLIM_INFINITY else stack
    resource.setrlimit(resource.RLIMIT_STACK, (min(stack // 4, THREAD_STACK_BYTES), most))
    tokenizer, vocabulary, eos = msgspec.json.decode(sys.stdin.buffer.readline(), type=tuple[str, int, list[int]])
    tokens = LLTokenizer(tokenizer, n_vocab=vocabulary, eos_token=eos)
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, CPU_S)  # its signal ends the process
        refusal: Sequence[str] = ()
        try:
            compiled(tokens, msgspec.json.decode(line, type=Grammar))
        except InvalidInput as error:
            refusal = error.message, error.fix
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(msgspec.json.encode(refusal) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
