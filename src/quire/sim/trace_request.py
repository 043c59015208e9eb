"""TraceRequest and Trace: requests as they arrived, with the tokens that the model will produce."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypedDict

from typing_extensions import Unpack

from quire.errors import InvalidInput
from quire.sim.synthetic_text import Text, tokens_of
from quire.spec.events import Namespace
from quire.spec.ids import Ids


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. The arrays belong to the reader of the trace."""

    request_id: str
    prompt: Ids
    """int32 `[num_tokens]`, at least one."""
    output: Ids
    """int32: the output of the model."""
    arrival: float = 0.0
    """Seconds from the trace's start. For a follow-up it is an estimate, which orders the trace: a replay uses `after`
    and `think`."""
    session: str = ""
    namespace: Namespace = Namespace()  # noqa: RUF009 - a frozen value
    after: str = ""
    """`request_id` of the turn before, if this is a follow-up: it arrives `think` seconds after that one finished."""
    think: float = 0.0
    priority: int = 0
    abort_after: int | None = None
    """The client leaves after this many output tokens; 0: while it waits, so the request never runs."""
    acceptance: float | None = None
    """The chance of a draft to be accepted, if those before it are."""

    def __post_init__(self) -> None:
        if not len(self.prompt):
            fix = "remove it, or use another tokenizer if it has text."
            raise InvalidInput(f"request '{self.request_id}' of the trace has no prompt tokens.", fix=fix)

    @property
    def lengths(self) -> tuple[int, int]:
        """Prompt and output tokens."""
        return len(self.prompt), len(self.output)


class RequestFields(TypedDict, total=False):
    """The optional fields of a `TraceRequest`."""

    session: str
    namespace: Namespace
    after: str
    think: float
    abort_after: int | None


@dataclass(frozen=True, slots=True)
class Planned:
    """A request of a trace before its tokens are built."""

    arrival: float
    """Seconds on any clock; the trace starts when its first request arrives."""
    build: Callable[[float], TraceRequest]
    """The request, given its arrival in seconds from the trace's start."""
    lengths: tuple[int, int] | None = None
    """Prompt and output tokens, if they are known without building."""

    @classmethod
    def of_texts(
        cls, request_id: str, prompt: Sequence[Text], output: Text, arrival: float, **fields: Unpack[RequestFields]
    ) -> Planned:
        """A request of synthetic texts."""
        prompt = tuple(prompt)

        def build(arrival: float) -> TraceRequest:
            return TraceRequest(request_id, tokens_of(prompt), tokens_of([output]), arrival, **fields)

        return cls(arrival, build, (sum(text.length for text in prompt), output.length))


class Trace:
    """Requests in order of arrival, a follow-up after the turn before it. Each iteration gives the same requests, whose
    token arrays are built on demand.

    `name` is short; `source` says in one line where the trace came from.
    """

    def __init__(self, name: str, source: str, planned: Iterable[Planned], *, limit: int | None = None) -> None:
        self.name = name
        self.source = source
        self._planned = sorted(planned, key=lambda request: request.arrival)[:limit]
        self._start = self._planned[0].arrival if self._planned else 0.0

    def __len__(self) -> int:
        return len(self._planned)

    def __iter__(self) -> Iterator[TraceRequest]:
        """The requests, built one at a time."""
        return map(self._built, self._planned)

    @cached_property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(prompt for prompt, _ in self.lengths)

    @cached_property
    def output_tokens(self) -> int:
        """Tokens of all outputs, whether or not the client stays to see them."""
        return sum(output for _, output in self.lengths)

    @cached_property
    def lengths(self) -> tuple[tuple[int, int], ...]:
        """Prompt and output tokens of each request."""
        return tuple(planned.lengths or self._built(planned).lengths for planned in self._planned)

    def _built(self, planned: Planned) -> TraceRequest:
        return planned.build(round(planned.arrival - self._start, 6))
