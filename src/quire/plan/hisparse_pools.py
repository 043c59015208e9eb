"""The pools of a plan whose latents, or keys and values, are in host memory (HiSparse)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from quire.errors import PlanError
from quire.plan.budget import format_bytes, round_up_bytes
from quire.plan.configurator import HybridSWAPoolConfigurator, MemoryPoolConfig, PoolRule
from quire.plan.settings import PlanSettings
from quire.spec.group import GroupSpec
from quire.spec.layers import FULL_GROUP
from quire.spec.record_size import most_records

OF_BUFFERS = "-hot"
"""After the name of a group: the pool of its hot buffers."""


class HiSparsePoolConfigurator(HybridSWAPoolConfigurator):
    """Index keys or bounds of pages, hot buffers and windows on the device, latents or keys and values in host memory.

    With `host_to_device_ratio` r, host memory has r tokens for each token of a hot buffer, so

        tokens = bytes / (bytes of a token's index keys + bytes of its latents / r)

    and the hot buffers bound the running requests. Otherwise there are buffers for `concurrency`, if given, or for as
    many requests of the mix as the tokens are, at least one and at most `max_running_requests`. Tokens are not more
    than host memory has room for.
    """

    _SMALLER = "lower the device_buffer_size"

    @staticmethod
    def suits(groups: Sequence[GroupSpec], options: PlanSettings) -> bool:
        return options.hot is not None

    def calculate_pool_sizes(self, available_bytes: int, page_size: int) -> MemoryPoolConfig:
        """As for all pools; with fewer tokens if host memory has no room. Raises PlanError if a ratio asks for more."""
        config = super().calculate_pool_sizes(available_bytes, page_size)
        options, hot = self.options, self.options.hot
        assert hot is not None
        if options.latent_bytes is None:
            return config
        latents = next(pool for pool in config.pools if pool.on_host)
        frames = most_records(latents.bytes_per_frame, options.latent_bytes)
        if frames >= latents.frames:
            return config
        if _ratio(options) is not None or frames < 1:
            raise PlanError(
                f"{hot.contents} of {latents.frames * page_size:,} tokens take {format_bytes(latents.bytes)} "
                f"of host memory, and {format_bytes(options.latent_bytes)} may be used.",
                fix=f"use --host-memory {round_up_bytes(2 * latents.bytes).replace(' ', '')} or more (an engine gives "
                f"{hot.contents} half of it), a lower host_to_device_ratio, or less KV memory.",
            )
        return self.calculate_pool_sizes_from_max_tokens(frames * page_size, page_size, available_bytes=available_bytes)

    def _rules(self, page_size: int, budget: int | None, tokens: int | None) -> list[PoolRule]:
        rules = super()._rules(page_size, budget, tokens)
        latents = next(rule for rule in rules if rule.group.name == FULL_GROUP)
        hosted = replace(latents, on_host=True, why=f"{latents.why}, in host memory")
        return [hosted, *(rule for rule in rules if rule is not latents), self._buffer_rule(latents.group, page_size)]

    def _buffer_rule(self, latents: GroupSpec, page_size: int) -> PoolRule:
        options, hot = self.options, self.options.hot
        assert hot is not None
        ratio, asked, each = _ratio(options), options.group_requests, hot.frames_per_row(page_size)
        per_token, least, most = Fraction(0), asked or 1, asked or options.group_rows
        if ratio is not None:
            per_token, least, why = 1 / (ratio * page_size), 1, f"1 / {float(ratio):g} of the tokens in host memory"
        elif asked is not None:
            why = f"for {asked:,} requests, as asked for"
        else:
            per_token = each * options.expected.requests_per_token(page_size)
            why = f"for {options.expected.source} in host memory, at most {most:,}"
        return PoolRule(
            group=latents,
            part=OF_BUFFERS,
            per_token=per_token,
            minimum=least * each,
            maximum=most * each,
            per_request=each,
            why=f"buffers of {hot.buffer_size:,} tokens and the newest one, {why}",
        )


def _ratio(options: PlanSettings) -> Fraction | None:
    """Tokens in host memory per token of a hot buffer, if given."""
    ratio = options.hisparse.host_to_device_ratio if options.hisparse is not None else None
    return None if ratio is None else Fraction(str(ratio))
