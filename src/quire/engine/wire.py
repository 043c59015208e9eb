"""What an engine process and its owner say to each other: commands one way, reports the other, errors whole."""

from __future__ import annotations

import traceback
from typing import Any

import msgspec

from quire import errors
from quire.engine.messages import EngineRequest, RetainRequest, StepOutputs
from quire.errors import QuireError
from quire.observe.explain import Explanation
from quire.offload.flush import Flushed
from quire.offload.retention import Granted, RetainedList
from quire.spec.events import Namespace

EXIT_DEFECT = 1
"""Exit code of a failure that is no `QuireError`."""


class WireError(msgspec.Struct, kw_only=True):
    """A `QuireError` on its way to another process, where `rebuild` makes it an exception of the same class."""

    kind: str  # the name of its class; "" for an exception that is none of ours, a defect
    message: str
    fix: str = ""
    details: str = ""  # the traceback, for the log

    @classmethod
    def of(cls, error: BaseException) -> WireError:
        """The message form of an exception that was just caught."""
        details = "".join(traceback.format_exception(error))
        if isinstance(error, QuireError):
            return cls(kind=type(error).__name__, message=error.message, fix=error.fix, details=details)
        return cls(
            kind="",
            message=f"{type(error).__name__} in the engine process: {error}",
            fix="this is a defect of Quire; its log shows where with --debug, please report it.",
            details=details,
        )

    def rebuild(self) -> QuireError:
        """The exception, of the class that was raised."""
        kind = getattr(errors, self.kind, QuireError) if self.kind else QuireError
        if issubclass(kind, MemoryError):  # whose instances only their own constructor makes
            found = QuireError(self.message, fix=self.fix)
            found.code, found.status, found.exit_code = kind.code, kind.status, kind.exit_code
            found.args = (str(found).replace(QuireError.code, kind.code, 1),)
            return found
        error: QuireError = kind.__new__(kind)
        QuireError.__init__(error, self.message, fix=self.fix)
        if not self.kind:
            error.exit_code = EXIT_DEFECT
        return error


class Add(msgspec.Struct, tag=True):
    """Command: queue a sequence; answered by `Accepted` or `Refused`."""

    request: EngineRequest


class Abort(msgspec.Struct, tag=True):
    """Command: end these sequences; unknown ids are ignored. `stopped`: their text ended on a stop string."""

    request_ids: list[str]
    stopped: bool = False


class AskStatistics(msgspec.Struct, tag=True):
    """Command: answer with `Statistics` of the same `question`."""

    question: int


class AskExplanations(msgspec.Struct, tag=True):
    """Command: answer with `Explained` of the same `question`; a request's id or a sequence's."""

    question: int
    request_id: str


class AskRetain(msgspec.Struct, tag=True):
    """Command: keep a prefix; answered by `RetainAnswer` or `Declined` of the same `question`."""

    question: int
    request: RetainRequest


class AskRelease(msgspec.Struct, tag=True):
    """Command: keep it no longer; answered by `ReleaseAnswer` of the same `question`."""

    question: int
    retention_id: str


class AskRetained(msgspec.Struct, tag=True):
    """Command: answer with `RetainedAnswer` of the same `question`."""

    question: int


class AskFlush(msgspec.Struct, tag=True):
    """Command: forget a namespace, or everything where there is none; answered by `FlushAnswer` when storage has
    forgotten it or has taken note of that, else by `Declined`."""

    question: int
    namespace: Namespace | None


class AskEpoch(msgspec.Struct, tag=True):
    """Command: the weights were replaced, so often; answered by `FlushAnswer` or `Declined`."""

    question: int
    weights_epoch: int


class Shutdown(msgspec.Struct, tag=True):
    """Command: leave the loop now; what runs is dropped."""


class Ready(msgspec.Struct, tag=True):
    """Report: the engine is built and serves; what there is to know of it."""

    context_length: int
    eos_token_ids: list[int]
    statistics: dict[str, Any]


class Touched(msgspec.Struct, tag=True):
    """Report, before `Ready`: so many bytes of host memory are there, of so many that will be."""

    done: int
    total: int


class Failed(msgspec.Struct, tag=True):
    """Report: the engine could not be built; the process ends."""

    error: WireError


class Accepted(msgspec.Struct, tag=True):
    """Report: the sequence was queued."""

    request_id: str


class Refused(msgspec.Struct, tag=True):
    """Report: the sequence can never run, and nothing has changed."""

    request_id: str
    error: WireError


class Outputs(msgspec.Struct, tag=True):
    """Report: what one step brought."""

    outputs: StepOutputs


class Beat(msgspec.Struct, tag=True):
    """Sent between steps. `progress` changes whenever the engine got anywhere since the last beat."""

    has_work: bool
    progress: int
    statistics: dict[str, Any]


class Statistics(msgspec.Struct, tag=True):
    """Report: the answer to `AskStatistics`."""

    question: int
    statistics: dict[str, Any]


class Explained(msgspec.Struct, tag=True):
    """Report: the answer to `AskExplanations`, by sequence; and of how many sequences explanations are kept."""

    question: int
    explanations: dict[str, Explanation]
    kept: int


class RetainAnswer(msgspec.Struct, tag=True):
    """Report: the answer to `AskRetain`."""

    question: int
    granted: Granted


class ReleaseAnswer(msgspec.Struct, tag=True):
    """Report: the answer to `AskRelease`: whether there was something to release."""

    question: int
    released: bool


class RetainedAnswer(msgspec.Struct, tag=True):
    """Report: the answer to `AskRetained`."""

    question: int
    retained: RetainedList


class FlushAnswer(msgspec.Struct, tag=True):
    """Report: the answer to `AskFlush`, and to `AskEpoch`."""

    question: int
    flushed: Flushed


class Declined(msgspec.Struct, tag=True):
    """Report: a question that cannot be answered, and why; nothing has changed, but for a flush, which goes on."""

    question: int
    error: WireError


class Died(msgspec.Struct, tag=True):
    """Report: the loop ended by an exception; the process ends."""

    error: WireError


Command = (
    Add
    | Abort
    | AskStatistics
    | AskExplanations
    | AskRetain
    | AskRelease
    | AskRetained
    | AskFlush
    | AskEpoch
    | Shutdown
)
Answer = Statistics | Explained | RetainAnswer | ReleaseAnswer | RetainedAnswer | FlushAnswer | Declined
Report = Ready | Touched | Failed | Accepted | Refused | Outputs | Beat | Answer | Died

ENCODER = msgspec.msgpack.Encoder()
COMMAND_DECODER: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
REPORT_DECODER: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)


class _Identity(msgspec.Struct):
    request_id: str


class _AddIdentity(msgspec.Struct):
    """The part of `Add` that tells whose it is."""

    request: _Identity


_IDENTITY_DECODER = msgspec.msgpack.Decoder(_AddIdentity)


def request_id_of(message: bytes) -> str | None:
    """The request id of an `Add` that could not be decoded as a whole; None where there is none to be read."""
    try:
        return _IDENTITY_DECODER.decode(message).request.request_id
    except ValueError:  # msgspec's own errors are among them
        return None
