"""Settings of a fleet, and the YAML for `serve deploy`, without a cluster."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from quire.cli.app import app
from quire.engine.config import STORE_DRAIN_S
from quire.errors import InvalidInput
from quire.fleet.config import FleetConfig
from quire.fleet.deployments import as_yaml, deployments
from quire.fleet.run import check_ray
from quire.serve.config import ServerConfig
from tests.changes import ROOT
from tests.cli.conftest import Run

pytest.importorskip("ray.serve", reason="Ray is not installed: pip install 'quire-kv[fleet]'")


def options(**settings: Any) -> dict[str, dict[str, Any]]:
    return deployments(FleetConfig.read(settings), ServerConfig.read({}))


def test_numbers_and_places_are_options_of_deployments() -> None:
    found = options(replicas=3, prefill=2, num_cpus=0.5, num_gpus=0.25)
    assert {name: each["num_replicas"] for name, each in found.items()} == {"Ingress": 1, "Engine": 3, "Prefill": 2}
    assert found["Engine"]["ray_actor_options"] == {"num_cpus": 0.5, "num_gpus": 0.25}
    assert found["Ingress"]["ray_actor_options"] == {"num_cpus": 0}
    assert "Prefill" not in options()
    ingress = options(ingresses=3)["Ingress"]
    assert (ingress["num_replicas"], ingress["max_replicas_per_node"]) == (3, 1)
    assert options(device="cuda")["Engine"]["ray_actor_options"]["num_gpus"] == 1
    scaled = options(min_replicas=2, max_replicas=5)["Engine"]
    assert "num_replicas" not in scaled
    bounds = ("min_replicas", "initial_replicas", "max_replicas")
    assert [scaled["autoscaling_config"][name] for name in bounds] == [2, 2, 5]


def test_an_engine_with_a_store_gets_the_time_in_which_pages_are_saved(tmp_path: Path) -> None:
    given = [{}, {"storage": f"{tmp_path}", "host_memory": "64MiB"}]
    plain, stored = (options(**each)["Engine"]["graceful_shutdown_timeout_s"] for each in given)
    assert plain > ServerConfig().drain_s
    assert stored - plain == STORE_DRAIN_S


def test_the_yaml_is_what_serve_deploys(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.serve.schema import ServeDeploySchema

    from quire.fleet.application import build

    fleet = FleetConfig.read(
        {"model": "x/y", "kv_memory": "1GiB", "prefill": 1, "max_replicas": 4, "transfer_secret": "0123456789abcdefgh"}
    )
    server = ServerConfig.read({"api_key": "of-clients", "drain_s": 7.0, "host": "0.0.0.0", "port": 9000})
    text = as_yaml(fleet, server)
    assert "of-clients" not in text and "0123456789" not in text
    parsed = yaml.safe_load(text)
    schema = ServeDeploySchema.model_validate(parsed)
    assert (schema.http_options.host, schema.http_options.port) == ("0.0.0.0", 9000)
    assert [each.name for each in schema.applications[0].deployments] == ["Ingress", "Engine", "Prefill"]
    assert schema.applications[0].args == {"model": "x/y", "kv_memory": 2**30, "prefill_replicas": 1, "drain_s": 7.0}
    monkeypatch.setenv("QUIRE_API_KEY", "of-clients")
    monkeypatch.setenv("QUIRE_TRANSFER_SECRET", "0123456789abcdefgh")
    ingress = build(schema.applications[0].args)._bound_deployment
    given, engines, its_fleet, listens = ingress.init_args
    assert (given.api_key, given.drain_s, its_fleet.router, listens) == ("of-clients", 7.0, "prefix", False)
    for engine, role in zip(engines, ("decode", "prefill"), strict=True):
        settings, _, its_role, *_ = engine._bound_deployment.init_args
        assert (settings.transfer_secret, settings.kv_memory, its_role) == ("0123456789abcdefgh", 2**30, role)


def test_arguments_that_cannot_be_are_refused() -> None:
    from quire.fleet.application import build

    with pytest.raises(InvalidInput, match="api_key is a secret"):
        build({"api_key": "x"})
    with pytest.raises(InvalidInput, match="'kv_memry' is not a setting"):
        build({"kv_memry": 1})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--replicas", "0"), "replicas"),
        (("--min-replicas", "2"), "--min-replicas does nothing without --max-replicas"),
        (("--min-replicas", "3", "--max-replicas", "2"), "rising order"),
        (("--replicas", "3", "--max-replicas", "2"), "rising order"),
        (("--address", "auto"), "0 is none"),
        (("--yaml",), "0 is none"),
        (("--num-cpus", "0.00001"), "0.0001 or more"),
        (("--num-gpus", "1.5"), "whole GPUs above 1"),
        *((name, "finite number") for name in (("--num-cpus", "inf"), ("--drain", "inf"), ("--stall-after", "inf"))),
        (("--max-connections", f"{2**31}"), "less than or equal"),
        (("--transfer-connector", "tcp"), "--transfer-connector does nothing without --prefill"),
        (("--prefill", "1", "--no-prefix-caching"), "prefix caching is off"),
    ],
)
def test_settings_that_contradict_each_other_start_nothing(run: Run, words: tuple[str, ...], said: str) -> None:
    done = run("fleet", "--port", "0", "--json", *words)
    assert done.exit_code == 2
    assert said in json.loads(done.stderr)["error"]["message"] + json.loads(done.stderr)["error"]["fix"]


@pytest.mark.parametrize("version", ["2.54.0", "2.61.0", "3.0.0rc1"])
def test_another_release_of_ray_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    check_ray()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with pytest.raises(InvalidInput, match=f"{version} is installed"):
        check_ray()


def test_ray_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(InvalidInput, match="not installed") as refused:
        check_ray()
    assert "quire-kv[fleet]" in refused.value.fix
    assert typer.main.get_command(app).commands["fleet"]  # type: ignore[attr-defined]


def test_the_file_for_kuberay_has_what_the_command_prints() -> None:
    service = yaml.safe_load((ROOT / "deploy/rayservice.yaml").read_text())["spec"]
    found = yaml.safe_load(service["serveConfigV2"])
    settings = found["applications"][0]["args"]
    fleet = FleetConfig.read({**settings, "min_replicas": 1, "max_replicas": 3})
    assert found == yaml.safe_load(as_yaml(fleet, ServerConfig.read({"host": "0.0.0.0"})))
    assert fleet.most_engines == service["rayClusterConfig"]["workerGroupSpecs"][0]["maxReplicas"]
    assert service["rayClusterConfig"]["rayVersion"] == importlib.metadata.version("ray")
