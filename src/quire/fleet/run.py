"""Runs a fleet in the foreground: a Ray cluster of its own on this machine, or a part of one that runs.

    take the port -> start Ray or connect to it -> deploy -> all engines ready -> signal -> requests finish -> exit

The cluster of its own is on the loopback address, has a secret of its own, and ends with this process, however that
ends. In another cluster the fleet is one application, and this process removes it at its end.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import os
import re
import secrets
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import httpx

from quire.engine.cores import available_cores
from quire.errors import InvalidInput, NoServer, QuireError, start_error
from quire.fleet.config import FleetConfig, RayConfig
from quire.fleet.deployments import APPLICATION
from quire.serve.config import ServerConfig
from quire.serve.server import bind, url_of
from quire.transfer.address import parse_address

FIRST_RAY, NO_RAY = (2, 60), (2, 61)
"""The releases that were tested: from the one, and before the other."""

_POLL_S = 0.3
_CONNECT_S = 5.0
_ANSWER_S = 60.0
_PROXY_S = 20.0  # that a proxy takes to start
_LOCAL = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # on every system: nodes have the loopback address, and listen there
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
}

OnReady = Callable[[list[dict[str, Any]]], None]
"""Is called with a row for each engine, and one with the address of the fleet, when requests are answered."""

Progress = Callable[[str], None]
"""Is called with what a start waits for."""


class _Ended(BaseException):
    """A signal has come."""

    def __init__(self, number: int) -> None:
        self.number = number


def check_ray() -> None:
    """Raises InvalidInput unless Ray is installed in a release of the range."""
    fix = "pip install 'quire-kv[fleet]'."
    try:
        found = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        raise InvalidInput("quire fleet needs Ray, which is not installed.", fix=fix) from None
    if not FIRST_RAY <= tuple(map(int, found.split(".")[:2])) < NO_RAY:
        first, no = (".".join(map(str, each)) for each in (FIRST_RAY, NO_RAY))
        raise InvalidInput(f"the fleet runs on Ray from {first} and before {no}, and {found} is installed.", fix=fix)


def run_fleet(
    fleet: FleetConfig, server: ServerConfig, ray_settings: RayConfig, *, on_ready: OnReady, on_progress: Progress
) -> int:
    """Run until SIGINT or SIGTERM. Returns the exit code: 0, or 130 or 143 for a signal before all is ready. Raises the
    errors of a start. A second signal ends everything at once."""
    check_ray()
    server.keys()
    is_ready = False

    def ready(rows: list[dict[str, Any]]) -> None:
        nonlocal is_ready
        is_ready = True
        on_ready(rows)

    def end(number: int, _: FrameType | None) -> None:
        raise _Ended(number)

    try:
        with contextlib.ExitStack() as stack:
            for number in (signal.SIGINT, signal.SIGTERM):
                stack.callback(signal.signal, number, signal.signal(number, end))
            if server.until_eof:
                threading.Thread(target=_end_with_input, daemon=True).start()
            port = server.port
            if ray_settings.address is None:
                listener = bind(server.host, server.port)
                port = listener.getsockname()[1]
                url = url_of(listener)
                listener.close()
                fleet = _on_this_machine(fleet)
                stack.enter_context(_own_cluster(fleet, end))
            else:
                url = f"http://{server.host}:{port}"
                stack.enter_context(_joined(ray_settings.address, end))
                fleet = fleet.changed(ingresses=fleet.ingresses or _num_machines())
            _run(fleet, server.changed(port=port), url, ray_settings.address is None, ready, on_progress)
    except _Ended as ended:
        return 0 if is_ready else 128 + ended.number
    return 0


def _end_with_input() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _on_this_machine(fleet: FleetConfig) -> FleetConfig:
    """With this machine's cores for all engines together. Raises InvalidInput."""
    if fleet.ingresses is not None:
        raise InvalidInput("--ingresses does nothing without --address or --yaml.", fix="leave it out.")
    if fleet.num_cpus is None:
        return fleet.changed(num_cpus=float(max(1, available_cores() // fleet.most_engines)))
    return fleet


@contextlib.contextmanager
def _own_cluster(fleet: FleetConfig, end: Callable[..., None]) -> Iterator[None]:
    """Ray on the loopback address; ended at the end, with all processes."""
    with tempfile.TemporaryDirectory(prefix="quire-", ignore_cleanup_errors=True) as folder:
        os.environ.update({"RAY_TMPDIR": folder, "RAY_AUTH_TOKEN": secrets.token_hex(32)} | _LOCAL)
        import ray

        cores = max(available_cores(), int(fleet.cpus * fleet.most_engines) + 1)
        try:
            ray.init(
                address="local", num_cpus=cores, include_dashboard=False, log_to_driver=False, logging_level="error"
            )
            _refuse_gpus(fleet, ray.cluster_resources().get("GPU", 0))
            _hear(end)
            yield
        finally:
            _hear(signal.SIG_IGN)
            ray.shutdown()


def _refuse_gpus(fleet: FleetConfig, num_gpus: float) -> None:
    needed = fleet.gpus * fleet.most_engines
    if needed > num_gpus:
        raise InvalidInput(
            f"{fleet.most_engines} engines need {needed:g} GPUs, and this machine has {num_gpus:g}.",
            fix="give fewer engines, or --num-gpus 0.5 for two on one GPU.",
        )


def _hear(end: Callable[..., None] | signal.Handlers) -> None:
    """Signals go there, and not to the handlers that Ray has put in place."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)


@contextlib.contextmanager
def _joined(address: str, end: Callable[..., None]) -> Iterator[None]:
    """A Ray cluster that runs, which goes on at the end."""
    import ray

    try:
        if address != "auto":
            _reach(address)
        ray.init(address=address, log_to_driver=False, logging_level="error")
    except (OSError, ValueError, RuntimeError) as error:
        said = str(error).strip().splitlines()
        raise NoServer(
            f"no Ray cluster answers at '{address}': {said[0] if said else type(error).__name__}.",
            fix="give HOST:PORT of its head as `ray start` prints it, on a machine of the cluster.",
        ) from None
    try:
        _hear(end)
        yield
    finally:
        _hear(signal.SIG_IGN)
        ray.shutdown()


def _reach(address: str) -> None:
    """Ray itself would try for minutes, also to speak with a server of another kind. Raises OSError or ValueError."""
    import grpc

    socket.create_connection(parse_address(address), _CONNECT_S).close()
    if os.environ.get("RAY_USE_TLS", "0") == "0":
        with grpc.insecure_channel(address) as channel, contextlib.suppress(grpc.FutureTimeoutError):
            grpc.channel_ready_future(channel).result(_CONNECT_S)
            return
        raise ConnectionError("what listens there is not Ray")


def _num_machines() -> int:
    import ray

    return sum(node["Alive"] for node in ray.nodes())


def _run(
    fleet: FleetConfig, server: ServerConfig, url: str, is_own: bool, on_ready: OnReady, on_progress: Progress
) -> None:
    """Deploy, wait until all is ready, then for a signal, and remove it. Raises the errors of a start."""
    from ray import serve
    from ray.serve.config import HTTPOptions, ProxyLocation

    from quire.fleet.application import application

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    place = ProxyLocation.Disabled if is_own else ProxyLocation.EveryNode
    serve.start(proxy_location=place, http_options=HTTPOptions(host=server.host, port=server.port))
    if not is_own:
        _check_free(url)
    target = serve.RunTarget(application(fleet, server, listens=is_own), name=APPLICATION)
    try:
        handle = serve.run_many([target], wait_for_applications_running=False)[0]
        _wait(on_progress)
        rows = _engines(handle, (fleet.replicas or fleet.min_replicas) + fleet.prefill_replicas, on_progress)
        on_ready([*rows, {"role": "router", "name": "router", "pid": os.getpid(), "url": url, "healthy": True}])
        while True:
            time.sleep(3600)
    finally:
        with contextlib.suppress(_Ended):
            serve.delete(APPLICATION)


def _check_free(url: str) -> None:
    """Raises NoServer or InvalidInput if Serve was started before, with another address or with a fleet."""
    from ray import serve

    if APPLICATION in serve.status().applications:
        raise InvalidInput("a fleet runs in this cluster already.", fix="end it: serve.delete('quire').")
    until = time.monotonic() + _PROXY_S
    while True:
        try:
            httpx.get(f"{url}/-/healthz", timeout=_CONNECT_S, trust_env=False)
            return
        except httpx.TransportError:
            if time.monotonic() > until:
                raise NoServer(
                    f"nothing answers at {url}: Serve may have been started in this cluster with another address.",
                    fix="give the --host and --port that it has.",
                ) from None
        time.sleep(_POLL_S)


def _wait(on_progress: Progress) -> None:
    """Until the application runs. Raises the error of the first engine that does not start."""
    from ray import serve
    from ray.serve.schema import ApplicationStatus

    while True:
        found = serve.status().applications.get(APPLICATION)
        if found is not None:
            said = "\n".join((found.message, *(each.message for each in found.deployments.values()))).strip()
            if error := _start_error(said):
                raise error
            if found.status == ApplicationStatus.RUNNING:
                return
            if found.status in (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY):
                raise NoServer(f"the fleet does not start: {said}", fix="see the logs of Ray.")
            states = [
                f"{name}: " + ", ".join(f"{number} {state.lower()}" for state, number in each.replica_states.items())
                for name, each in found.deployments.items()
            ]
            on_progress("; ".join(states))
        time.sleep(_POLL_S)


def _start_error(text: str) -> QuireError | None:
    from quire.fleet.engine import START_ERROR

    found = re.search(re.escape(START_ERROR) + r"(\{.*\})", text)
    return None if found is None else start_error(found[1], 2)


def _engines(handle: Any, number: int, on_progress: Progress) -> list[dict[str, Any]]:
    """A row for each engine, once each ingress has all."""
    while True:
        known: list[list[dict[str, Any]]] = handle.broadcast("processes").results(timeout_s=_ANSWER_S)
        fewest = min(known, key=lambda rows: sum(row["healthy"] for row in rows))
        if sum(row["healthy"] for row in fewest) >= number:
            return fewest
        on_progress(f"the router has {len(fewest)} of {number} engines")
        time.sleep(_POLL_S)
