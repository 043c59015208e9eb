"""small_plan: a memory plan in pages, for caches without bytes."""

from __future__ import annotations

from quire.plan.budget import MemoryPlan
from quire.spec.group import GroupSpec, ReachSpec
from quire.spec.layout import DType, Field, PageLayout


def small_plan(
    num_pages: int,
    page_size: int,
    *,
    context: int = 0,
    max_requests: int = 8,
    groups: tuple[str, ...] = ("full",),
    reaches: tuple[ReachSpec, ...] = (),
    frames: tuple[int, ...] = (),
) -> MemoryPlan:
    """A plan of exactly `num_pages` pages. A frame takes one byte per token and group.

    `context` 0 means the tokens of all pages. Groups are full unless `reaches` has one for each, and have a frame for
    every page unless `frames` says how many.
    """
    layout = PageLayout(page_size, (Field(name="k", shape=(1,), dtype=DType.UINT8, layers=(0,)),))
    reaches = reaches or (ReachSpec(),) * len(groups)
    return MemoryPlan(
        page_size=page_size,
        groups=tuple(GroupSpec(name=n, layout=layout, reach=r) for n, r in zip(groups, reaches, strict=True)),
        frames=frames,
        num_pages=num_pages,
        context=context or num_pages * page_size,
        max_requests=max_requests,
    )
