"""MembersConfig: the settings that all engines behind a router share. ClusterConfig: those of one machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

from pydantic import field_validator

from quire.engine.config import EngineConfig
from quire.errors import InvalidInput
from quire.settings.setting import setting

RouterKind = Literal["prefix", "events"]
"""What a router chooses by."""

OnReady = Callable[[list[dict[str, Any]]], None]
"""Is called with a row for each process, the router's last, when requests are answered."""


class MembersConfig(EngineConfig):
    """Settings of engines that run beside each other. Roles and addresses follow from the numbers; `PREFILL` names the
    setting of a subclass that is the number of those that compute prompts for others."""

    PREFILL: ClassVar[str] = "prefill"

    CHOSEN: ClassVar[frozenset[str]] = frozenset(
        {"role", "prefill_peers", "transfer_listen", "transfer_name", "kv_events", "kv_events_replay"}
    )

    router: RouterKind = setting(
        "prefix",
        "Requests go where those with the same beginning went, or where the least is to be computed: {choices}.",
    )

    @field_validator(*sorted(CHOSEN))
    @classmethod
    def _chosen(cls, value: str | None) -> str | None:
        if value:
            raise InvalidInput("each of several engines gets its own, or none has it.", fix="leave it out.")
        return value

    @classmethod
    def idle(cls, given: Mapping[str, Any]) -> dict[str, str]:
        """Settings of transfers, where no engine computes prompts for others."""
        alone = str(given.get(cls.PREFILL, cls.model_fields[cls.PREFILL].default)) == "0"
        found = super().idle(given if alone else {**given, "role": "decode"})
        return {name: "--prefill" if what == "--role" else what for name, what in found.items()}

    def events_at(self, host: str) -> dict[str, str]:
        """Settings of an engine there that answers requests: it publishes what is cached, if the router reads that."""
        return dict.fromkeys(("kv_events", "kv_events_replay"), f"tcp://{host}:0") if self.router == "events" else {}

    def engine(self, **chosen: Any) -> EngineConfig:
        """The settings of one engine, with those that are chosen for it. Raises InvalidInput."""
        shared = self.model_fields_set & EngineConfig.model_fields.keys()
        given = {name: getattr(self, name) for name in shared} | {"identify_weights": True}
        return EngineConfig.read(given | chosen)


class ClusterConfig(MembersConfig):
    """Settings of engines of one machine."""

    GROUP: ClassVar[str] = "Cluster"

    prefill: int = setting(1, "Engines that compute prompts for the others; 0 for none.", ge=0, le=64)
    decode: int = setting(1, "Engines that answer requests; `--replicas` of `quire fleet`.", ge=1, le=64)
