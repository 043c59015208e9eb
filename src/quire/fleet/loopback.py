"""Keeps Ray on the loopback address, where the whole cluster is on one machine."""

from __future__ import annotations

import grpc
import grpc.aio
import ray

HOST = "127.0.0.1"
_ALL = "[::]"


def keep_on_loopback() -> None:
    """Replicas of Serve listen for each other on all interfaces, whatever the address of their node. Where that is the
    loopback address, this process does not. Call it in a replica's constructor: it listens after that."""
    if ray.util.get_node_ip_address() != HOST:
        return
    kind = type(grpc.aio.server())
    listen = kind.add_insecure_port

    def on_loopback(self: grpc.aio.Server, address: str) -> int:
        port: int = listen(self, address.replace(_ALL, HOST))
        return port

    kind.add_insecure_port = on_loopback
