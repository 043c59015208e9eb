"""What a cluster refuses before it starts a fleet, and how long a start waits for room."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from quire.errors import AddressInUse, InvalidInput, NoServer
from quire.fleet.config import FleetConfig
from quire.fleet.placement import Waiting, refuse_unplaced
from quire.fleet.run import refuse_other, serve_error
from quire.serve.config import ServerConfig

schema = pytest.importorskip("ray.serve.schema", reason="Ray is not installed: pip install 'quire-kv[fleet]'")


def test_engines_need_room_on_single_machines() -> None:
    fleet = FleetConfig.read({"num_cpus": 2, "num_gpus": 0.1})
    refuse_unplaced(fleet, 10, [{"CPU": 20, "GPU": 1}], "the cluster")
    for number, machines in (
        (11, [{"CPU": 99, "GPU": 1}]),
        (2, [{"CPU": 3, "GPU": 1}] * 1),
        (1, [{"CPU": 1, "GPU": 8}]),
    ):
        with pytest.raises(InvalidInput, match=f"{number} engines need .* the cluster has room for {number - 1}"):
            refuse_unplaced(fleet, number, machines, "the cluster")
    with pytest.raises(InvalidInput, match=r"1 engines need 0\.1 GPUs and 2 CPU cores"):
        refuse_unplaced(fleet, 1, [{"CPU": 1, "GPU": 0.1}, {"CPU": 1}], "two halves")
    refuse_unplaced(FleetConfig.read({"num_cpus": 0, "num_gpus": 0}), 5, [{}], "the cluster")


def said(message: str, **states: int) -> dict[str, Any]:
    return {
        "Engine": schema.DeploymentStatusOverview(
            status="UPDATING", status_trigger="UNSPECIFIED", replica_states=states, message=message
        )
    }


def test_a_start_without_room_is_named_and_ends() -> None:
    pending = "Deployment 'Engine' has 1 replicas that have taken more than 30s to be scheduled."
    waiting = Waiting(0.0)
    assert waiting.look(said("", STARTING=2), 9e3) == "Engine: 2 starting"
    assert "no machine has room for Engine" in waiting.look(said(pending, STARTING=2), 10e3)
    waiting.look(said(pending, STARTING=1, RUNNING=1), 10.5e3)
    waiting.look(said(pending, STARTING=1, RUNNING=1), 11e3)  # 500 s after the last change
    with pytest.raises(NoServer, match="no machine for 600 s: Deployment 'Engine' has 1 replicas"):
        waiting.look(said(pending, STARTING=1, RUNNING=1), 11.2e3)


def test_a_second_fleet_and_another_address_are_refused() -> None:
    runs, other = (SimpleNamespace(host="127.0.0.1", port=port) for port in (8000, 8001))
    refuse_other(runs, runs, {"another"})
    with pytest.raises(InvalidInput, match="a fleet runs in this cluster"):
        refuse_other(runs, runs, {"quire"})
    with pytest.raises(InvalidInput, match=r":8000 in this cluster, and not at 127\.0\.0\.1:8001") as refused:
        refuse_other(runs, other, ())
    assert "--port 8000" in refused.value.fix


def test_what_serve_fails_with_is_plain() -> None:
    server = ServerConfig.read({"port": 9000})
    traceback = "\x1b[36mray::ProxyActor.ready()\x1b[39m\n  File x\nRuntimeError: \x1b[31m{}\x1b[39m"
    found = serve_error(traceback.format("Failed to bind to address '127.0.0.1:9000'."), server)
    assert isinstance(found, AddressInUse) and "127.0.0.1:9000" in found.message and "--port 9001" in found.fix
    assert serve_error(traceback.format("odd"), server).message == "Serve does not start: RuntimeError: odd"
    assert isinstance(serve_error("", server), NoServer)
