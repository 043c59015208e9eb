"""What is asked of the size of an engine's memory, and what is answered. Nothing here loads torch."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


class ResizeRequest(msgspec.Struct, kw_only=True):
    """Bytes of KV memory on the device, and of host memory for pages; None: as it is. The answer comes when they are
    reached, or after `wait_s`. With `preempt`, running requests give their memory back, wait, and go on later."""

    device_bytes: int | None = None
    host_bytes: int | None = None
    wait_s: float = 10.0
    preempt: bool = False


@dataclass(frozen=True, kw_only=True)
class MemorySize:
    """Bytes of one tier: as `asked`, as `reached`, and between what they can be."""

    asked: int
    reached: int
    least: int
    most: int


@dataclass(frozen=True, kw_only=True)
class MemoryHolder:
    """What holds frames that cannot be evicted: a request, by its id, or something else. It has `num_bytes`, and will
    need `most_bytes` at its end. Requests that share pages count them all."""

    name: str
    num_bytes: int
    most_bytes: int


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """The size of an engine's memory. `evicted_pages` have left the device, `moved_frames` have other places, since
    the question. With `done` false, the `holders` keep the rest, those with most first; it goes on as they end. While
    the KV memory is `released`, requests wait."""

    done: bool
    released: bool
    device: MemorySize
    host: MemorySize | None
    evicted_pages: int
    moved_frames: int
    holders: list[MemoryHolder]
