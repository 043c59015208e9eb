"""Mistakes of what is prepared before kernels are launched."""

from __future__ import annotations

from collections.abc import Sequence

from quire.engine.device import device
from quire.engine.device.warm_up import Pads, warm_ups
from tests.mutants.mutants import Patch, mutant


def _without(patch: Patch, wrong: object) -> None:
    def fewer(longest: int, most_rows: int, *, trees: bool) -> Sequence[Pads]:
        return [pads for pads in warm_ups(longest, most_rows, trees=trees) if not wrong(pads)]  # type: ignore[operator]

    patch.setattr(device, "warm_ups", fewer)


@mutant("warm-up", "the first long prompt of a GPU waits seconds while a kernel is compiled")
def prompts_of_many_rows_are_not_warmed_up(patch: Patch) -> None:
    _without(patch, lambda pads: max(pads.news) > 8)


@mutant("warm-up", "the first request with a long context waits while the kernel that merges parts is compiled")
def long_contexts_are_not_warmed_up(patch: Patch) -> None:
    _without(patch, lambda pads: max(pads.contexts) > 256)
