"""PagePlacement: answers the prefix tree's questions about where pages are, from the residency table."""

from __future__ import annotations

from quire.memory.residency import Residency
from quire.spec.ids import Bools, Ids, Tier


class PagePlacement:
    """See `quire.prefix.placement.Placement`. For caches with a tier below the device."""

    def __init__(self, table: Residency) -> None:
        self._device, self._host = table.anchor(Tier.DEVICE), table.anchor(Tier.HOST)

    def on_device(self, page: int) -> bool:
        """Whether a page is on the device, or on its way there."""
        return bool(self._device.frame[page])

    def have_copies(self, pages: Ids) -> Bools:
        """Per page: whether it has a copy on the host."""
        return self._host.present(pages)
