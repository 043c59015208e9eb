"""Plan: the complete plan of one server.

The plan that is printed, the pools that are built and the requests that are admitted are this one object.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from quire.errors import PlanError
from quire.plan.budget import MOST_IDS, MemoryPlan, format_bytes, round_up_bytes
from quire.plan.configurator import PADDING, MemoryPoolConfig, MemoryPoolConfigurator
from quire.plan.devices import Line
from quire.plan.host import frames_at_rest
from quire.plan.mix import Mix
from quire.plan.settings import PlanSettings
from quire.spec.arena import SPARED, ArenaLayout
from quire.spec.group import GroupSpec
from quire.spec.layout import PageLayout
from quire.spec.model import ModelSpec
from quire.spec.pages import pages_for

_MOST_PASSED_PAGES = 2**20  # some 20 bytes of host memory each


def in_arena(groups: Sequence[GroupSpec]) -> tuple[GroupSpec, ...]:
    """The groups of an arena, of which one is read whole; none if these cannot share one. Groups that are read whole,
    such as latents and keys of an indexer, have frames for the same pages: in an arena they are one."""
    whole, others = (tuple(group for group in groups if group.reach.whole is each) for each in (True, False))
    if not whole or len(others) != 1:
        return ()
    fields = tuple(field for group in whole for field in group.layout.fields)
    one = replace(whole[0], layout=PageLayout(whole[0].layout.page_size, fields))
    return tuple(one if group is whole[0] else group for group in groups if group in (whole[0], *others))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The data from which a server is built, for the rank with the least room.

    `kv_bytes` is the budget of that rank's pools, and `config` has their sizes. `stages` are the pools of every
    pipeline stage that has any, at the same tokens, and `stage` is the one that decides. Tokens are those of one
    attention group. `ledger` has a line for every byte of the budget on the device, and lines for the host. `notes` say
    what was assumed.
    """

    spec: ModelSpec
    settings: PlanSettings
    page_size: int
    context: int
    mix: Mix
    config: MemoryPoolConfig
    kv_bytes: int
    stage: int
    stages: tuple[MemoryPoolConfig, ...]
    configurator: MemoryPoolConfigurator = field(repr=False)
    ledger: tuple[Line, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def memory(self) -> MemoryPlan:
        """The plan from which the cache and the pools of this rank are built."""
        return self.floating if self.settings.arena else self.split

    @property
    def split(self) -> MemoryPlan:
        """A pool for each group."""
        max_requests = max(1, self._running_in_pools // self.settings.parallel.dp)
        groups, frames = {}, Counter[str]()
        for pool in self.config.pools:
            if not pool.per_request:  # states after drafts are frames of the group whose states they may become
                groups[pool.group.name] = pool.group
                frames[pool.group.name] += pool.frames + PADDING
        counts = tuple(frames[name] - PADDING for name in groups)
        return MemoryPlan(
            page_size=self.page_size,
            groups=tuple(groups.values()),
            frames=counts,
            at_rest=frames_at_rest(tuple(groups.values()), counts, self.configurator.options, self.page_size),
            num_pages=self._num_pages + self._passed_pages(max_requests),
            token_ranks=self.settings.parallel.dcp,
            context=self.context,
            max_requests=max_requests,
            speculation=self.settings.speculative_config,
            vector_bytes=self.spec.hidden_size * self.spec.dtype.itemsize,
            hot=self.configurator.options.hot,
        )

    @property
    def floating(self) -> MemoryPlan:
        """`split` with an arena, if its groups may share one. Its bytes are all of the budget, and no more requests run
        than it has states for."""
        plan, settings = self.split, self.settings
        groups = in_arena(plan.groups)
        if not groups or plan.groups_on_host or len(self.stages) > 1:
            return plan
        full = int(groups[1].reach.whole)
        other = groups[1 - full]
        budget = self.kv_bytes if settings.max_total_tokens is None else self.config.bytes
        one, two = (group.layout.bytes_per_frame for group in groups)
        arena, options = ArenaLayout(budget, (one, two)), self.configurator.options
        least = pages_for(options.window_tokens(other.reach, self.page_size), self.tokens_per_page)
        max_requests = max(1, self._asked // settings.parallel.dp)
        if other.reach.in_place:
            least = plan.tokens_per_step
            max_requests = min(max_requests, options.requests_in(arena.most(1 - full)))
        num_pages = arena.most(full, least)
        if num_pages < 1:
            return plan
        kept = [at for at, group in enumerate(plan.groups) if group.name in (each.name for each in groups)]
        frames, at_rest = (tuple(counts[at] for at in kept) for counts in (plan.frames, plan.at_rest))
        return replace(
            plan,
            groups=groups,
            frames=frames,
            at_rest=at_rest,
            arena=arena,
            num_pages=num_pages,
            max_requests=max(1, max_requests),
        )

    def room_in_arena(self, length: int, *, beside_cache: bool = False) -> int | None:
        """Requests of `length` tokens that an arena of this rank has room for, with the states that each uses; None if
        its groups share none. `beside_cache`: those that run at once, with one state each and those after drafts, where
        a part is spared for what is cached. Of the largest request one runs."""
        plan = self.floating
        if plan.arena is None:
            return None
        pages, frames = max(1, plan.pages_of(length)), []
        for group in plan.groups:
            kept = pages_for(self.configurator.options.window_tokens(group.reach, self.page_size), self.tokens_per_page)
            states = 1 if beside_cache else self.configurator.options.states_per_request
            states += plan.tokens_per_step - 1
            frames.append(states if group.reach.in_place else pages if group.reach.kind == "full" else min(pages, kept))
        each = sum(n * stride for n, stride in zip(frames, plan.arena.strides, strict=True))
        spared = plan.arena.room // SPARED if beside_cache and self.settings.enable_prefix_caching else 0
        found = max((plan.arena.room - spared) // each, int(length <= plan.largest_request))
        return found * self.settings.parallel.dp

    @property
    def _num_pages(self) -> int:
        """Page ids of the tokens. A pool of states alone counts a mean request for each, and needs no id for all."""
        pages = self.config.max_total_num_tokens // self.tokens_per_page
        return pages if self.full_tokens is not None else min(pages, MOST_IDS // 2 // self.tokens_per_page)

    def _passed_pages(self, max_requests: int) -> int:
        """Page ids beside those with frames, for passed pages of requests of a model of windows and states only.

        0 if a pool of any stage is too small for a window, so that a request must fit into it as a whole.
        """
        step = self.tokens_per_page
        for pool in (pool for one in self.stages for pool in one.pools):
            reach = pool.group.reach
            if reach.kind == "full":
                return 0
            kept = self.configurator.options.window_tokens(reach, self.page_size)
            if not reach.in_place and pool.frames * step < kept + step:
                return 0
        return min(max_requests * pages_for(self.context, self.tokens_per_page), _MOST_PASSED_PAGES)

    @property
    def tokens_per_page(self) -> int:
        """Tokens of one page, over the ranks that share it."""
        return self.page_size * self.settings.parallel.dcp

    @property
    def state_slots(self) -> int | None:
        """States that every stage with states has; None without any."""
        return min((one.state_slots for one in self.stages if one.state_slots is not None), default=None)

    @property
    def hot_rows(self) -> int | None:
        """Requests for which an attention group has hot buffers; None if latents are on the device."""
        return next((pool.requests for pool in self.config.pools if pool.per_request), None)

    @property
    def window_tokens(self) -> int | None:
        """Tokens of the smallest window pool of all stages; None without any."""
        found = [one.swa_max_total_num_tokens for one in self.stages]
        return min((tokens for tokens in found if tokens is not None), default=None)

    @property
    def full_tokens(self) -> int | None:
        """Tokens of the full pools; None for a model of windows and states only."""
        has_full = any(one.full_max_total_num_tokens is not None for one in self.stages)
        return self.config.max_total_num_tokens if has_full else None

    @property
    def max_running_requests(self) -> int:
        """Requests that may run at once, over all attention groups: as given, by default 256, limited by the states
        and by the hot buffers."""
        arena = self.memory.arena
        if arena is None:
            return self._running_in_pools
        states = [at for at, group in enumerate(self.memory.groups) if group.reach.in_place]
        most = [self.configurator.options.requests_in(arena.most(at)) * self.settings.parallel.dp for at in states]
        return min(self._asked, *(max(1, n) for n in most)) if most else self._asked

    @property
    def _asked(self) -> int:
        return self.settings.concurrency or self.settings.max_running_requests

    @property
    def _running_in_pools(self) -> int:
        found, dp = [self._asked], self.settings.parallel.dp
        if self.state_slots is not None:
            found.append(self.configurator.options.requests_in(self.state_slots) * dp)
        return min(found + [pool.requests * dp for pool in self.config.pools if pool.per_request])

    @property
    def bytes_per_token(self) -> Fraction:
        """Bytes that one more token takes on this rank, over all pools that grow with it."""
        return self.config.coeff

    @property
    def largest_request(self) -> int:
        """The longest request ever admitted, prompt and output together, in tokens."""
        return self.memory.largest_request

    @property
    def minimum_reusable_prefix(self) -> int | None:
        """Tokens that two prompts must share before any are reused; None without prefix caching.

        It is a page: a state, too, can be stored at the end of any page.
        """
        return self.tokens_per_page if self.settings.enable_prefix_caching else None

    @property
    def tokens(self) -> int:
        """Tokens of the pools, or the most that an arena holds."""
        return self.config.max_total_num_tokens if self.memory.arena is None else self.memory.num_tokens

    def requests_at(self, length: int) -> int:
        """Requests of `length` tokens, prompt and output together, that run at once, over all attention groups."""
        room = self.room_for(length)
        if self.memory.arena is not None and length <= self.largest_request:
            room = self.room_in_arena(length, beside_cache=True) or 0
        return min(room, self.max_running_requests)

    def room_for(self, length: int) -> int:
        """Requests of `length` tokens that the memory has room for, whether or not as many may run."""
        if self.memory.arena is None:
            return self.room_in_pools(length)
        return (self.room_in_arena(length) or 0) if length <= self.largest_request else 0

    def room_in_pools(self, length: int) -> int:
        """As `room_for`, with a pool for each group."""
        memory = self.split
        if length > memory.largest_request:
            return 0
        pages = max(1, memory.pages_of(length))
        found = []
        for pool in (pool for one in self.stages for pool in one.pools):
            if pool.per_request:
                found.append(pool.requests)
            elif pool.group.reach.kind == "full":
                found.append(pool.frames // pages)
            elif pool.group.reach.kind in ("window", "chunk"):
                kept = self.configurator.options.window_tokens(pool.group.reach, self.page_size)
                found.append(pool.frames // min(pages, pages_for(kept, self.tokens_per_page)))
        if self.state_slots is not None:
            found.append(self.configurator.options.requests_in(self.state_slots))
        return min(found) * self.settings.parallel.dp

    @property
    def required(self) -> int:
        """Requests of the full context that must fit at once."""
        return self.settings.concurrency or 1

    @property
    def fits(self) -> bool:
        """Whether that many do."""
        return self.requests_at(self.context) >= self.required

    def bytes_for(self, tokens: int) -> int:
        """The KV memory of this rank from which a plan holds that many tokens."""
        pages = pages_for(tokens, self.tokens_per_page)
        return self.configurator.bytes_for(pages * self.tokens_per_page, self.page_size)


# -- the pools of an engine at another size of its KV memory: the same plan, with fewer tokens


def size_within(plan: Plan, num_bytes: int) -> MemoryPlan:
    """The plan of the most tokens whose pools on the device take at most `num_bytes`, and no more than `plan` has.
    Requests, hot buffers and latents in host memory stay as they are. Raises PlanError if that is less than a page."""
    step, whole = plan.tokens_per_page, plan.memory
    if num_bytes >= whole.pool_bytes:
        return whole
    most = plan.config.max_total_num_tokens // step

    def size(pages: int) -> int:
        try:
            return _sized(plan, pages * step).pool_bytes
        except PlanError:  # too few for the largest window, so that more are needed
            return 0

    found = bisect_right(range(1, most), num_bytes, key=size)
    if not found:
        least = _sized(plan, step)
        pools = ", ".join(
            f"{group.name} {format_bytes((least.device_frames_of(index) + 1) * group.layout.bytes_per_frame)}"
            for index, group in enumerate(least.groups)
        )
        raise PlanError(
            f"{format_bytes(num_bytes)} of KV memory cannot hold one page of {step:,} tokens: the smallest pools take "
            f"{format_bytes(least.pool_bytes)} ({pools}), each with a padding frame.",
            fix=f"give at least {round_up_bytes(least.pool_bytes)}.",
        )
    return _sized(plan, found * step, num_bytes)


def _sized(plan: Plan, tokens: int, num_bytes: int = 0) -> MemoryPlan:
    """Pools for so many tokens, or an arena of `num_bytes`, which have room for them, if the plan has one."""
    solve, whole = plan.configurator.calculate_pool_sizes_from_max_tokens, plan.memory
    config = solve(tokens, plan.page_size, available_bytes=plan.kv_bytes)
    sized = replace(plan, config=config, stages=(config,), kv_bytes=num_bytes)
    if whole.arena is None:
        return sized.split.within(whole)
    return sized.memory.within(whole) if num_bytes else sized.split.within(plan.split)
