"""Host memory: the bytes for records and the frames of each group, and whether pools on the CPU fit."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from quire.errors import HostMemoryError, PlanError
from quire.plan.budget import MemoryPlan, format_bytes, round_up_bytes
from quire.plan.settings import PlanSettings
from quire.spec.group import GroupSpec
from quire.spec.pages import pages_for
from quire.spec.record_size import records_bytes

_AUTO_DEVICES = 2  # times the bytes of the device's pools, by default
_AUTO_SHARE = 0.5  # share of the available memory; other processes may start after this one
_ROOM_SHARE = 1 / 16  # share of the available memory, for the process itself
_LEAST_ROOM = 64 * 2**20
_MOST_ROOM = 4 * 2**30
_TURN = 8192  # tokens from one end of a path to the next, at most
_SLACK_SHARE = 1 / 64  # below the largest size, since the available memory varies a little between starts


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Bytes of this machine. `limit` is the smallest of the containers around this process, None without any;
    `available` respects all of them."""

    total: int
    available: int
    limit: int | None


def frames_at_rest(
    groups: Sequence[GroupSpec], frames: Sequence[int], options: PlanSettings, page_size: int
) -> tuple[int, ...]:
    """Frames of each group that the expected requests have cached once they have ended, if pools of so many `frames`
    are full of their pages.

    A request goes on where one has ended. There it reads all pages of groups that are read whole, but of others one
    window, or one state. Pools of the device have more, since what runs writes whole chunks to its windows, and has
    checkpoints beside its state. A path longer than `_TURN` has grown in turns, each of which leaves an end: so a host
    that was planned for the longest requests has ends for others too. It never has more than the device's share. Where
    a ratio or a number of states was asked for, the expected requests say nothing, and the host has the device's mix;
    also without a group that is read whole."""
    step, mix = page_size * options.token_ranks, options.expected.in_turns(_TURN)
    pages = max((count for group, count in zip(groups, frames, strict=True) if group.reach.whole), default=0)
    windows, states = options.swa_full_tokens_ratio, options.max_mamba_cache_size or options.mamba_full_memory_ratio
    found = []
    for group, count in zip(groups, frames, strict=True):
        reach = group.reach
        if not reach.whole and pages and (states if reach.in_place else windows) is None:
            share = mix.requests_per_token(step) * step if reach.in_place else mix.window_share(reach.tokens, step)
            count = min(count, math.ceil(pages * share))
        found.append(count)
    return tuple(found)


def frames_beside(plan: MemoryPlan, count: int) -> tuple[int, ...]:
    """Host frames of each group if the largest has `count`: the others have their share of what rests, rounded down.

    A path of so many pages has its window, or its state. Latents in host memory have a frame for each page of the plan,
    and for each frame of the largest other group.
    """
    on_host, mix = plan.groups_on_host, plan.at_rest or plan.split
    largest = max(each for index, each in enumerate(mix) if index not in on_host)
    found = []
    for index, (group, each) in enumerate(zip(plan.groups, mix, strict=True)):
        least = max(1, min(count, pages_for(group.reach.tokens, plan.tokens_per_page)))
        found.append(plan.num_pages + count if index in on_host else max(least, count * each // largest))
    return tuple(found)


def host_frames(plan: MemoryPlan, num_bytes: int, option: str = "--host-memory") -> tuple[int, ...]:
    """Host frames of each group, as `HostPool` allocates them, for `num_bytes` bytes of one rank's host memory.

    They are those of `frames_beside`. The bytes include headers, strides and the padding row. One frame more of the
    largest group would not fit. Raises PlanError with the smallest size of the `option` that works.
    """

    def size(count: int) -> int:
        return records_bytes(plan.groups, frames_beside(plan, count))

    beside = f" beside latents of {format_bytes(plan.host_bytes)}" if plan.groups_on_host else ""
    if size(1) > num_bytes:
        raise PlanError(
            f"{format_bytes(num_bytes)} of host memory hold no page{beside}: one frame of each group takes "
            f"{format_bytes(size(1))}.",
            fix=f"use {option} {round_up_bytes(size(1)).replace(' ', '')} or more for each rank.",
        )
    return frames_beside(plan, bisect_right(range(1, num_bytes), num_bytes, key=size))


def host_budget(asked: int | Literal["auto"], memory: HostMemory, *, device_bytes: int, ranks: int = 1) -> int:
    """Bytes of host memory for the records of all groups and all `ranks`; a rank has `num_bytes // ranks`.

    `device_bytes` are those of one rank's device pools; "auto" is twice as much for each rank, or half of the available
    memory if that is less. Room for the process is left in any case. Raises HostMemoryError with the largest size that
    fits, if more was requested.
    """
    most = largest_host_bytes(memory.available)
    if asked == "auto":
        return min(_AUTO_DEVICES * device_bytes * ranks, int(most * _AUTO_SHARE))
    if asked <= most:
        return asked
    raise _too_large(asked, "host memory", "--host-memory", memory)


def check_cpu_pools(num_bytes: int, memory: HostMemory) -> None:
    """Refuse KV pools in host memory for which there is no room, beside room for the process. Raises HostMemoryError
    with the largest size that fits."""
    if num_bytes > largest_host_bytes(memory.available):
        raise _too_large(num_bytes, "KV memory", "--kv-memory", memory)


def _too_large(asked: int, kind: str, option: str, memory: HostMemory) -> HostMemoryError:
    limit, available, total = memory.limit, format_bytes(memory.available), format_bytes(memory.total)
    limited = f"the container's limit is {format_bytes(limit)}" if limit is not None else "no container limits it"
    suggested = _rounded_down(int(largest_host_bytes(memory.available) * (1 - _SLACK_SHARE)))
    return HostMemoryError(
        f"{format_bytes(asked)} of {kind} were asked for; {available} of {total} are "
        f"available and {limited}. The largest size that fits is {suggested or 'none'}.",
        fix=f"use {option} {suggested}." if suggested else "free memory on this machine, or go without.",
    )


def largest_host_bytes(available: int) -> int:
    """The most that `host_budget` grants if so much is available: the rest is room for the process."""
    room = min(max(int(available * _ROOM_SHARE), _LEAST_ROOM), _MOST_ROOM)
    return max(0, available - room)


def _rounded_down(size: int) -> str:
    """`size` or a little less, as input for `parse_bytes`; empty if it is less than a unit."""
    unit, name = (2**20, "MiB") if size >= 2**20 else (2**10, "KiB")
    return f"{size // unit}{name}" if size >= unit else ""
