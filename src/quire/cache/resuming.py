"""resume_point: behind how many pages of a cached path a request could begin, with the frames that there are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from quire.cache.groups import GroupCache
from quire.memory.allocator import GroupFrames
from quire.spec.ids import Bools, Ids

HostFrames = GroupFrames[Any]


def resume_point(groups: Sequence[GroupCache], pages: Ids, hosts: Sequence[HostFrames] = ()) -> tuple[int, str]:
    """The most of these pages behind which a request could begin, and a group that stood in the way of more, "" where
    none did.

    `groups` are those that are read in part; in the others a cached page has its frame. What the host has counts where
    `hosts`, which are all groups', are given. O(what is read) where a request could begin behind all of them.
    """
    if all(resident(group, needed_pages(group, pages), hosts).all() for group in groups):
        return len(pages), ""
    masks = [group.reach.resumable(resident(group, pages, hosts)) for group in groups]
    ends = np.flatnonzero(np.logical_and.reduce(masks))
    num_pages = int(ends[-1]) + 1 if len(ends) else 0
    return num_pages, next((group.name for group, mask in zip(groups, masks, strict=True) if not mask[-1]), "")


def needed_pages(group: GroupCache, pages: Ids) -> Ids:
    """Those of a path that a request reads in a group when it begins behind all of them, a view."""
    needed = group.reach.needed(len(pages))
    return pages[needed.start : needed.stop]


def resident(group: GroupCache, pages: Ids, hosts: Sequence[HostFrames] = ()) -> Bools:
    """Per page: whether it has a frame on the device or, where `hosts` are given, on the host."""
    found = group.frames.resident(pages)
    return found | hosts[group.index].resident(pages) if hosts else found
