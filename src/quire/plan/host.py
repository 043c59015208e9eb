"""Host memory: the bytes for records and the frames of each group, and whether pools on the CPU fit."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Literal

from quire.errors import HostMemoryError, PlanError
from quire.plan.budget import MemoryPlan, format_bytes, round_up_bytes
from quire.spec.record_size import records_bytes

_AUTO_DEVICES = 2  # times the bytes of the device's pools, by default
_AUTO_SHARE = 0.5  # share of the available memory; other processes may start after this one
_ROOM_SHARE = 1 / 16  # share of the available memory, for the process itself
_LEAST_ROOM = 64 * 2**20
_MOST_ROOM = 4 * 2**30
_SLACK_SHARE = 1 / 64  # below the largest size, since the available memory varies a little between starts


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Bytes of this machine. `limit` is the smallest of the containers around this process, None without any;
    `available` respects all of them."""

    total: int
    available: int
    limit: int | None


def host_frames(plan: MemoryPlan, num_bytes: int) -> tuple[int, ...]:
    """Host frames of each group, as `HostPool` allocates them, for `num_bytes` bytes of one rank's host memory.

    The host has the mix that is expected of the device, so that pages that leave it fit: for each frame of the largest
    group, the others have their share, rounded down, and at least one. The bytes include headers, strides and the
    padding row. One frame more of the largest group would not fit. Latents in host memory have a frame for each page of
    the plan, and for each frame of the largest other group. Raises PlanError with the smallest size that works.
    """
    on_host = plan.groups_on_host

    def frames(count: int) -> tuple[int, ...]:
        return tuple(
            plan.num_pages + count if index in on_host else max(1, count * each // largest)
            for index, each in enumerate(on_device)
        )

    def size(count: int) -> int:
        return records_bytes(plan.groups, frames(count))

    on_device = plan.split
    largest = max(each for index, each in enumerate(on_device) if index not in on_host)
    beside = f" beside latents of {format_bytes(plan.host_bytes)}" if on_host else ""
    if size(1) > num_bytes:
        raise PlanError(
            f"{format_bytes(num_bytes)} of host memory hold no page{beside}: one frame of each group takes "
            f"{format_bytes(size(1))}.",
            fix=f"use --host-memory {round_up_bytes(size(1)).replace(' ', '')} or more for each rank.",
        )
    return frames(bisect_right(range(1, num_bytes), num_bytes, key=size))


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
