"""GroupSpec: layers that share one layout, one reach and one residency."""

from __future__ import annotations

from dataclasses import dataclass

from quire.spec.layout import PageLayout


@dataclass(frozen=True, slots=True)
class ReachSpec:
    """Which cached pages a resuming request still reads, as data; `prefix.reach` gives each kind its behaviour."""

    kind: str = "full"
    tokens: int = 0

    @property
    def whole(self) -> bool:
        """Whether every page is always read, so that a page keeps its frame for as long as it exists."""
        return self.kind == "full"

    @property
    def in_place(self) -> bool:
        """Whether a request updates one frame in place, instead of writing one for each page."""
        return self.kind == "state"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """One group of a model: its name (in messages and metrics), its frames' layout and its reach."""

    name: str
    layout: PageLayout
    reach: ReachSpec = ReachSpec()
