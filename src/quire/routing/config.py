"""MembersConfig: the settings that all engines behind a router share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import field_validator

from quire.engine.config import EngineConfig
from quire.errors import InvalidInput


class MembersConfig(EngineConfig):
    """Settings of engines that run beside each other. Roles and addresses follow from the numbers; `PREFILL` names the
    setting of a subclass that is the number of those that compute prompts for others."""

    PREFILL: ClassVar[str] = "prefill"

    CHOSEN: ClassVar[frozenset[str]] = frozenset(
        {"role", "prefill_peers", "transfer_listen", "transfer_name", "kv_events", "kv_events_replay"}
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

    def engine(self, **chosen: Any) -> EngineConfig:
        """The settings of one engine, with those that are chosen for it. Raises InvalidInput."""
        shared = self.model_fields_set & EngineConfig.model_fields.keys()
        return EngineConfig.read({name: getattr(self, name) for name in shared} | chosen)
