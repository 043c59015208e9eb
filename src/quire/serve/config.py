"""ServerConfig: where a server listens, which clients may use it, and how it stops. Nothing here loads the server."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import field_validator

from quire.engine.setting import Settings, setting
from quire.errors import InvalidInput

_GROUP = "Server"


class ServerConfig(Settings):
    """Settings of one server, beside those of its engine. `read` refuses a key that no client could send."""

    ENVIRONMENT: ClassVar[bool] = True

    host: str = setting("127.0.0.1", "Address to listen on.", group=_GROUP)
    port: int = setting(8000, "Port; 0 takes a free one.", group=_GROUP, ge=0, le=65535)
    api_key: str | None = setting(None, "Key that clients of /v1 must send.", group=_GROUP, secret=True)
    cors_origins: str | None = setting(
        None, "Origins whose pages may call the server, separated by commas; * is any.", group=_GROUP
    )
    drain_s: float = setting(
        30.0, "Seconds that open requests get to finish at the end.", group=_GROUP, option="--drain", ge=0
    )
    stall_after_s: float = setting(
        120.0, "Seconds without progress after which /health fails.", group=_GROUP, option="--stall-after", ge=0.1
    )
    until_eof: bool = setting(
        False,
        "End when the standard input does, which is with the process that started this one.",
        group=_GROUP,
        option="--until-eof",
    )
    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "warning", "What is logged on the standard error stream: {choices}.", group=_GROUP
    )

    @property
    def origins(self) -> list[str]:
        """The origins, one by one."""
        return [name for origin in (self.cors_origins or "").split(",") if (name := origin.strip())]

    @field_validator("api_key")
    @classmethod
    def _sendable(cls, key: str | None) -> str | None:
        if key is not None and (not key.strip() or not key.isprintable()):
            raise InvalidInput("the API key is empty or not printable.", fix="give a key, or leave --api-key out.")
        if key is not None and key != key.strip():
            raise InvalidInput("the API key begins or ends with a space, which HTTP drops.", fix="leave the space out.")
        return key
