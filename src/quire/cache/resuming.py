"""resume_point: after how many pages of a cached path a request can begin, with the frames that are there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from quire.cache.groups import GroupCache
from quire.memory.allocator import GroupFrames
from quire.spec.ids import Bools, Ids

HostFrames = GroupFrames[Any]


def resume_point(groups: Sequence[GroupCache], pages: Ids, hosts: Sequence[HostFrames] = ()) -> tuple[int, str]:
    """The most of `pages` after which a request can begin, and the name of a group that allows no more, or "".

    `groups` are those that are read in part: in the others a cached page has its frame. `hosts`, one for each group of
    the cache, add frames on the host. O(pages read) where a request can begin after all pages.
    """
    if all(resident(group, needed_pages(group, pages), hosts).all() for group in groups):
        return len(pages), ""
    masks = [group.reach.resumable(resident(group, pages, hosts)) for group in groups]
    ends = np.flatnonzero(np.logical_and.reduce(masks))
    num_pages = int(ends[-1]) + 1 if len(ends) else 0
    return num_pages, next((group.name for group, mask in zip(groups, masks, strict=True) if not mask[-1]), "")


def needed_pages(group: GroupCache, pages: Ids) -> Ids:
    """The pages that a request that begins after all of `pages` reads in this group; a view."""
    needed = group.reach.needed(len(pages))
    return pages[needed.start : needed.stop]


def resident(group: GroupCache, pages: Ids, hosts: Sequence[HostFrames] = ()) -> Bools:
    """Per page: whether it has a frame on the device or in `hosts`."""
    found = group.table.present(pages)
    return found | hosts[group.index].table.present(pages) if hosts else found
