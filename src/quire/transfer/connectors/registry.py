"""Connectors by name, imported on demand."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from quire.errors import ConnectorError, InvalidInput
from quire.transfer.address import is_loopback

if TYPE_CHECKING:
    from quire.transfer.connector import Connector, Memory

_CONNECTORS: Final[dict[str, tuple[str, str]]] = {
    "nixl": ("NixlConnector", "pip install --no-deps nixl-cu12==1.5.1"),
    "tcp": ("TcpConnector", ""),
    "mooncake": (
        "MooncakeConnector",
        "pip install --no-deps mooncake-transfer-engine-non-cuda==0.3.13.post1; apt-get install libibverbs1",
    ),
}
"""Connectors by name, which is that of a module: its class, and the command that installs its library."""


_UNAUTHENTICATED: Final = {"nixl": "", "mooncake": "every address"}
"""Connectors whose ports ask for no credentials: where they listen, if that is not the host that is given."""


def connector_kind(kind: str, host: str = "127.0.0.1", *, unauthenticated: bool = False) -> str:
    """The name of a connector whose pages arrive at `host`. Of `auto`: nixl, where it is installed and the host is on
    loopback, else tcp. Raises InvalidInput; also, unless told `unauthenticated`, for one that other machines reach and
    that asks them for no credentials."""
    if kind == "auto":
        installed = find_spec("nixl_cu12") or find_spec("nixl_cu13")
        return "nixl" if installed and is_loopback(host) else "tcp"
    if kind not in _CONNECTORS:
        raise InvalidInput(f"there is no connector '{kind}'.", fix=f"use auto, or one of {', '.join(_CONNECTORS)}.")
    where = _UNAUTHENTICATED.get(kind)
    if where is not None and (where or not is_loopback(host)) and not unauthenticated:
        raise InvalidInput(
            f"connector '{kind}' listens on {where or host} and asks for no credentials: all who reach its ports can "
            "write to the cached pages of all clients.",
            fix="use --transfer-connector tcp, or, behind a firewall, add --transfer-unauthenticated.",
        )
    return kind


def open_connector(
    kind: str,
    memory: Memory,
    *,
    name: str,
    secret: bytes = b"",
    host: str = "127.0.0.1",
    unauthenticated: bool = False,
) -> Connector:
    """Open a connector, named as in `connector_kind`; the caller closes it, and keeps `memory` until then. Its peers
    call it by `name`, which is of this process alone. Only tcp uses the secret. Ports bind to `host` where the library
    allows.

    Raises InvalidInput as `connector_kind`, and ConnectorError for a library that is not installed or does not start.
    """
    kind = connector_kind(kind, host, unauthenticated=unauthenticated)
    made, install = _CONNECTORS[kind]
    try:
        connector: Connector = getattr(import_module(f"quire.transfer.connectors.{kind}"), made)(
            memory, name=name, secret=secret, host=host
        )
    except ImportError as error:
        raise ConnectorError(
            f"connector '{kind}' needs a library that cannot be imported: {error}.", fix=f"{install}."
        ) from error
    return connector
