"""ServerConfig: where a server listens, which clients may use it, and how it stops. Nothing here loads the server."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import field_validator

from quire.errors import InvalidInput
from quire.serve.keys import Keys, read_keys, readable
from quire.settings.setting import Bytes, Settings, setting

_GROUP = "Server"

MOST_BODY_BYTES = 32 << 20
BODY_BYTES_PER_TOKEN = 64
LEAST_BODY_BYTES = 4 << 20


class KeyField(Settings):
    """The key between a server and its clients."""

    GROUP: ClassVar[str] = _GROUP

    ENVIRONMENT: ClassVar[bool] = True

    api_key: str | None = setting(None, "Key that clients of /v1 must send.", secret=True)


class ServerConfig(KeyField):
    """Settings of one server, beside those of its engine. `read` refuses a key that no client could send."""

    GROUP: ClassVar[str] = _GROUP

    ENVIRONMENT: ClassVar[bool] = True

    host: str = setting("127.0.0.1", "Address to listen on.")
    port: int = setting(8000, "Port; 0 takes a free one.", ge=0, le=65535)
    api_keys: Path | None = setting(
        None, "File with a line `name key` for each client. Each has cached pages of its own.", option="--api-keys"
    )
    admin_key: str | None = setting(
        None,
        "Key of the operator, for /metrics and the routes that see or change the whole cache.",
        otherwise="--api-key, if there are no --api-keys",
        secret=True,
    )
    share_cache: bool = setting(
        False,
        "Clients of --api-keys share cached pages: one can find out by the time of an answer what others have sent.",
    )
    max_queue: int = setting(
        1024, "Sequences that may wait beside those that can run; then 429, with the time to come again.", ge=0
    )
    request_timeout_s: float | None = setting(
        None,
        "Seconds in which a request must be answered whole.",
        option="--request-timeout",
        otherwise="its own timeout_s",
        gt=0,
    )
    retain_marked: bool = setting(
        False,
        "Prompts with cache_control are retained for its ttl after their answer, within the budget of retentions.",
    )
    kept_texts: Bytes | None = setting(
        None,
        "Bytes of the last prompts' tokens to keep, whose texts the page shows to the admin key: 16MiB.",
        otherwise="no text is kept",
        gt=0,
    )
    max_restarts: int = setting(3, "How often an engine that dies is started again within ten minutes.", ge=0)
    max_connections: int = setting(2048, "Connections that may be open.", ge=1, le=2**31 - 1)
    max_body: Bytes | None = setting(
        None, "Bytes of a request's body.", otherwise="64 for each token of the context, 4 to 32 MiB", ge=1024
    )
    read_timeout_s: float = setting(
        30.0, "Seconds in which a client must send a request, and more for a large body.", option="--read-timeout", gt=0
    )
    cors_origins: str | None = setting(None, "Origins whose pages may call the server, separated by commas; * is any.")
    drain_s: float = setting(30.0, "Seconds that open requests get to finish at the end.", option="--drain", ge=0)
    stall_after_s: float = setting(
        120.0, "Seconds without progress after which /health fails.", option="--stall-after", ge=0.1
    )
    until_eof: bool = setting(
        False,
        "End when the standard input does, which is with the process that started this one.",
        option="--until-eof",
    )
    router_secret: str | None = setting(
        None,
        "Secret of a router. One that sends it is told what another server needs to continue an answer.",
        secret=True,
    )
    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "warning", "What is logged on the standard error stream: {choices}."
    )

    @property
    def origins(self) -> list[str]:
        """The origins, one by one."""
        return [name for origin in (self.cors_origins or "").split(",") if (name := origin.strip())]

    def keys(self) -> Keys:
        """Those that clients may send. Raises InvalidInput if the file has none that can be used, or if an admin key is
        missing."""
        if self.kept_texts is not None and self.admin_key is None:
            raise InvalidInput("texts of prompts are for the admin key alone.", fix="add --admin-key.")
        named = None if self.api_keys is None else read_keys(self.api_keys)
        return Keys(self.api_key, named=named, admin_key=self.admin_key, share_cache=self.share_cache)

    def body_bytes(self, context_length: int) -> int:
        """The most bytes of a body, for a model of that context."""
        if self.max_body is not None:
            return self.max_body
        return min(max(LEAST_BODY_BYTES, BODY_BYTES_PER_TOKEN * context_length), MOST_BODY_BYTES)

    @field_validator("api_key", "admin_key")
    @classmethod
    def _sendable(cls, key: str | None) -> str | None:
        return None if key is None else readable(key)
