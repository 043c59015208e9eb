"""Connectors by name, imported on demand."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Final

from quire.errors import ConnectorError, InvalidInput
from quire.transfer.connector import Connector
from quire.transfer.spans import Memory

_CONNECTORS: Final[dict[str, tuple[str, str]]] = {
    "nixl": ("NixlConnector", "pip install --no-deps nixl-cu12==1.5.1"),
    "tcp": ("TcpConnector", ""),
    "mooncake": (
        "MooncakeConnector",
        "pip install --no-deps mooncake-transfer-engine-non-cuda==0.3.13.post1; apt-get install libibverbs1",
    ),
    "memory": ("MemoryConnector", ""),
}
"""By name, which is that of a module: its class, and the command that installs its library."""


def connector_kind(kind: str) -> str:
    """The name of a connector; that of `auto` is nixl where it is installed, else tcp. Raises InvalidInput."""
    if kind == "auto":
        return "nixl" if find_spec("nixl_cu12") or find_spec("nixl_cu13") else "tcp"
    if kind not in _CONNECTORS:
        raise InvalidInput(f"there is no connector '{kind}'.", fix=f"use auto, or one of {', '.join(_CONNECTORS)}.")
    return kind


def open_connector(kind: str, memory: Memory, *, name: str, secret: bytes = b"", host: str = "127.0.0.1") -> Connector:
    """Open a connector by its kind or as `auto`; the caller closes it, and keeps `memory` until then. Its peers know it
    by `name`, which is of this process alone. Only tcp uses the secret. Ports bind to `host` where the library allows.

    Raises InvalidInput for an unknown kind, ConnectorError for a library that is not installed or does not start.
    """
    kind = connector_kind(kind)
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
