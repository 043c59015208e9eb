"""FleetConfig: the engines of a fleet. RayConfig: where they run. Nothing here loads Ray."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import model_validator

from quire.errors import InvalidInput
from quire.routing.config import MembersConfig
from quire.settings.setting import Settings, setting

_GROUP = "Fleet"
_MOST = 4096
_LEAST = 1e-4  # part of a core or GPU


class FleetConfig(MembersConfig):
    """Settings of engines that Ray starts, and how many there are."""

    GROUP: ClassVar[str] = _GROUP

    replicas: int | None = setting(
        None, "Engines that answer requests.", otherwise="1, or --min-replicas with --max-replicas", ge=1, le=_MOST
    )
    min_replicas: int = setting(1, "Fewest engines that answer, with --max-replicas.", ge=1, le=_MOST)
    max_replicas: int | None = setting(
        None,
        "Most engines that answer: there are as many as requests need.",
        otherwise="their number stays",
        ge=1,
        le=_MOST,
    )
    target_requests: float = setting(
        8.0, "Requests that an engine should have at once, with --max-replicas.", option="--target-requests", gt=0
    )
    upscale_delay_s: float = setting(
        30.0, "Seconds for which more requests come before an engine is added.", option="--upscale-delay", ge=0
    )
    downscale_delay_s: float = setting(
        600.0, "Seconds for which fewer requests come before an engine is taken.", option="--downscale-delay", ge=0
    )
    PREFILL: ClassVar[str] = "prefill_replicas"
    prefill_replicas: int = setting(
        0, "Engines that compute prompts for the others; 0 for none.", option="--prefill", ge=0, le=_MOST
    )
    ingresses: int | None = setting(
        None, "Routers before them, with --address or --yaml.", otherwise="one for each machine", ge=1, le=_MOST
    )
    num_cpus: float | None = setting(
        None,
        "CPU cores that Ray reserves for each engine, and threads of its host.",
        otherwise="those of this machine divided among its engines; 1 with --address or --yaml",
        ge=0,
    )
    num_gpus: float | None = setting(
        None, "GPUs that Ray reserves for each engine.", otherwise="1 with --device cuda, else 0", ge=0
    )

    @classmethod
    def idle(cls, given: Mapping[str, Any]) -> dict[str, str]:
        """Bounds and delays, where the number of engines stays."""
        scales = given.get("max_replicas") is not None
        bounds = ("min_replicas", "target_requests", "upscale_delay_s", "downscale_delay_s")
        return super().idle(given) | {name: "--max-replicas" for name in bounds if name in given and not scales}

    @model_validator(mode="after")
    def _agrees(self) -> FleetConfig:
        if self.max_replicas is not None:
            numbers = (self.min_replicas, self.replicas or self.min_replicas, self.max_replicas)
            if list(numbers) != sorted(numbers):
                raise InvalidInput(
                    f"{self.min_replicas} engines at least, {numbers[1]} at first and {self.max_replicas} at most.",
                    fix="give --min-replicas, --replicas and --max-replicas in rising order.",
                )
        if any(0 < each < _LEAST for each in (self.cpus, self.gpus)) or (self.gpus > 1 and self.gpus % 1):
            raise InvalidInput(
                f"Ray reserves no {self.cpus:g} cores and {self.gpus:g} GPUs: 0.0001 or more, and whole GPUs above 1.",
                fix="give --num-cpus and --num-gpus such as 0.5, 1 or 2.",
            )
        if self.prefill_replicas:
            secret = self.transfer_secret or secrets.token_hex()
            self.engine(role="prefill", transfer_secret=secret)
        return self

    @property
    def first_engines(self) -> int:
        """How many there are at first."""
        return self.prefill_replicas + (self.replicas or self.min_replicas)

    @property
    def most_engines(self) -> int:
        """How many there may be at once."""
        return self.prefill_replicas + (self.max_replicas or self.replicas or 1)

    @property
    def cpus(self) -> float:
        """CPU cores of each."""
        return 1.0 if self.num_cpus is None else self.num_cpus

    @property
    def gpus(self) -> float:
        """GPUs of each."""
        return float(self.device.startswith("cuda")) if self.num_gpus is None else self.num_gpus


class RayConfig(Settings):
    """Where a fleet runs."""

    GROUP: ClassVar[str] = _GROUP

    address: str | None = setting(
        None, "Ray cluster to run in: HOST:PORT, or auto for the one of this machine.", otherwise="a new one, here"
    )
    yaml: bool = setting(False, "Print the fleet as YAML for `serve deploy` and KubeRay, and start nothing.")
