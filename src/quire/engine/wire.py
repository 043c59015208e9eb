"""What an engine process and its owner say to each other: commands one way, reports the other, errors whole."""

from __future__ import annotations

import traceback
from typing import Any

import msgspec

from quire import errors
from quire.engine.messages import StepOutputs
from quire.errors import QuireError

EXIT_DEFECT = 1
"""Exit code of a failure that is no `QuireError`."""

NOTHING = msgspec.Raw(msgspec.msgpack.encode(None))


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


class Ask(msgspec.Struct, tag=True):
    """Command: call a verb of the core (`VERBS`); answered by the `Reply` of the same number."""

    number: int
    verb: str
    arguments: msgspec.Raw


class Abort(msgspec.Struct, tag=True):
    """Command: end these sequences; unknown ids are ignored. `stopped`: their text ended on a stop string."""

    request_ids: list[str]
    stopped: bool = False


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


class Outputs(msgspec.Struct, tag=True):
    """Report: what one step brought."""

    outputs: StepOutputs


class Beat(msgspec.Struct, tag=True):
    """Sent between steps. `progress` changes whenever the engine got anywhere since the last beat."""

    has_work: bool
    progress: int
    statistics: dict[str, Any]


class Reply(msgspec.Struct, tag=True):
    """Report: what the verb of an `Ask` returned, or why it did not; then nothing has changed, but for a flush, which
    goes on."""

    number: int
    value: msgspec.Raw = NOTHING
    error: WireError | None = None


class Died(msgspec.Struct, tag=True):
    """Report: the engine could not be built, or its loop ended by an exception; the process ends."""

    error: WireError


Command = Ask | Abort | Shutdown
Report = Ready | Touched | Outputs | Beat | Reply | Died

ENCODER = msgspec.msgpack.Encoder()
COMMAND_DECODER: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
REPORT_DECODER: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)
