"""Moving: what a move in flight keeps where it is. Moves of bytes end when they end; until then nothing may go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from quire.cache.groups import GroupCache
from quire.offload.host_groups import HostGroup
from quire.prefix.node import Lease
from quire.spec.ids import Ids


@dataclass(slots=True)
class Part:
    """Pages of one group: `at` are their places on the path, `device` and `host` their frames there, where the move
    touches them."""

    group: int
    pages: Ids
    at: np.ndarray
    device: Ids
    host: Ids
    ranks: np.ndarray | None = None


@dataclass(slots=True, eq=False)
class Moving:
    """A path that is pinned, and in groups that are read in part the frames of single pages. `on_device` and `on_host`
    say in which tier these have frames that the move touches; `scope` and the path's first pages are whose they are."""

    lease: Lease
    parts: list[Part]
    scope: bytes
    on_device: bool
    on_host: bool
    abandoned: bool = False  # flushed meanwhile: what arrives counts for nothing
    pinned: bool = field(default=False)

    def pin(self, groups: Sequence[GroupCache], hosts: Sequence[HostGroup]) -> None:
        """Keep the frames of single pages in place; the path is kept by the lease."""
        self.pinned = True
        for part in self.parts:
            if self.on_device:
                groups[part.group].table.pin(part.pages)
            if self.on_host:
                hosts[part.group].pin(part.pages)

    def unpin(self, groups: Sequence[GroupCache], hosts: Sequence[HostGroup]) -> None:
        """Let these frames go; the path is the caller's to let go."""
        assert self.pinned
        self.pinned = False
        for part in self.parts:
            if self.on_device:
                groups[part.group].table.unpin(part.pages)
            if self.on_host:
                hosts[part.group].unpin(part.pages)
