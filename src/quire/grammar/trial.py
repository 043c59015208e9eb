"""Trial: a process that compiles each grammar first, in a copy of itself with limits.

llguidance cannot be stopped, and a grammar whose rules are in each other 1,000 times overflows its stack. That ends the
copy here. The process ends with its standard input.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import weakref
from collections.abc import Sequence

import msgspec
from llguidance import LLTokenizer

from quire.errors import InvalidInput
from quire.grammar.matcher import compiled
from quire.spec.grammar import Grammar

CPU_S = 0.5
"""Time of a processor in which a grammar is compiled, or refused."""

STACK_BYTES = 2 << 20
"""Stack of a trial: a quarter of what threads of the engine have, which compile the grammar again."""


class Trial:
    """Trials of grammars over the tokens of one tokenizer, one at a time: a caller is one thread."""

    def __init__(self, tokenizer: str, vocabulary: int, eos: Sequence[int]) -> None:
        self._setup = msgspec.json.encode((tokenizer, vocabulary, eos))
        self._process: subprocess.Popen[bytes] | None = None

    def check(self, grammar: Grammar) -> None:
        """Raise InvalidInput for a grammar that cannot be compiled within the limits."""
        question = msgspec.json.encode(grammar)
        answer = self._answer(question) or self._answer(question)  # the process may have been killed since
        if not answer:
            raise InvalidInput("the grammar cannot be tried: the process that does it has ended.")
        found = msgspec.json.decode(answer, type=list[str])
        if found:
            raise InvalidInput(found[0], fix=found[1])

    def close(self) -> None:
        """End the process. It may begin again."""
        if self._process is not None:
            self._end()

    def _start(self) -> None:
        self.close()
        command = [sys.executable, "-W", "ignore", "-m", "quire.grammar.trial"]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # an interrupt of the server lets it finish
        )
        self._end = weakref.finalize(self, _end, self._process)
        self._send(self._setup)

    def _answer(self, question: bytes) -> bytes:
        try:
            if self._process is None or self._process.poll() is not None:
                self._start()
            self._send(question)
            assert self._process is not None and self._process.stdout is not None
            return self._process.stdout.readline()
        except OSError:
            return b""

    def _send(self, line: bytes) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(line + b"\n")
        self._process.stdin.flush()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Close its pipes, and wait until it has ended."""
    try:
        process.communicate()
    except (OSError, ValueError):
        process.kill()
        process.wait()


def main() -> None:
    """Answer each grammar with why it is refused; with an empty list if it is not."""
    tokenizer, vocabulary, eos = msgspec.json.decode(sys.stdin.buffer.readline(), type=tuple[str, int, list[int]])
    tokens = LLTokenizer(tokenizer, n_vocab=vocabulary, eos_token=eos)
    for line in sys.stdin.buffer:
        sys.stdout.buffer.write(_tried(tokens, msgspec.json.decode(line, type=Grammar)) + b"\n")
        sys.stdout.buffer.flush()


def _tried(tokens: LLTokenizer, grammar: Grammar) -> bytes:
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writes, msgspec.json.encode(_refusal(tokens, grammar)))
        finally:
            os._exit(0)
    os.close(writes)
    with open(reads, "rb") as pipe:
        found = pipe.read()
    os.waitpid(child, 0)
    message = f"the grammar takes over {CPU_S:g} s to compile, or its rules are too deep in each other."
    return found or msgspec.json.encode((message, "simplify it."))


def _refusal(tokens: LLTokenizer, grammar: Grammar) -> Sequence[str]:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, resource.getrlimit(resource.RLIMIT_STACK)[1]))
    signal.setitimer(signal.ITIMER_PROF, CPU_S)  # its signal ends the process
    try:
        compiled(tokens, grammar)
    except InvalidInput as error:
        return error.message, error.fix
    return ()


if __name__ == "__main__":
    main()
