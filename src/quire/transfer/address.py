"""Where an engine listens for others, as a host and a port."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_address

from quire.errors import InvalidInput

Address = tuple[str, int]


def parse_address(address: str) -> Address:
    """`HOST:PORT`, or `[HOST]:PORT` if there are colons in HOST (IPv6). Raises InvalidInput."""
    host, _, port = address.strip().rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    if not host or not port.isdecimal() or int(port) >= 65536:
        raise InvalidInput(f"'{address}' is not HOST:PORT.", fix="use HOST:PORT, as in 127.0.0.1:8998 or [::1]:8998.")
    return host, int(port)


def parse_peers(peers: Sequence[str]) -> list[Address]:
    """Addresses of other engines, in order. Raises InvalidInput, also for port 0 and for an address that is there
    twice."""
    found = [parse_address(peer) for peer in peers]
    for at, address in enumerate(found):
        if not address[1]:
            raise InvalidInput(f"nothing listens at port 0, as '{peers[at]}' has it.", fix="give the port of the peer.")
        if address in found[:at]:
            raise InvalidInput(f"'{peers[at]}' is given twice.", fix="name each peer once.")
    return found


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
