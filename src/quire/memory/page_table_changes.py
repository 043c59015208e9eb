"""PageTableChanges: what of the running requests' page tables a device has still to hear of."""

from __future__ import annotations

from dataclasses import dataclass

from quire.spec.ids import Ids


@dataclass(frozen=True, slots=True)
class PageTableChanges:
    """Entries that have changed: `row * pages_per_row + page` in `places`, int32 `[k]`, and what is there now, int32
    `[groups, k]`: the page's frame in each group whose frames follow the pages."""

    places: Ids
    frames: Ids

    def __len__(self) -> int:
        return len(self.places)
