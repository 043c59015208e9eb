"""Where an engine listens for others, as a host and a port."""

from __future__ import annotations

from ipaddress import ip_address

Address = tuple[str, int]


def parse_address(address: str) -> Address:
    """`HOST:PORT`, or `[HOST]:PORT` if there are colons in HOST (IPv6). Raises ValueError."""
    host, _, port = address.strip().rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    if not host or not port.isdecimal() or int(port) >= 65536:
        raise ValueError(f"'{address}' is not HOST:PORT")
    return host, int(port)


def format_address(address: Address) -> str:
    """As `parse_address` reads it."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the host. No name is looked up: one other than localhost is not."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
