"""Messages between an engine process and its owner: commands one way, reports the other, errors whole."""

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

    kind: str  # the name of its class; "" for an exception of another package, a defect
    message: str
    fix: str = ""
    details: str = ""  # the traceback, for the log

    @classmethod
    def of(cls, error: BaseException) -> WireError:
        """The message form of a caught exception."""
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
        if issubclass(kind, MemoryError):  # classes whose instances only their own constructor makes
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
    """Report: the engine is built and serves; a description of it."""

    context_length: int
    eos_token_ids: list[int]
    statistics: dict[str, Any]


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
    statistics: dict[str, Any]


class Reply(msgspec.Struct, tag=True):
    """Report: the result of the method of an `Ask`, or its error; then nothing has changed, except for a flush, which
    continues."""

    number: int
    value: msgspec.Raw = NOTHING
    error: WireError | None = None


class Died(msgspec.Struct, tag=True):
    """Report: the engine could not be built, or an exception ended its loop; the process ends."""

    error: WireError


Command = Ask | Abort | Shutdown
Report = Ready | Touched | Outputs | Beat | Reply | Died

ENCODER = msgspec.msgpack.Encoder()
COMMAND_DECODER: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
REPORT_DECODER: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)
