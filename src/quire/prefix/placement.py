"""Placement: what the tree asks about where the bytes of its pages are. It keeps no record of that itself."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from quire.spec.ids import Bools, Ids


class Placement(Protocol):
    """Pages are on the device, below it, or both. Of every path the pages on the device come first."""

    has_lower: bool
    """Whether there is a tier below the device. Without one every page is on the device and nothing else is asked."""

    def on_device(self, page: int) -> bool:
        """Whether a page is on the device, or on its way there."""

    def have_copies(self, pages: Ids) -> Bools:
        """Per page: whether it has a copy below the device."""


class DeviceOnly:
    """There is no tier below the device."""

    has_lower = False

    def on_device(self, page: int) -> bool:
        """It is."""
        return True

    def have_copies(self, pages: Ids) -> Bools:
        """None has."""
        return np.zeros(len(pages), dtype=np.bool_)
