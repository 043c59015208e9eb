"""Messages between the engine core and its callers: requests in, tokens out. Plain structs, also the wire format.

Below them are those between an engine process and its owner: commands one way, reports the other, errors whole.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
import numpy as np

from quire import errors
from quire.cache.request_kv import CacheUse
from quire.cache.session import SessionGrant
from quire.counters import Metric
from quire.errors import InvalidInput, QuireError
from quire.observe.explain import Explanation
from quire.scheduler.request import Begun, Request
from quire.scheduler.sampling_params import SamplingParams
from quire.spec.ids import Ids

T = TypeVar("T")

EXIT_DEFECT = 1
"""Exit code of a failure that is no `QuireError`."""


class EngineRequest(msgspec.Struct, kw_only=True):
    """One sequence to generate. A request with `n` > 1 is sent as n of these, which share the prompt's pages.

    `prompt` is the prompt's token ids as raw int32 bytes: converted once, on arrival. `adapter` and `salt` are the
    cache namespace: nothing is ever shared across two of them. Higher `priority` goes first. With `explain`, an output
    says why no more of the prompt was cached. One that `is_for_peer` computes a prompt for another engine. One with a
    `session_id` is a turn of that session (`quire.cache.sessions`), which its `last_turn` closes. Its `owner` alone,
    and the operator, may ask for its explanation, and see or end its session. One that another engine has `begun` is
    continued.
    """

    request_id: str
    prompt: bytes
    params: SamplingParams
    index: int = 0
    adapter: str = ""
    salt: str = ""
    priority: int = 0
    explain: bool = False
    is_for_peer: bool = False
    session_id: str = ""
    last_turn: bool = False
    owner: str = ""
    begun: Begun | None = None

    def tokens(self) -> Ids:
        """The prompt's token ids, int32 `[num_prompt_tokens]`, a read-only view."""
        return np.frombuffer(self.prompt, dtype=np.int32)


class RetainRequest(msgspec.Struct, kw_only=True):
    """A prefix to retain: token ids, namespace and owner as in `EngineRequest`, and the terms
    (`quire.offload.retention`)."""

    prompt: bytes
    ttl_seconds: float
    adapter: str = ""
    salt: str = ""
    priority: int = 0
    pin: bool = False
    owner: str = ""


class ResizeRequest(msgspec.Struct, kw_only=True):
    """Bytes of KV memory on the device, and of host memory for pages; None: as it is. The answer comes when they are
    reached, or after `wait_s`. With `preempt`, running requests give their memory back, wait, and go on later."""

    device_bytes: int | None = None
    host_bytes: int | None = None
    wait_s: float = 10.0
    preempt: bool = False


@dataclass(frozen=True, kw_only=True)
class MemorySize:
    """Bytes of one tier: as `asked`, as `reached`, and between what they can be."""

    asked: int
    reached: int
    least: int
    most: int


@dataclass(frozen=True, kw_only=True)
class MemoryHolder:
    """What holds frames that cannot be evicted: a request, by its id, or something else. It has `num_bytes`, and will
    need `most_bytes` at its end. Requests that share pages count them all."""

    name: str
    num_bytes: int
    most_bytes: int


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """The size of an engine's memory. `evicted_pages` have left the device, `moved_frames` have other places, since
    the question. With `done` false, the `holders` keep the rest, those with most first; it goes on as they end. While
    the KV memory is `released`, requests wait."""

    done: bool
    released: bool
    device: MemorySize
    host: MemorySize | None
    evicted_pages: int
    moved_frames: int
    holders: list[MemoryHolder]


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Log-probabilities at one position: of the drawn token (`logprob`, `rank` from 1), and of the most likely ones."""

    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


class PromptLogprobs(msgspec.Struct, array_like=True):
    """Log-probabilities of the next n tokens of a prompt, as the bytes of arrays: of each (float32 `[n]`) with its rank
    (int64 `[n]`), and the k highest at its position (float32 `[n, k]`) with their tokens (int64 `[n, k]`)."""

    logprobs: bytes
    ranks: bytes
    top_logprobs: bytes
    top_ids: bytes

    def positions(self) -> list[TokenLogprobs]:
        """Those of each token, in order."""
        logprobs, ranks = np.frombuffer(self.logprobs, np.float32), np.frombuffer(self.ranks, np.int64)
        top, ids = np.frombuffer(self.top_logprobs, np.float32), np.frombuffer(self.top_ids, np.int64)
        shape = len(ranks), len(ids) // len(ranks)
        top, ids = top.reshape(shape), ids.reshape(shape)
        found = zip(logprobs.tolist(), ranks.tolist(), ids.tolist(), top.tolist(), strict=True)
        return [TokenLogprobs(*each) for each in found]


class DraftUse(NamedTuple):
    """Drafts that steps of a sequence computed, and those of them that are among its tokens."""

    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


class SequenceTimes(msgspec.Struct, kw_only=True, array_like=True):
    """When things happened to a sequence, in seconds of the machine's monotonic clock; 0 for what has not. The turn of
    the scheduler that admitted it began at `matched`. Its prompt was `fetched` from a store or a peer in that time."""

    queued: float
    matched: float
    admitted: float
    launched: float = 0.0
    first_token: float = 0.0
    fetched: tuple[float, float] | None = None


class TokenOutput(msgspec.Struct, kw_only=True, omit_defaults=True):
    """New tokens of one sequence after one step, the cached tokens of its prompt, and the drafts of its steps so far.

    `finish_reason` is None while it runs, then "stop" (end-of-sequence or a stop token; `stop_token` says which),
    "length", "abort" or "error" (then `error` is the message and `status` the HTTP status). An `explanation` comes with
    the first output, which has no tokens. The last output of a turn says what its `session` holds. `prompt_logprobs`
    come before the first token, in order; so does what was `pooled` of the prompt, float32. The `times` come with the
    first token, if the engine is traced.
    """

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    use: CacheUse | None = None
    drafts: DraftUse | None = None
    finish_reason: str | None = None
    stop_token: int | None = None
    error: str = ""
    status: int = 500
    explanation: Explanation | None = None
    session: SessionGrant | None = None
    prompt_logprobs: PromptLogprobs | None = None
    pooled: bytes | None = None
    times: SequenceTimes | None = None


def output_of(request: Request, **more: Any) -> TokenOutput:
    """An output of a request with its counts of cached and drafted tokens, and `more` fields."""
    return TokenOutput(
        request_id=request.request_id,
        use=request.use if request.num_cached else None,
        drafts=DraftUse(request.num_drafted, request.num_accepted),
        session=request.grant,
        **more,
    )


class StepOutputs(msgspec.Struct):
    """The result of one step, for all sequences at once.

    `request_ids[i]` got the one token `token_ids[i]` and has nothing else to report: most sequences, in most steps.
    `noted` are those with more to report.
    """

    noted: list[TokenOutput] = []
    request_ids: list[str] = []
    token_ids: list[int] = []

    def __len__(self) -> int:
        return len(self.noted) + len(self.request_ids)

    def __iter__(self) -> Iterator[TokenOutput]:
        """All as single outputs, one by one."""
        yield from self.noted
        for request_id, token_id in zip(self.request_ids, self.token_ids, strict=True):
            yield TokenOutput(request_id=request_id, token_ids=[token_id])


@dataclass(frozen=True, slots=True, kw_only=True)
class Later(Generic[T]):
    """An answer that depends on storage. `poll(True)` returns it, or None while it may still improve; `poll(False)`,
    which is due at `until_s` of `time.monotonic`, returns it as it is. Both raise the error that prevents an answer."""

    poll: Callable[[bool], T | None]
    until_s: float


def prompt_bytes(token_ids: Any) -> bytes:
    """Token ids as the raw int32 bytes of `EngineRequest.prompt`. Raises InvalidInput for anything else."""
    try:
        array = np.asarray(token_ids) if len(token_ids) else np.empty(0, dtype=np.int32)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidInput("prompt_token_ids must be a list of integers.") from error
    if array.ndim != 1 or array.dtype.kind not in "iu" or (len(array) and not 0 <= array.min() <= array.max() < 2**31):
        raise InvalidInput("prompt_token_ids must be a flat list of non-negative 32-bit integers.")
    return array.astype(np.int32).tobytes()


class WireError(msgspec.Struct, kw_only=True):
    """A `QuireError` on its way to another process, where `rebuild` makes it an exception of the same class."""

    kind: str  # the name of its class in `quire.errors`; "" for an exception of another package, a defect
    message: str
    fix: str = ""
    details: str = ""  # the traceback, for the log
    numbers: dict[str, int | float] = {}  # its attributes that are numbers

    @classmethod
    def of(cls, error: BaseException) -> WireError:
        """The message form of a caught exception."""
        details = "".join(traceback.format_exception(error))
        if isinstance(error, QuireError):
            numbers = {name: value for name, value in vars(error).items() if isinstance(value, int | float)}
            kind = next(each.__name__ for each in type(error).__mro__ if each.__module__ == errors.__name__)
            return cls(kind=kind, message=error.message, fix=error.fix, details=details, numbers=numbers)
        return cls(
            kind="",
            message=f"{type(error).__name__} in the engine process: {error}",
            fix="this is a defect of Quire; its log shows where with --debug, please report it.",
            details=details,
        )

    def rebuild(self) -> QuireError:
        """The exception, of the class that was raised."""
        kind = getattr(errors, self.kind, QuireError) if self.kind else QuireError
        if issubclass(kind, MemoryError):  # classes whose instances only their own constructor makes
            found = QuireError(self.message, fix=self.fix)
            found.code, found.status, found.exit_code = kind.code, kind.status, kind.exit_code
            found.args = (str(found).replace(QuireError.code, kind.code, 1),)
            return found
        error: QuireError = kind.__new__(kind)
        vars(error).update(self.numbers)
        QuireError.__init__(error, self.message, fix=self.fix)
        if not self.kind:
            error.exit_code = EXIT_DEFECT
        return error


class Ask(msgspec.Struct, tag=True):
    """Command: call a method of the core (`VERBS`); the `Reply` of the same number answers it."""

    number: int
    verb: str
    arguments: msgspec.Raw


class Abort(msgspec.Struct, tag=True):
    """Command: end these sequences; unknown ids are ignored. With `stopped`, their text ended on a stop string."""

    request_ids: list[str]
    stopped: bool = False


class Shutdown(msgspec.Struct, tag=True):
    """Command: leave the loop now; running requests are dropped."""


class Ready(msgspec.Struct, tag=True):
    """Report: the engine is built and serves; a description of it. `facts` are statistics that never change, `metrics`
    what `/metrics` shows of its counters."""

    context_length: int
    eos_token_ids: list[int]
    counters: dict[str, Any]
    facts: dict[str, Any] = {}
    metrics: list[Metric] = []


class Touched(msgspec.Struct, tag=True):
    """Report, before `Ready`: touched bytes of host memory, and the total."""

    done: int
    total: int


class Outputs(msgspec.Struct, tag=True):
    """Report: the result of one step."""

    outputs: StepOutputs


class Beat(msgspec.Struct, tag=True):
    """Sent between steps. `progress` changes whenever the engine made progress since the last beat."""

    has_work: bool
    progress: int
    counters: dict[str, Any]


class Reply(msgspec.Struct, tag=True):
    """Report: the result of the method of an `Ask`, or its error; then nothing has changed, except for a flush, which
    continues."""

    number: int
    value: msgspec.Raw = msgspec.Raw(b"\xc0")  # None
    error: WireError | None = None


class Died(msgspec.Struct, tag=True):
    """Report: the engine could not be built, or an exception ended its loop; the process ends."""

    error: WireError


Command = Ask | Abort | Shutdown
Report = Ready | Touched | Outputs | Beat | Reply | Died

ENCODER = msgspec.msgpack.Encoder()
COMMAND_DECODER: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
REPORT_DECODER: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)


def encoded(arguments: tuple[object, ...]) -> msgspec.Raw:
    """Arguments of an `Ask`. Raises InvalidInput for values that cannot be sent: integers beyond 64 bits, lone
    surrogates, other types."""
    try:
        return msgspec.Raw(ENCODER.encode(arguments))
    except UnicodeEncodeError as error:
        names = (_field_with(argument, error.object) for argument in arguments)
        raise not_utf8(next(filter(None, names), "text"), error) from None
    except (ValueError, OverflowError, TypeError, RecursionError) as error:
        raise InvalidInput(f"the request cannot be sent to the engine: {error}.", fix="check its fields.") from error


def _field_with(value: object, text: str) -> str | None:
    """The name of the field with this text, of a struct or of one in it."""
    for name in getattr(value, "__struct_fields__", ()):
        found = getattr(value, name)
        if found == text or (isinstance(found, list) and text in found):
            return str(name)
        if inner := _field_with(found, text):
            return inner
    return None


def not_utf8(name: str, error: UnicodeEncodeError) -> InvalidInput:
    """The error for a text with lone surrogates."""
    return InvalidInput(f"{name} must be text without lone surrogates, got {error.object[:60]!r}.")
