"""Pool configurators: from bytes, or from a token count, to the frames of every pool. One solve, one formula.

    bytes = tokens * coeff + bias

Prices come from the `PageLayout` that builds the tensors. `coeff` is bytes per token of `max_total_num_tokens` over all
pools, and may be a fraction. `bias` is the bytes that do not depend on tokens: padding frames, chunks in flight,
states.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from quire.errors import PlanError
from quire.plan.budget import format_bytes, round_up_bytes
from quire.plan.settings import PlanSettings, ragged
from quire.spec.group import GroupSpec
from quire.spec.layout import PER_PAGE
from quire.spec.pages import floor_to_page, pages_for
from quire.spec.record_size import region_bytes
from quire.spec.speculation import get_verified_tokens

GroupsAt = Callable[[int], tuple[GroupSpec, ...]]
"""A function from a page size to the groups of one rank."""

OF_DRAFTS = "-draft"  # after the name of a group: the pool of its states after drafted tokens
PADDING = 1  # frame 0 of every pool, to which padded tokens write


class NoRoom(PlanError):
    """Fewer bytes than the smallest pools take. `left` are those of the device; negative: the rest takes too many."""

    def __init__(self, message: str, *, fix: str = "", left: int = 0) -> None:
        super().__init__(message, fix=fix)
        self.left = left


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSize:
    """One pool of one rank. `frames` excludes the padding frame, which `bytes` includes. `why` explains the number.

    The frames of a pool in host memory are records. A second pool of a group has a `part` after the group's name. A
    pool of buffers of running requests has frames for each, `per_request`, which are no frames of the group.
    """

    group: GroupSpec
    frames: int
    why: str
    part: str = ""
    per_request: int = 0
    on_host: bool = False

    @property
    def name(self) -> str:
        """The group's name, and the part."""
        return self.group.name + self.part

    @property
    def requests(self) -> int:
        """Running requests that have a buffer here, in a pool of buffers."""
        return self.frames // self.per_request

    @property
    def bytes_per_frame(self) -> int:
        """Bytes of one frame, all layers of this rank."""
        return self.group.layout.bytes_per_frame

    @property
    def bytes(self) -> int:
        """Bytes of the pool's tensors, or of its records."""
        if self.on_host:
            return region_bytes(self.bytes_per_frame, self.frames)
        return (self.frames + PADDING) * self.bytes_per_frame


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPoolConfig:
    """The result of a configurator; sizes are of one rank, tokens those that the ranks sharing pages hold together.

    `max_total_num_tokens` is what the server can hold at once, in pages of `tokens_per_page`.
    """

    max_total_num_tokens: int
    tokens_per_page: int
    pools: tuple[PoolSize, ...]
    coeff: Fraction
    bias: int

    @property
    def bytes(self) -> int:
        """Bytes of all pools' tensors on the device."""
        return sum(pool.bytes for pool in self.pools if not pool.on_host)

    @property
    def full_max_total_num_tokens(self) -> int | None:
        """Tokens of the full pools; None without any."""
        return self.max_total_num_tokens if any(pool.group.reach.kind == "full" for pool in self.pools) else None

    @property
    def swa_max_total_num_tokens(self) -> int | None:
        """Tokens of the smallest window pool; None without any."""
        return min((pool.frames * self.tokens_per_page for pool in self.pools if _slides(pool.group)), default=None)

    @property
    def state_slots(self) -> int | None:
        """Recurrent states without those after drafted tokens; None without any."""
        return next((pool.frames for pool in self.pools if pool.group.reach.kind == "state"), None)

    @property
    def compressed_max_total_num_tokens(self) -> dict[int, int]:
        """Entries of the full pools by compression ratio."""
        fields = [field for pool in self.pools if not _slides(pool.group) for field in pool.group.layout.fields]
        return {per: self.max_total_num_tokens // per for per in sorted({f.per for f in fields} - {1, PER_PAGE})}


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRule:
    """How a pool follows the tokens.

    It has `floor(tokens * per_token)` frames, from `minimum` to `maximum`, `fixed` more, and one for padding. Frames of
    buffers come `per_request` at once, which divides minimum and maximum. A pool in host memory takes no bytes of the
    device. `part` as in `PoolSize`.
    """

    group: GroupSpec
    per_token: Fraction
    fixed: int = 0
    minimum: int = 0
    maximum: int | None = None
    part: str = ""
    per_request: int = 0
    on_host: bool = False
    why: str

    def frames(self, tokens: int) -> int:
        """Frames, without the padding frame, at `tokens` of `max_total_num_tokens`."""
        share = tokens * self.per_token.numerator // self.per_token.denominator
        return int(self._within(share - share % max(1, self.per_request))) + self.fixed

    @property
    def bytes_per_frame(self) -> int:
        """Bytes of one frame on the device, all layers of this rank."""
        return 0 if self.on_host else self.group.layout.bytes_per_frame

    def bytes(self, tokens: int) -> int:
        """Bytes of the pool at that many tokens."""
        return (self.frames(tokens) + PADDING) * self.bytes_per_frame

    def most_bytes(self, tokens: int) -> int:
        """`bytes`, before the share is rounded down to whole frames: the size that the budget must allow."""
        frames = self._within(tokens * self.per_token) + self.fixed + PADDING
        return math.ceil(frames * self.bytes_per_frame)

    def line(self, tokens: Fraction) -> tuple[Fraction, int]:
        """Bytes per token, and bytes at no tokens, of the line that the pool's bytes follow from `tokens` on."""
        share = tokens * self.per_token
        if share < self.minimum or not self.per_token:
            resting = self.minimum
        elif self.maximum is not None and share >= self.maximum:
            resting = self.maximum
        else:
            return self.per_token * self.bytes_per_frame, (self.fixed + PADDING) * self.bytes_per_frame
        return Fraction(0), (resting + self.fixed + PADDING) * self.bytes_per_frame

    @property
    def turns(self) -> list[Fraction]:
        """The tokens at which the pool begins and ceases to grow."""
        return [end / self.per_token for end in (self.minimum, self.maximum) if end and self.per_token]

    def _within(self, share: int | Fraction) -> int | Fraction:
        found = max(self.minimum, share)
        return found if self.maximum is None else min(found, self.maximum)


class MemoryPoolConfigurator:
    """Sizes the pools of one rank. Subclasses say how one kind of group follows the tokens; the solve is here.

    Both entry points raise PlanError if a pool would be below its minimum, and the errors of `groups_at`.
    """

    _SMALLER = "lower the page size"

    @staticmethod
    def suits(groups: Sequence[GroupSpec], options: PlanSettings) -> bool:
        """Whether it is for these groups, if none of the configurators before it is."""
        return True

    def __init__(self, groups_at: GroupsAt, options: PlanSettings) -> None:
        self._groups_at = groups_at
        self.options = options

    def calculate_pool_sizes(self, available_bytes: int, page_size: int) -> MemoryPoolConfig:
        """The most tokens, in whole pages, whose pools use at most `available_bytes`, and those pools."""
        rules = self._rules(page_size, available_bytes, None)
        step = page_size * self.options.token_ranks
        coeff, bias = _line(rules, available_bytes)
        if available_bytes < bias:
            tokens = 0
        elif coeff:
            tokens = floor_to_page(int((available_bytes - bias) / coeff), step)
        else:  # states alone, in a given number: the tokens of their requests
            tokens = max(step, floor_to_page(rules[0].fixed * self.options.expected.mean, step))
        if tokens < step or sum(rule.bytes(tokens) for rule in rules) > available_bytes:
            raise self._too_small(rules, step, available_bytes)
        return self._config(rules, tokens, page_size)

    def limits_tokens(self, page_size: int) -> bool:
        """Whether some pool grows with the tokens. None does if there are only states, in a given number."""
        return any(rule.per_token for rule in self._rules(page_size, None, page_size))

    def bytes_for(self, max_total_num_tokens: int, page_size: int) -> int:
        """The smallest budget from which `calculate_pool_sizes` gives that many tokens, a multiple of the page."""
        rules = self._rules(page_size, None, max_total_num_tokens)
        coeff, bias = _line(rules, tokens=max_total_num_tokens)
        return math.ceil(max_total_num_tokens * coeff + bias)

    def calculate_pool_sizes_from_max_tokens(
        self, max_total_num_tokens: int, page_size: int, *, available_bytes: int | None = None
    ) -> MemoryPoolConfig:
        """All pools at that many tokens, rounded down to whole pages: a cap shrinks every pool, not only the full one.

        `available_bytes` is the budget for which `calculate_pool_sizes` gave as many tokens or more: it limits a ratio
        of bytes, whose states were rounded down before the tokens were found.
        """
        step = page_size * self.options.token_ranks
        tokens = floor_to_page(max_total_num_tokens, step)
        if tokens < step:
            raise PlanError(
                f"{max_total_num_tokens:,} tokens are less than one page of {step:,}.", fix=f"allow at least {step:,}."
            )
        rules = self._rules(page_size, available_bytes, tokens)
        return self._config(rules, tokens, page_size)

    def _rules(self, page_size: int, budget: int | None, tokens: int | None) -> list[PoolRule]:
        """A rule for each pool, from the budget, or the tokens to size for, or both."""
        return [self._full_rule(group, page_size) for group in self._groups_at(page_size)]

    def _full_rule(self, group: GroupSpec, page_size: int) -> PoolRule:
        step = page_size * self.options.token_ranks
        return PoolRule(group=group, per_token=Fraction(1, step), why=f"one frame per {step:,} tokens")

    def _config(self, rules: Sequence[PoolRule], tokens: int, page_size: int) -> MemoryPoolConfig:
        coeff, bias = _line(rules, tokens=tokens)
        config = MemoryPoolConfig(
            max_total_num_tokens=tokens,
            tokens_per_page=page_size * self.options.token_ranks,
            pools=tuple(
                PoolSize(
                    group=rule.group,
                    frames=rule.frames(tokens),
                    why=rule.why,
                    part=rule.part,
                    per_request=rule.per_request,
                    on_host=rule.on_host,
                )
                for rule in rules
            ),
            coeff=coeff,
            bias=bias,
        )
        self._check(config)
        return config

    def _check(self, config: MemoryPoolConfig) -> None:
        """Raise PlanError if a pool cannot hold one request."""

    def _too_small(self, rules: Sequence[PoolRule], step: int, have: int) -> NoRoom:
        need = sum(rule.most_bytes(step) for rule in rules)
        pools = ", ".join(
            f"{rule.group.name + rule.part} {format_bytes(rule.bytes(step))}" for rule in rules if not rule.on_host
        )
        chunked = any(_slides(rule.group) and rule.fixed for rule in rules)
        smaller = "allow fewer prompt tokens per step (--max-num-batched-tokens)" if chunked else self._SMALLER
        return NoRoom(
            f"{format_bytes(have)} of KV memory cannot hold one page of {step:,} tokens: the smallest pools take "
            f"{format_bytes(need)} ({pools}), each with a padding frame.",
            fix=f"give at least {round_up_bytes(need)}, or {smaller}.",
        )


class DefaultPoolConfigurator(MemoryPoolConfigurator):
    """Every pool grows with the tokens: keys and values, latents, indexers, with their scales."""


class HybridSWAPoolConfigurator(MemoryPoolConfigurator):
    """Full pools beside window pools; without a full pool, tokens are those of the window pool.

    A window pool has `swa_full_tokens_ratio` tokens per token of the full pools, if given. Otherwise its share is the
    need of the mix: for each request its window, the page in which the window starts and the reserve of a step, or all
    of the request if that is less; plus the prompt tokens of one step, which are written before the window passes.
    Without prefix caching, no pool is larger than `concurrency` can fill.
    """

    @staticmethod
    def suits(groups: Sequence[GroupSpec], options: PlanSettings) -> bool:
        return any(map(_slides, groups))

    def _rules(self, page_size: int, budget: int | None, tokens: int | None) -> list[PoolRule]:
        groups = self._groups_at(page_size)
        counted = self.options.windows_only
        return [
            self._full_rule(group, page_size) if counted or not _slides(group) else self._window_rule(group, page_size)
            for group in groups
            if group.reach.kind != "state"
        ]

    def _window_rule(self, group: GroupSpec, page_size: int) -> PoolRule:
        options, step = self.options, page_size * self.options.token_ranks
        kept, chunk = options.window_tokens(group.reach, page_size), pages_for(options.max_num_batched_tokens, step)
        most = None  # the most that all requests can hold, if nothing stays cached after them
        if options.group_requests is not None and not options.enable_prefix_caching:
            most = options.group_requests * pages_for(kept, step)
        ratio = options.swa_full_tokens_ratio
        if ratio is not None:
            most = most if most is None else most + chunk
            why = f"{float(ratio):g} of the full pools' tokens"
            why += "" if most is None else f", and at most {most * step:,} for {options.group_requests:,} requests"
            return PoolRule(group=group, per_token=ratio / step, maximum=most, why=why)
        share = options.expected.window_share(kept, step)
        return PoolRule(
            group=group,
            per_token=share / step,
            fixed=chunk,
            minimum=pages_for(kept, step),
            maximum=most,
            why=f"{float(share):.4g} of the full pools' tokens: at most {kept:,} of each of {options.expected.source}"
            + (f"; and {chunk * step:,} tokens for the prompt tokens of one step" if chunk else ""),
        )

    def _check(self, config: MemoryPoolConfig) -> None:
        step = config.tokens_per_page
        for pool in config.pools if not self.options.windows_only else ():
            need = pool.group.reach.tokens + step + ragged(pool.group.reach, step)
            if _slides(pool.group) and pool.frames * step <= need:
                raise PlanError(
                    f"the pool '{pool.name}' would hold {pool.frames * step:,} tokens, and one request needs more than "
                    f"{need:,}: its window of {pool.group.reach.tokens:,} and a page of {step:,}.",
                    fix="raise the ratio of window to full tokens, or leave it out to have it derived; or raise the "
                    "KV memory.",
                )


class RecurrentPoolConfigurator(HybridSWAPoolConfigurator):
    """States beside the other pools: a slot holds one whole state, of a running request or of a checkpoint.

    With `max_mamba_cache_size` there are that many slots; with `mamba_full_memory_ratio` their bytes are that multiple
    of the other pools', if there are any. Otherwise the mix decides: each of its requests needs `states_per_request`
    slots. Speculation also stores a state after every drafted token of every running request; slots and these copies
    are solved for together.
    """

    @staticmethod
    def suits(groups: Sequence[GroupSpec], options: PlanSettings) -> bool:
        return any(group.reach.kind == "state" for group in groups)

    def _rules(self, page_size: int, budget: int | None, tokens: int | None) -> list[PoolRule]:
        others = super()._rules(page_size, budget, tokens)
        state = next(group for group in self._groups_at(page_size) if group.reach.kind == "state")
        options = self.options
        if options.max_mamba_cache_size is not None:
            return [*others, *self._fixed(state, options.max_mamba_cache_size, "as many states as asked for")]
        ratio = options.mamba_full_memory_ratio
        if ratio is None or not others:
            return [*others, *self._derived(state, page_size)]
        shares = [] if budget is None else [budget * ratio / (1 + ratio)]
        if tokens is not None:
            shares.append(ratio * sum(rule.bytes(tokens) for rule in others))
        slots = self._slots_in(int(min(shares)), state.layout.bytes_per_frame)
        return [*others, *self._fixed(state, slots, f"{float(ratio):g} bytes of state per byte of the other pools")]

    @property
    def _drafted(self) -> int:
        """States that a step of one request adds: one after each token that it verifies."""
        return get_verified_tokens(self.options.speculative_config)

    def _slots_in(self, state_bytes: int, size: int) -> int:
        """Slots K of `(K + 1) + (K / s + 1) * D` states in `state_bytes`: s states per request, D drafted tokens."""
        whole = Fraction(state_bytes, size) - 1 - self._drafted
        return max(0, int(whole / (1 + Fraction(self._drafted, self.options.states_per_request))))

    def _fixed(self, state: GroupSpec, slots: int, why: str) -> list[PoolRule]:
        rule = PoolRule(group=state, per_token=Fraction(0), fixed=slots, why=why)
        running = self.options.requests_in(slots)
        running = min(running, self.options.group_requests or running)
        return [rule, *self._draft_rules(state, Fraction(0), running)]

    def _derived(self, state: GroupSpec, page_size: int) -> list[PoolRule]:
        options, asked = self.options, self.options.group_requests
        requests = options.expected.requests_per_token(page_size * options.token_ranks)
        slots = options.states_per_request
        why = f"{slots} per request of {options.expected.source}, " + (
            f"for about {options.expected.mean:,} tokens each" if asked is None else f"and for {asked:,} at least"
        )
        rule = PoolRule(group=state, per_token=slots * requests, minimum=slots * (asked or 1), why=why)
        return [rule, *self._draft_rules(state, requests if asked is None else Fraction(0), asked or 1)]

    def _draft_rules(self, state: GroupSpec, per_token: Fraction, requests: int) -> list[PoolRule]:
        """The pool of states after each drafted token: D for every running request and for the padding row."""
        extra = self._drafted
        rule = PoolRule(
            group=state,
            part=OF_DRAFTS,
            per_token=per_token * extra,
            fixed=extra - PADDING,
            minimum=requests * extra,
            why=f"a state after each of {extra} drafted tokens, per running request",
        )
        return [rule] if extra else []

    def _check(self, config: MemoryPoolConfig) -> None:
        super()._check(config)
        state = next(pool for pool in config.pools if pool.group.reach.kind == "state")
        if state.frames < 1:
            raise PlanError(
                f"no state slot would remain, and one request writes one of {format_bytes(state.bytes_per_frame)}.",
                fix=f"give at least {format_bytes((1 + PADDING) * state.bytes_per_frame)} to states: raise the KV "
                "memory or the ratio of states.",
            )


class CompressedPoolConfigurator(HybridSWAPoolConfigurator):
    """Windows of raw latents and compressors' rings, beside latents with one entry per several tokens.

    Layouts price them.
    """

    @staticmethod
    def suits(groups: Sequence[GroupSpec], options: PlanSettings) -> bool:
        return any(field.per > 1 for group in groups for field in group.layout.fields)


def _line(
    rules: Sequence[PoolRule], available_bytes: int | None = None, *, tokens: int | None = None
) -> tuple[Fraction, int]:
    """`coeff` and `bias` of the rules at a budget or at a number of tokens.

    Bytes are piecewise linear in the tokens: a pool at its minimum or maximum does not grow, so its bytes are in the
    bias. At a budget the piece is the last one that begins within it.
    """

    def line(at: Fraction) -> tuple[Fraction, int]:
        coeffs, biases = zip(*(rule.line(at) for rule in rules), strict=True)
        return sum(filter(None, coeffs), Fraction(0)), sum(biases)

    if available_bytes is None:
        return line(Fraction(tokens or 0))
    found = line(Fraction(0))
    for at in sorted(turn for rule in rules for turn in rule.turns):
        coeff, bias = line(at)
        if at * coeff + bias <= available_bytes:
            found = coeff, bias
    return found


def _slides(group: GroupSpec) -> bool:
    return group.reach.kind in ("window", "chunk")
