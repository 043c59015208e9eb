"""The deployments of a fleet, as Serve's configuration file has them. Nothing here loads Ray."""

from __future__ import annotations

from typing import Any

import yaml

from quire.errors import InvalidInput
from quire.fleet.config import FleetConfig
from quire.serve.config import ServerConfig
from quire.settings.setting import Settings, environment_of, shown_of

APPLICATION = "quire"
MARGIN_S = 5.0
"""Seconds that a process may take longer than its drain and the end of its engine."""

_CHECK_S, _CHECK_TIMEOUT_S = 1.0, 10.0
_LOOK_BACK_S = 15.0  # replicas report every ten
_COUNTS = {"replicas", "min_replicas", "max_replicas", "target_requests", "upscale_delay_s", "downscale_delay_s"}
_COUNTS |= {"ingresses", "num_gpus"}
"""Settings that are options of deployments, and not arguments of the application: engines go on when they change."""

_NOTE = """\
# serve deploy FILE, or the text of `serveConfigV2` in a RayService of KubeRay (docs/guides/fleet.md).
# Keys and secrets come from the environment of Ray's processes: QUIRE_API_KEY, QUIRE_ADMIN_KEY, QUIRE_TRANSFER_SECRET.
"""


def deployments(fleet: FleetConfig, server: ServerConfig) -> dict[str, dict[str, Any]]:
    """The options of each as Serve takes them, by name."""
    common = {
        "max_ongoing_requests": server.max_connections,
        "health_check_period_s": _CHECK_S,
        "health_check_timeout_s": _CHECK_TIMEOUT_S,
        "graceful_shutdown_timeout_s": server.drain_s + fleet.stop_seconds + 2 * MARGIN_S,
        "graceful_shutdown_wait_loop_s": _CHECK_S,
    }
    numbers: dict[str, dict[str, Any]] = {"Ingress": {"num_replicas": fleet.ingresses or 1, "max_replicas_per_node": 1}}
    numbers["Engine"] = _number(fleet)
    if fleet.prefill_replicas:
        numbers["Prefill"] = {"num_replicas": fleet.prefill_replicas}
    engine = {"num_cpus": fleet.cpus, "num_gpus": fleet.gpus}
    takes = {"Ingress": {"num_cpus": 0}, "Engine": engine, "Prefill": dict(engine)}
    return {name: common | number | {"ray_actor_options": takes[name]} for name, number in numbers.items()}


def _number(fleet: FleetConfig) -> dict[str, Any]:
    if fleet.max_replicas is None:
        return {"num_replicas": fleet.replicas or 1}
    bounds = {"min_replicas": fleet.min_replicas, "max_replicas": fleet.max_replicas}
    bounds |= {"initial_replicas": fleet.replicas or fleet.min_replicas}
    delays = {"upscale_delay_s": fleet.upscale_delay_s, "downscale_delay_s": fleet.downscale_delay_s}
    policy = {"policy_function": "quire.fleet.scaling:wanted_replicas"}
    more = {"target_ongoing_requests": fleet.target_requests, "look_back_period_s": _LOOK_BACK_S, "policy": policy}
    return {"autoscaling_config": bounds | delays | more}


def proxies_at(server: ServerConfig) -> dict[str, Any]:
    """Where Serve's proxies listen on each machine. Raises InvalidInput."""
    if server.port == 0:
        raise InvalidInput("Serve's proxies need one port on all machines, and 0 is none.", fix="give --port 8000.")
    return {"host": server.host, "port": server.port}


def as_yaml(fleet: FleetConfig, server: ServerConfig) -> str:
    """The file for `serve deploy`. It has no secret."""
    arguments = _arguments(fleet) | _arguments(server)
    for name in ("host", "port", "until_eof", *_COUNTS):
        arguments.pop(name, None)
    application = {
        "name": APPLICATION,
        "route_prefix": "/",
        "import_path": "quire.fleet.application:build",
        "args": arguments,
        "deployments": [{"name": name} | options for name, options in deployments(fleet, server).items()],
    }
    whole = {
        "proxy_location": "EveryNode",
        "http_options": proxies_at(server),
        "applications": [application],
    }
    return _NOTE + str(yaml.safe_dump(whole, sort_keys=False))


def _arguments(settings: Settings) -> dict[str, Any]:
    """The settings that were given, as text or numbers, but for secrets."""
    kind, texts = type(settings), environment_of(settings)
    given = {field: getattr(settings, field) for field in kind.model_fields if field in settings.model_fields_set}
    return {
        field: value if isinstance(value, bool | int | float) else texts[f"QUIRE_{field.upper()}"]
        for field, value in given.items()
        if value is not None and not shown_of(kind, field)["secret"]
    }
