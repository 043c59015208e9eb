"""The bytes of the records of frames in host memory. Planning and the host pool both use it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quire.spec.group import GroupSpec

HEADER_BYTES = 64
"""The header of a record, before its frame's bytes."""

REGION_ALIGNMENT = 4096
"""Alignment of a group's rows in bytes: a block of a disk, a page of the system's memory."""

_LINE = 64
_LARGE = 64 * 2**10


def record_stride(bytes_per_frame: int) -> int:
    """Bytes from one record to the next, in memory: whole cache lines, and whole disk blocks if frames are large.

    From 64 KiB on a row can be written directly to a file, without the system's cache.
    """
    return _rounded_up(HEADER_BYTES + bytes_per_frame, REGION_ALIGNMENT if bytes_per_frame >= _LARGE else _LINE)


def region_bytes(bytes_per_frame: int, frames: int) -> int:
    """Bytes of the rows of one group, with row 0, up to where the next group may start."""
    return _rounded_up((frames + 1) * record_stride(bytes_per_frame), REGION_ALIGNMENT)


def most_records(bytes_per_frame: int, num_bytes: int) -> int:
    """The most frames of one group whose `region_bytes` are within `num_bytes`; below 1 if none fits."""
    return num_bytes // REGION_ALIGNMENT * REGION_ALIGNMENT // record_stride(bytes_per_frame) - 1


def records_bytes(groups: Iterable[GroupSpec], frames: Sequence[int]) -> int:
    """Bytes of the rows of all groups, `frames[i]` of the group at index i."""
    pairs = zip(groups, frames, strict=True)
    return sum(region_bytes(group.layout.bytes_per_frame, count) for group, count in pairs)


def _rounded_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
