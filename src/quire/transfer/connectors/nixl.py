"""NixlConnector: NVIDIA's transfer library over UCX, which copies between processes of one machine in one go.

    pip install --no-deps nixl-cu12==1.5.1        (or nixl-cu13; with its dependencies pip would replace torch)

Its progress thread is off, as it spins: this connector calls the library every 10 ms while tags are open, else every
50 ms, and more often while it writes. Batches are small, because on one machine the library copies within the call that
begins a transfer. Close the connector before the process ends, and never fork a process that has one.

With `host` on loopback the ports of UCX bind there: the first connector sets UCX_NET_DEVICES=lo for its process,
whatever it was. On another host UCX chooses, unless UCX_NET_DEVICES is set. The ports ask for no credentials: a peer
that reaches one and has an address can write to the registered memory. So the registry opens another host only if it is
told to. Between processes of one machine and user the library writes with the rights of that user.

Over UCX's TCP, bytes that this machine received from a peer that died since can land when the library is next called.
They are in records that were not complete, which their digests show.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

import numpy as np

from quire.errors import ConnectorError
from quire.transfer.address import is_loopback
from quire.transfer.connector import Runs
from quire.transfer.connectors.one_sided import MemoryPlace, OneSided

_PACKAGES: Final = ("nixl_cu12", "nixl_cu13")


class NixlConnector(OneSided):
    """The port over NIXL."""

    kind = "nixl"
    most_runs = 4096
    most_bytes = 8 << 20  # copied while `_begin` runs
    listens_s = 0.01
    _agent: Any = None
    _registered: Any = None

    def _start(self) -> bytes:
        os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")  # errors are those of writes
        os.environ.setdefault("UCX_LOG_LEVEL", "error")
        if is_loopback(self._host):
            os.environ["UCX_NET_DEVICES"] = "lo"
        package = next((name for name in _PACKAGES if find_spec(name)), _PACKAGES[0])
        api, bindings = import_module(f"{package}._api"), import_module(f"{package}._bindings")
        self._errors = tuple(
            each for each in vars(bindings).values() if isinstance(each, type) and issubclass(each, Exception)
        )
        try:
            self._agent = api.nixl_agent(self._name, api.nixl_agent_config(enable_prog_thread=False))
            self._registered = self._agent.register_memory(
                np.array([[self._memory.ctypes.data, len(self._memory), 0]], np.uint64), "DRAM"
            )
            how: bytes = self._agent.get_agent_metadata()
        except self._errors as error:
            raise ConnectorError(f"NIXL cannot start: {error}.") from error
        return how

    def _attach(self, place: MemoryPlace) -> str:
        try:
            found: bytes = self._agent.add_remote_agent(place.how)
        except self._errors as error:
            raise ConnectorError(f"NIXL refuses the address of '{place.name}': {error}.") from error
        return found.decode()

    def _begin(self, remote: str, runs: Runs) -> Any:
        descriptors = np.zeros((2, len(runs), 3), np.uint64)
        descriptors[:, :, 0] = runs[:, :2].T
        descriptors[:, :, 1] = runs[:, 2]
        try:
            here, there = (self._agent.get_xfer_descs(each, "DRAM") for each in descriptors)
            handle = self._agent.initialize_xfer("WRITE", here, there, remote)
        except self._errors as error:
            raise ConnectorError(str(error)) from error
        self._state(handle, self._agent.transfer)
        return handle

    def _has_ended(self, handle: Any) -> bool:
        if self._state(handle, self._agent.check_xfer_state) == "PROC":
            return False
        self._agent.release_xfer_handle(handle)
        return True

    def _state(self, handle: Any, call: Callable[[Any], str]) -> str:
        try:
            state = call(handle)
            if state != "ERR":
                return state
            reason = "NIXL reports no reason"
        except self._errors as error:
            reason = str(error)
        with suppress(*self._errors):
            self._agent.release_xfer_handle(handle)
        raise ConnectorError(reason)

    def _listen(self) -> None:
        if self._agent is not None:
            with suppress(*self._errors):
                self._agent.get_new_notifs()

    def _detach(self, remote: str) -> None:
        with suppress(*self._errors):
            self._agent.remove_remote_agent(remote)

    def _stop(self) -> None:
        if self._registered is not None:
            self._agent.deregister_memory(self._registered)
        self._agent = self._registered = None
