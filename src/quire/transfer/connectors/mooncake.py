"""MooncakeConnector: Mooncake's transfer engine over TCP, without a metadata server.

    pip install --no-deps mooncake-transfer-engine-non-cuda==0.3.13.post1; apt-get install libibverbs1

Two ports of the library listen on every address, whatever `host` and MC_TCP_BIND_ADDRESS are, and ask for no
credentials: any peer that reaches them, and has an address, can read and write the registered memory. So the registry
opens it only if it is told to.

Of more than 2,048 runs in flight to one peer the library refuses some, so one batch of up to 1,024 is in flight. A
batch has a thread, which waits for it: the calls that do not wait report a batch as complete before it is. A write to
a peer that has died fails after a second of attempts to connect. From a stopped peer the library disconnects after 30
seconds, and what that peer has received may still land: the write stays PENDING. `close` leaves threads of the library
behind.
"""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import Future
from typing import Any, Final

from quire.errors import ConnectorError
from quire.transfer.connector import Runs
from quire.transfer.connectors.one_sided import MemoryPlace, OneSided

_GIVES_UP_S: Final = 25.0  # a failure after so long may be the library's own patience, which proves nothing


class MooncakeConnector(OneSided):
    """The port over Mooncake's transfer engine."""

    kind = "mooncake"
    most_runs = 1024
    most_bytes = 64 << 20
    _engine: Any = None

    def _start(self) -> bytes:
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
        os.environ.setdefault("MC_TCP_BIND_ADDRESS", self._host)
        from mooncake.engine import TransferEngine

        self._engine = TransferEngine()
        code = self._engine.initialize(self._host, "P2PHANDSHAKE", "tcp", "")
        if code == 0:
            code = self._engine.register_memory(self._memory.ctypes.data, len(self._memory))
        if code != 0:
            raise ConnectorError(f"Mooncake's transfer engine does not start on {self._host}: code {code}.")
        return f"{self._host}:{self._engine.get_rpc_port()}".encode()

    def _attach(self, place: MemoryPlace) -> str:
        return place.how.decode(errors="replace")

    def _begin(self, remote: str, runs: Runs) -> Future[int]:
        future: Future[int] = Future()
        engine, batch, began = self._engine, runs.T.tolist(), time.monotonic()

        def write() -> None:
            code = engine.batch_transfer_sync_write(remote, *batch)
            if code == 0 or time.monotonic() - began < _GIVES_UP_S:
                future.set_result(code)

        threading.Thread(target=write, name="quire-mooncake-batch", daemon=True).start()
        return future

    def _has_ended(self, handle: Future[int]) -> bool:
        if handle.done() and handle.result() != 0:
            raise ConnectorError(f"the library reports {handle.result()}")
        return handle.done()

    def _stop(self) -> None:
        if self._engine is not None:
            self._engine.unregister_memory(self._memory.ctypes.data)
        self._engine = None
