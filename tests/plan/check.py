"""A second planner, written from the published formulas, and a check that compares it with the real one.

It knows no layouts: prices are typed as engines document them (bytes per token and layer), and tokens are found by
walking up page by page. Slow, and independent of everything in `quire.plan` but the entry points.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from quire.errors import PlanError
from quire.plan.mix import uniform
from quire.plan.parallel import Parallelism
from quire.plan.planner import create_memory_pool_configurator, make_plan
from quire.plan.settings import PlanSettings
from quire.spec.hisparse import HiSparseConfig
from quire.spec.kv_format import KV_FORMATS
from quire.spec.layers import AttentionCall, LatentCall, StateCall
from quire.spec.layout import DType
from quire.spec.model import ModelSpec
from quire.spec.speculation import SpeculativeConfig

BITS = {"bfloat16": 16.0, "fp8_e4m3": 8.0, "mxfp8": 8 + 8 / 32, "nvfp4": 4 + 8 / 16, "fp4_e2m1": 4 + 8 / 16}


@dataclass(frozen=True)
class Case:
    """A model and how it is planned, in numbers only."""

    full: int  # layers
    window: int
    states: int
    latent: bool
    owners: int  # latent layers with an indexer
    kv_heads: int
    key_dim: int
    value_dim: int
    reach: int
    kept: str
    tp: int
    dcp: int
    page: int
    drafts: int
    ratio: Fraction
    slots: int

    @property
    def full_row(self) -> int:
        """Bytes of one token in the full pools, all layers of a rank."""
        layers = self.full + self.drafts
        if self.latent:
            row = 656 if BITS[self.kept] == 8 else 576 * BITS[self.kept] / 8
            owners = self.owners + (self.drafts if self.owners else 0)
            return int(layers * row + owners * 132)
        return int(layers * self._heads_row())

    @property
    def window_row(self) -> int:
        return int(self.window * self._heads_row())

    def _heads_row(self) -> float:
        return max(1, self.kv_heads // self.tp) * (self.key_dim + self.value_dim) * BITS[self.kept] / 8

    @property
    def state(self) -> int:
        """One state: a convolution of 96 channels and 3 columns in bfloat16, and 8 heads of 16 by 32 in float32."""
        return self.states * (96 // self.tp * 3 * 2 + 8 // self.tp * 16 * 32 * 4)

    def pool_bytes(self, tokens: int) -> tuple[int, int, int]:
        """Bytes of the full, window and state pools at that many tokens, each with its padding."""
        step = self.page * self.dcp
        full = (tokens // step + 1) * self.page * self.full_row
        window = (int(tokens * self.ratio) // step + 1) * self.page * self.window_row if self.window else 0
        state = (self.slots + 1) * self.state if self.states else 0
        return full, window, state


def pool_settings(
    *, chunk: int = 0, token_ranks: int = 1, host_to_device_ratio: Fraction | None = None, **given: Any
) -> PlanSettings:
    """What a configurator reads, with no prompt tokens in a step unless `chunk` says so."""
    if host_to_device_ratio is not None:
        given["hisparse"] = HiSparseConfig(host_to_device_ratio=float(host_to_device_ratio))
    settings = PlanSettings(parallel=Parallelism(tp=token_ranks, dcp=token_ranks), **given)
    return settings.changed(max_num_batched_tokens=chunk)


def random_case(rng: random.Random) -> Case:
    latent = rng.random() < 0.3
    tp = rng.choice([1, 2, 4])
    full = rng.randint(1, 6)
    return Case(
        full=full,
        window=0 if latent else rng.choice([0, 0, 1, 5]),
        states=rng.choice([0, 0, 3]),
        latent=latent,
        owners=rng.randint(1, full) if latent else 0,
        kv_heads=rng.choice([4, 8]),
        key_dim=rng.choice([64, 128, 192]),
        value_dim=rng.choice([64, 128]),
        reach=rng.choice([32, 128, 1000]),
        kept=rng.choice(["bfloat16", "fp8_e4m3"] if latent else list(BITS)),
        tp=tp,
        dcp=rng.choice([1, tp]) if latent else 1,
        page=rng.choice([1, 16, 64]),
        drafts=rng.choice([0, 0, 1]),
        ratio=rng.choice([Fraction(1, 10), Fraction(4, 5)]),
        slots=rng.choice([3, 10]),
    )


def spec_of(case: Case) -> ModelSpec:
    full = AttentionCall(kv_heads=case.kv_heads, key_dim=case.key_dim, value_dim=case.value_dim)
    window = AttentionCall(kv_heads=case.kv_heads, key_dim=case.key_dim, value_dim=case.value_dim, window=case.reach)
    state = StateCall(kernel=4, channels=96, heads=8, matrix=(16, 32))
    owner = LatentCall(rank=512, rope_dim=64, sparse=True, index_dim=128)
    sharer = LatentCall(rank=512, rope_dim=64, sparse=True)
    layers = [full] * case.full if not case.latent else [owner] * case.owners + [sharer] * (case.full - case.owners)
    return ModelSpec(
        architecture="random",
        layers=tuple((call,) for call in (*layers, *[window] * case.window, *[state] * case.states)),
        context_length=2**20,
        vocab_size=8,
        dtype=DType.BFLOAT16,
    )


def check_plan(seed: int) -> None:
    """Plan a random model in a random budget, and compare with the second planner to the byte."""
    rng = random.Random(seed)
    case = random_case(rng)
    step = case.page * case.dcp
    wanted = rng.randint(1, 40) * step + rng.choice([0, case.reach * 20])
    wanted -= wanted % step
    budget = sum(case.pool_bytes(wanted)) + rng.randint(0, case.page * case.full_row - 1)
    settings = PlanSettings(
        kv_memory=budget,
        kv_dtype=case.kept,
        page_size=case.page,
        parallel=Parallelism(tp=case.tp, dcp=case.dcp),
        speculative_config=SpeculativeConfig(method="eagle", num_steps=1, num_draft_tokens=1)
        if case.drafts and not case.states
        else None,
        swa_full_tokens_ratio=case.ratio,
        max_mamba_cache_size=case.slots,
    )
    if case.states and case.drafts:
        return  # drafted states have a pool of their own, with tests of their own
    holds = int(wanted * case.ratio) // step * step > case.reach + step
    try:
        plan = make_plan(spec_of(case), settings)
    except PlanError:
        assert case.window and not holds_at_most(case, budget, step), f"{case} was refused and fits"
        return
    found = plan.config
    assert not case.window or found.swa_max_total_num_tokens > case.reach + step, f"{case}: no request can run"
    full, window, state = case.pool_bytes(found.max_total_num_tokens)
    sizes = {pool.name: pool.bytes for pool in found.pools}
    assert sizes["full"] + sizes.get("indexer", 0) == full, f"{case}: full pools"
    assert (sizes.get("window", 0), sizes.get("state", 0)) == (window, state), f"{case}: other pools"
    assert full + window + state <= budget, f"{case}: more than the budget"
    # One page more never fits, but for what the floor of the window pool leaves over: less than one of its frames.
    beyond = sum(case.pool_bytes(found.max_total_num_tokens + 2 * step))
    assert beyond > budget, f"{case}: {found.max_total_num_tokens} tokens, and two pages more would fit"
    assert found.max_total_num_tokens % step == 0
    check_cap(case, found.max_total_num_tokens // 2, holds)


def holds_at_most(case: Case, budget: int, step: int) -> bool:
    """Whether the window pool of the most tokens that fit holds a request."""
    tokens = 0
    while sum(case.pool_bytes(tokens + step)) <= budget:
        tokens += step
    return tokens > 0 and int((tokens - step) * case.ratio) // step * step > case.reach + step


def check_cap(case: Case, tokens: int, holds: bool) -> None:
    """A cap gives the pools that many tokens cost, the window pool among them."""
    step = case.page * case.dcp
    tokens -= tokens % step
    if tokens < step or case.states:
        return
    spec = spec_of(case)
    options = pool_settings(mix=uniform(100, "x"), token_ranks=case.dcp, swa_full_tokens_ratio=case.ratio)
    solve = create_memory_pool_configurator(
        lambda page: spec.groups(page, KV_FORMATS[case.kept], tp=case.tp), options, page_size=case.page
    )
    try:
        capped = solve.calculate_pool_sizes_from_max_tokens(tokens, case.page)
    except PlanError:
        assert case.window
        return
    bare = Case(**{**{f: getattr(case, f) for f in case.__dataclass_fields__}, "drafts": 0})
    assert capped.bytes == sum(bare.pool_bytes(tokens)), f"{case}: a cap of {tokens} tokens"
