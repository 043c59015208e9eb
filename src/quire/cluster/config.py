"""ClusterConfig: how many engines a cluster has, beside the settings that they share."""

from __future__ import annotations

from typing import ClassVar, Literal

from quire.routing.config import MembersConfig
from quire.settings.setting import setting

_GROUP = "Cluster"

MemberRole = Literal["prefill", "decode"] | None
"""An engine without a role is on its own."""


class ClusterConfig(MembersConfig):
    """Settings of engines of one machine."""

    GROUP: ClassVar[str] = _GROUP

    prefill: int = setting(1, "Engines that compute prompts for the others; 0 for none.", ge=0, le=64)
    decode: int = setting(1, "Engines that answer requests; `--replicas` of `quire fleet`.", ge=1, le=64)
