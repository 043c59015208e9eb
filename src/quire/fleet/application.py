"""The fleet as an application of Serve."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from typing import Any, TypeVar

from ray import serve
from ray.serve import Application

from quire.errors import InvalidInput
from quire.fleet.config import FleetConfig
from quire.fleet.deployments import deployments
from quire.fleet.engine import Engine
from quire.fleet.ingress import Ingress
from quire.serve.config import ServerConfig
from quire.settings.setting import Settings, own_names, shown_of, variable_of

AnySettings = TypeVar("AnySettings", bound=Settings)


def build(arguments: dict[str, Any]) -> Application:
    """The application of Serve's configuration file: its `args` are settings of the fleet and the server, and secrets
    come from the environment. Raises InvalidInput."""
    known = own_names([FleetConfig, ServerConfig], arguments, "args")
    fleet, server = _read(FleetConfig, known), _read(ServerConfig, known)
    return application(fleet, server, listens=False)


def _read(kind: type[AnySettings], given: Mapping[str, Any]) -> AnySettings:
    """Its part of the settings. Raises InvalidInput."""
    own = {name: value for name, value in given.items() if name in kind.model_fields}
    for name in kind.model_fields:
        if shown_of(kind, name)["secret"]:
            if name in given:
                raise InvalidInput(
                    f"{name} is a secret, and args are no place for it.", fix=f"set {variable_of(name)}."
                )
            if (value := os.environ.get(variable_of(name))) is not None:
                own[name] = value
    return kind.read(own)


def application(fleet: FleetConfig, server: ServerConfig, *, listens: bool) -> Application:
    """The ingress over the engines. With `listens` it listens at the server's address, beside Serve's proxies.

    Engines that decode get the handle of those that compute prompts, and ask it who these are.
    """
    if fleet.prefill_replicas and fleet.transfer_secret is None:
        fleet = fleet.changed(transfer_secret=secrets.token_urlsafe(32))
    named = deployments(fleet, server)
    engine, prefill = serve.deployment(Engine), []
    if fleet.prefill_replicas:
        prefill = [engine.options(name="Prefill", **named["Prefill"]).bind(fleet, server, "prefill")]
    role = "decode" if prefill else None
    decode = engine.options(name="Engine", **named["Engine"]).bind(fleet, server, role, *prefill)
    ingress = serve.deployment(Ingress).options(name="Ingress", **named["Ingress"])
    return ingress.bind(server, [decode, *prefill], fleet, listens)
