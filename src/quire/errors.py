"""The errors that Quire raises.

An error says what failed, what was needed and available in the user's unit, what holds the rest, and a change that
would work. It has a code to search for. It is raised before anything has changed. A broken invariant of Quire's own is
an `AssertionError`, never one of these.
"""

from __future__ import annotations

import json
import signal
from typing import ClassVar


class QuireError(Exception):
    """Base of all errors of Quire.

    `code` is stable; `status` is the HTTP status of a server's answer; `exit_code` is that of the command line (2: does
    not fit or bad input, 3: refused combination, 4: integrity).
    """

    code = "QUIRE-00"
    status = 500
    exit_code = 2

    def __init__(self, message: str, *, fix: str = "") -> None:
        self.message = message
        self.fix = fix
        super().__init__(f"{self.code}: {message}" + (f" Fix: {fix}" if fix else ""))

    def to_json(self) -> str:
        """What a command with --json ends with; `start_error` reads it."""
        told = {"message": self.message, "fix": self.fix, "code": self.code, "exit_code": self.exit_code}
        return json.dumps({"error": told})


class InvalidInput(QuireError, ValueError):
    """A setting, request body, file or argument that cannot be understood or is out of range."""

    code = "QUIRE-INPUT-01"
    status = 400


class RefusedCombination(InvalidInput):
    """Settings that are valid one by one, and that this version does not run together."""

    code = "QUIRE-INPUT-02"
    exit_code = 3


class ContextTooLong(InvalidInput):
    """A request longer than the model's context, whatever the memory. It has `tokens`, prompt and output together, or
    more, and the model has a `context` of fewer."""

    code = "QUIRE-CONTEXT-01"

    def __init__(self, message: str, *, tokens: int, context: int, fix: str = "") -> None:
        self.tokens = tokens
        self.context = context
        super().__init__(message, fix=fix)


class RequestTooLarge(InvalidInput):
    """A request that this server's KV memory can never hold, even alone."""

    code = "QUIRE-FIT-02"
    status = 413


class PlanError(QuireError, ValueError):
    """A budget in which the pools cannot be built; raised before anything is allocated."""

    code = "QUIRE-PLAN-01"
    status = 400


class OutOfPages(QuireError, MemoryError):
    """An allocation that does not fit now. Nothing was changed.

    `wanted`, `free` and `evictable` are pages of `group`. Even if all evictable pages were evicted, running requests
    would have to free `wanted - free - evictable` more.
    """

    code = "QUIRE-PAGES-01"
    status = 503

    def __init__(self, *, group: str, wanted: int, free: int, evictable: int = 0, held_by: str = "") -> None:
        self.group = group
        self.wanted = wanted
        self.free = free
        self.evictable = evictable
        holder = f"; {held_by}" if held_by else ""
        if group == "rows":
            what = f"a request needs a row, and none is free{holder}."
            fix = "wait for a running request to finish, or plan for more requests (max_requests)."
        else:
            what = f"group '{group}' needs {wanted} pages and has {free} free and {evictable} evictable{holder}."
            fix = "wait for a running request to finish, lower the concurrency, or raise the KV memory."
        super().__init__(what, fix=fix)


class InvalidFree(QuireError, ValueError):
    """A free of ids that are not allocated: twice, of the padding id, or outside the pool. Nothing was changed."""

    code = "QUIRE-PAGES-02"
    exit_code = 4


class MissingFrame(QuireError, RuntimeError):
    """A page that a step reads has no frame in a group. Without this error the step would read the padding frame."""

    code = "QUIRE-PAGES-03"
    exit_code = 4


class LeaseError(QuireError, RuntimeError):
    """A lease, hold or request that is used after its release."""

    code = "QUIRE-LEASE-01"
    exit_code = 4


class LayoutMismatch(QuireError, ValueError):
    """Bytes of another layout than the one in use."""

    code = "QUIRE-LAYOUT-01"
    exit_code = 3


class UnsupportedModel(QuireError):
    """An architecture that Quire cannot run, with the reason. Raised at load, never later."""

    code = "QUIRE-MODEL-01"
    status = 400
    exit_code = 3


class ModelLoadError(QuireError):
    """Weights, configuration or tokenizer that could not be read."""

    code = "QUIRE-MODEL-02"


class ModelCheckFailed(QuireError):
    """The loaded model does not give the same logits on Quire's pools as its own forward pass. It is not served."""

    code = "QUIRE-MODEL-03"
    exit_code = 4


class AddressInUse(QuireError, OSError):
    """The server's address is in use."""

    code = "QUIRE-SERVE-01"


class NoServer(QuireError):
    """A router without a server that could answer, or could go on with an answer."""

    code = "QUIRE-SERVE-02"
    status = 503


class UnknownModel(InvalidInput):
    """A request for a model that this server does not serve."""

    code = "QUIRE-MODEL-04"
    status = 404


class UnknownRequest(InvalidInput):
    """A question about a request that is unknown, or was removed from the record."""

    code = "QUIRE-REQUEST-01"
    status = 404


class UnknownThread(InvalidInput):
    """A conversation that the server does not have. Clients of Anthropic's API send it whole when they see it."""

    code = "QUIRE-REQUEST-02"
    status = 404
    details: ClassVar[dict[str, str]] = {"error_code": "thread_not_found"}


class UnknownRoute(InvalidInput):
    """A path or method that no route of this server has."""

    code = "QUIRE-SERVE-05"
    status = 404


class WrongKey(InvalidInput):
    """A request without the server's API key."""

    code = "QUIRE-AUTH-01"
    status = 401


class NotAllowed(InvalidInput):
    """A request with a key that may not do this."""

    code = "QUIRE-AUTH-02"
    status = 403


class TooSlow(InvalidInput):
    """A request that was not sent, or not answered, by its deadline."""

    code = "QUIRE-SERVE-04"
    status = 408


class Overloaded(QuireError):
    """More requests than the server takes at once. It may succeed after `retry_after_s`."""

    code = "QUIRE-SERVE-03"
    status = 429

    def __init__(self, message: str, *, retry_after_s: float = 1.0, fix: str = "") -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message, fix=fix or f"send the request again in {retry_after_s:.0f} s.")


class HeaderTooLarge(InvalidInput):
    """Headers longer than the server reads."""

    code = "QUIRE-BODY-02"
    status = 431


class BodyTooLarge(InvalidInput):
    """A request body larger than the server reads."""

    code = "QUIRE-BODY-01"
    status = 413


class GrammarNotTried(QuireError):
    """A grammar could not be compiled now, for a reason that is not the grammar's."""

    code = "QUIRE-GRAMMAR-01"
    status = 503


class StepFailed(QuireError, RuntimeError):
    """A step of the engine failed, for example for lack of device memory. Its requests end, and the engine
    continues."""

    code = "QUIRE-ENGINE-02"


class EngineDead(QuireError, RuntimeError):
    """The engine process has ended; no request can progress. With `retry_after_s` another one starts. A request that
    was not `was_received` had no part in it. The `detail` is the operator's: it may be of another client's request."""

    code = "QUIRE-ENGINE-01"
    status = 503
    retry_after_s: float | None = None
    was_received: bool = True
    detail: str = ""


class AuditFailure(QuireError):
    """An invariant of the cache is broken. The message names the invariant, the group and the pages."""

    code = "QUIRE-AUDIT-01"
    exit_code = 4


class WrongContent(QuireError):
    """A step of a simulated device read a page with wrong contents: missing, short, stale or foreign."""

    code = "QUIRE-AUDIT-02"
    exit_code = 4


class StoreError(QuireError):
    """A store that cannot be opened or listed, or that took no tombstone of a flush."""

    code = "QUIRE-STORE-01"
    status = 503


class ConnectorError(QuireError):
    """A connector that cannot start, or an address or target that it refuses."""

    code = "QUIRE-TRANSFER-01"
    status = 503


class HostMemoryError(QuireError):
    """Requested host memory that the machine does not have. Raised before the engine is ready, never later."""

    code = "QUIRE-HOST-01"
    status = 503


class MoveFailed(QuireError, RuntimeError):
    """A transfer that a step waits for failed: its records are damaged, or the copy failed."""

    code = "QUIRE-MOVE-01"


class PeerRefused(QuireError):
    """An engine whose pages are not valid here, or that does not have the role that is needed. `field` names the
    difference; `mine` and `theirs` are its values."""

    code = "QUIRE-PEER-01"
    exit_code = 3

    def __init__(self, field: str, mine: object, theirs: object, *, fix: str) -> None:
        self.field = field
        self.mine = mine
        self.theirs = theirs
        super().__init__(f"the peer's {field} is {theirs!r}, and this engine's is {mine!r}.", fix=fix)


def start_error(log: str, exit_code: int) -> QuireError:
    """The error that a process of `quire ... --json` ended with, by its log."""
    if exit_code < 0:
        why = f"the server was killed by signal {-exit_code} before it was ready."
        unasked = "memory ran out: lower --kv-memory" if -exit_code == signal.SIGKILL else "its log says more"
        return QuireError(why, fix=f"unless an operator killed it, {unasked}.")
    said = log.strip().splitlines()[-1:] or [f"the server ended with code {exit_code} and no message."]
    try:
        found = json.loads(said[0])["error"]
    except (ValueError, KeyError, TypeError):
        found = {"message": said[0]}
    error = QuireError(found["message"], fix=found.get("fix", ""))
    error.code, error.exit_code = found.get("code", error.code), max(exit_code, 1)
    return error
