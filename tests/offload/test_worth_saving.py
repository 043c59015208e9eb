"""What is worth a copy on the host, as far as is known."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.offload.tier_settings import TierSettings
from quire.offload.tiering import TRIAL_BYTES, worth_saving
from quire.tiers.break_even import BreakEven
from quire.tiers.transfer import Lane, Transfer
from quire.tiers.virtual_mover import VirtualMover
from tests.tiers.array_copies import ArrayCopies
from tests.tiers.scripted_store import ScriptedStore

RECORD = 2 << 20
PLACES = [np.arange(100)]


class Path:
    """Settings over a link of some bandwidth, with prompts computed at 32,000 tokens/s: 4 GiB/s is break-even."""

    def __init__(self, **settings: bool) -> None:
        self.even = BreakEven(lambda: 0.0)
        self.even.computed(32_000, 1.0)
        self.mover = VirtualMover(ArrayCopies(), ScriptedStore(), seconds=lambda: 0.0, bandwidths={}, latency={})
        self.settings = TierSettings(
            host_frames=(100,), record_bytes=(RECORD,), mover=self.mover, break_even=self.even, **settings
        )

    def wanted(self) -> Sequence[int]:
        (found,) = worth_saving(PLACES, len(PLACES[0]) * RECORD, self.settings, 16)
        return found.tolist()


def test_while_nothing_is_known_one_small_save_is_tried() -> None:
    link = Path()
    assert link.wanted() == list(range(TRIAL_BYTES // RECORD))
    assert link.mover.submit(Transfer(Lane.SAVE, (), num_bytes=TRIAL_BYTES))
    assert link.wanted() == []


def test_what_is_known_decides() -> None:
    link = Path()
    link.even.moved(Lane.SAVE, 8 * 2**30, 1.0)
    assert link.wanted() == list(range(100))
    slow = Path()
    slow.even.moved(Lane.SAVE, 2 * 2**30, 1.0)
    assert slow.wanted() == []


def test_copies_for_a_store_are_made_in_any_case() -> None:
    for settings in ({"stores": True}, {"always": True}):
        link = Path(**settings)
        link.even.moved(Lane.SAVE, 2**20, 1.0)
        assert link.wanted() == list(range(100))


def test_nothing_wanted_is_nothing() -> None:
    (found,) = worth_saving([np.arange(0)], 0, Path().settings, 16)
    assert not len(found)
