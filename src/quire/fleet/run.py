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
from collections.abc import Callable, Container, Iterator, Mapping
from types import FrameType
from typing import Any

from quire.engine.cores import available_cores
from quire.errors import AddressInUse, InvalidInput, NoServer, QuireError, start_error
from quire.fleet.config import FleetConfig, RayConfig
from quire.fleet.deployments import APPLICATION, MARGIN_S, proxies_at
from quire.fleet.placement import Waiting, refuse_unplaced
from quire.routing.config import OnReady
from quire.serve.config import ServerConfig
from quire.serve.server import bind, url_of
from quire.transfer.address import format_address, parse_address

logger = logging.getLogger(__name__)

FIRST_RAY, NO_RAY = (2, 60), (2, 61)
"""The releases that were tested: from the one, and before the other."""

_POLL_S = 0.3
_CONNECT_S = 5.0
_ANSWER_S = 60.0
_WATCH_S, _GONE = 2.0, 3  # between looks at the application, and those that miss it before it is gone
_LOCAL = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # on every system: nodes have the loopback address, and listen there
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
}

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
                proxies_at(server)
                url = f"http://{format_address((server.host, port))}"
                stack.enter_context(_joined(ray_settings.address, end))
                fleet = _on_machines(fleet)
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
            refuse_unplaced(fleet, fleet.most_engines, _machines(), "this machine")
            _hear(end)
            yield
        finally:
            _hear(signal.SIG_IGN)
            ray.shutdown()


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


def _machines() -> list[dict[str, float]]:
    """The resources of each."""
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _on_machines(fleet: FleetConfig) -> FleetConfig:
    """With a router on each. Raises InvalidInput if the first engines have no room."""
    machines = _machines()
    refuse_unplaced(fleet, fleet.first_engines, machines, "the cluster")
    if fleet.ingresses is not None and fleet.ingresses > len(machines):
        raise InvalidInput(
            f"{fleet.ingresses} routers need a machine each, and the cluster has {len(machines)}.",
            fix="give fewer --ingresses, or leave it out.",
        )
    return fleet.changed(ingresses=fleet.ingresses or len(machines))


def _run(
    fleet: FleetConfig, server: ServerConfig, url: str, is_own: bool, on_ready: OnReady, on_progress: Progress
) -> None:
    """Deploy, wait until all is ready, then for a signal, and remove it. Raises the errors of a start, and NoServer if
    another has removed it."""
    from ray import serve

    from quire.fleet.application import application

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    with _serve(server, is_own):
        target = serve.RunTarget(application(fleet, server, listens=is_own), name=APPLICATION)
        try:
            handle = serve.run_many([target], wait_for_applications_running=False)[0]
            _wait(on_progress)
            rows = _engines(handle, fleet.first_engines, on_progress)
            on_ready([*rows, {"role": "router", "name": "router", "pid": os.getpid(), "url": url, "healthy": True}])
            _watch()
        finally:
            with contextlib.suppress(_Ended):
                serve.delete(APPLICATION, _blocking=False)  # a call that waits ends after a minute
                _wait_for_end(server.drain_s + fleet.stop_seconds + 4 * MARGIN_S)


def _wait_for_end(most_s: float) -> None:
    """Until the application is gone, for so long at most: another may have deployed it again."""
    from ray import serve
    from ray.exceptions import RayError

    deadline, is_there = time.monotonic() + most_s, True
    while is_there and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        with contextlib.suppress(RayError, TimeoutError):  # the controller starts again
            is_there = APPLICATION in serve.status().applications


@contextlib.contextmanager
def _serve(server: ServerConfig, is_own: bool) -> Iterator[None]:
    """Serve, in this cluster. If this began it, it ends at the end, unless another uses it then. Raises AddressInUse,
    InvalidInput and NoServer."""
    from ray import serve
    from ray.exceptions import RayError
    from ray.serve.config import HTTPOptions, ProxyLocation
    from ray.serve.context import _get_global_client

    wanted = HTTPOptions(host=server.host, port=server.port)
    if runs := _get_global_client(raise_if_no_controller_running=False):
        refuse_other(runs.http_config, wanted, serve.status().applications)
    try:
        if runs is None:
            place = ProxyLocation.Disabled if is_own else ProxyLocation.EveryNode
            try:
                serve.start(proxy_location=place, http_options=wanted)
            except (RayError, RuntimeError, TimeoutError) as error:
                raise serve_error(str(error), server) from None
        yield
    finally:
        if runs is None and not is_own:
            with contextlib.suppress(_Ended, RayError):
                if not serve.status().applications:
                    serve.shutdown()


def refuse_other(runs: Any, wanted: Any, applications: Container[str]) -> None:
    """Raises InvalidInput if a fleet runs there, or Serve listens elsewhere: it would ignore where this one should."""
    if APPLICATION in applications:
        raise InvalidInput(
            "a fleet runs in this cluster already.",
            fix=f"end its command, or remove it: `serve shutdown`, or serve.delete('{APPLICATION}').",
        )
    if (runs.host, runs.port) != (wanted.host, wanted.port):
        raise InvalidInput(
            f"Serve listens at {runs.host}:{runs.port} in this cluster, and not at {wanted.host}:{wanted.port}.",
            fix=f"--host {runs.host} --port {runs.port}, or `serve shutdown`.",
        )


def serve_error(said: str, server: ServerConfig) -> QuireError:
    """What a start of Serve has failed with, by Ray's error: it has colours and a traceback."""
    if "Failed to bind to address" in said:
        return AddressInUse(
            f"Serve cannot listen at {server.host}:{server.port}: the address is in use, or is none of the machine.",
            fix=f"--port {server.port + 1}, or --host 0.0.0.0.",
        )
    last = re.sub(r"\x1b\[[0-9;]*m", "", said).strip().splitlines()[-1:]
    return NoServer(f"Serve does not start: {''.join(last)}", fix="see the logs of Ray.")


def _watch() -> None:
    """While the application is there. What is wrong with it is logged. Raises NoServer: another has removed it."""
    from ray import serve
    from ray.exceptions import RayError

    missed, before = 0, dict[str, str]()
    while missed < _GONE:
        time.sleep(_WATCH_S)
        with contextlib.suppress(RayError, TimeoutError):  # the controller starts again
            found = serve.status().applications.get(APPLICATION)
            missed = 0 if found is not None else missed + 1
            said = wrong_with(found.deployments) if found is not None else {}
            for name in (name for name, why in said.items() if why != before.get(name)):
                logger.warning("%s: %s", name, said[name])
            before = said
    raise NoServer("the fleet was removed from the cluster, not by this command.", fix="start it again.")


def wrong_with(deployments: Mapping[str, Any]) -> dict[str, str]:
    """What Serve says of those that lack a replica, by name: the error of an engine that does not start, or the first
    line for one that has ended."""
    return {
        name: str(error or each.message.partition("\n")[0])
        for name, each in deployments.items()
        if (error := _start_error(each.message)) or each.status == "UNHEALTHY"
    }


def _wait(on_progress: Progress) -> None:
    """Until the application runs. Raises the error of the first engine that does not start."""
    from ray import serve
    from ray.serve.schema import ApplicationStatus

    waiting = Waiting(time.monotonic())
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
            on_progress(waiting.look(found.deployments, time.monotonic()))
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
