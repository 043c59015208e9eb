"""Mistakes with what keeps pages."""

from __future__ import annotations

from typing import Any

from quire.cache.hold import Hold, Holds
from quire.memory.residency import Column
from tests.mutants.mutants import Patch, mutant


@mutant("holds", "a hold that is released twice gives back the lease of another one")
def a_hold_is_released_twice(patch: Patch) -> None:
    real = Holds.release

    def release(holds: Holds, hold: Hold) -> None:
        if not hold.released:
            real(holds, hold)

    patch.setattr(Holds, "release", release)


@mutant("holds", "frames that a transfer reads are reclaimed for another request")
def held_frames_are_idle(patch: Patch) -> None:
    real = Holds._pin

    def pin(holds: Holds, hold: Hold, frames: Any) -> None:
        real(holds, hold, ())
        hold.frames = tuple(frames)

    patch.setattr(Holds, "_pin", pin)
    patch.setattr(Holds, "_unpin", lambda holds, frames: None)


@mutant("holds", "a reader of a page that has no frame is given the padding frame")
def a_missing_frame_is_padding(patch: Patch) -> None:
    patch.setattr(Column, "frames", lambda column, pages: column.frame[pages])
