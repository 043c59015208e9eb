"""Configurators: the seeds' two entry points, exact inverses, and pools that follow budgets and caps."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from quire.errors import InvalidInput, PlanError
from quire.plan.configurator import (
    CompressedPoolConfigurator,
    DefaultPoolConfigurator,
    HybridSWAPoolConfigurator,
    MemoryPoolConfig,
    MemoryPoolConfigurator,
    RecurrentPoolConfigurator,
)
from quire.plan.hisparse_pools import HiSparsePoolConfigurator
from quire.plan.mix import Mix, mix_of, uniform
from quire.plan.planner import create_memory_pool_configurator
from quire.plan.settings import ragged
from quire.prefix.reach import reach_of
from quire.settings.setting import parse_bytes
from quire.spec.group import ReachSpec
from quire.spec.hisparse import HotBuffers
from quire.spec.kv_format import KV_FORMATS
from quire.spec.layers import AttentionCall, CompressedCall, LatentCall, StateCall
from quire.spec.layout import DType
from quire.spec.model import Layer, ModelSpec
from quire.spec.record_size import records_bytes
from quire.spec.speculation import SpeculativeConfig
from tests.changes import SPECS, slow_unless_changed
from tests.plan.check import pool_settings

GIB = 2**30

FULL = AttentionCall(kv_heads=8, key_dim=128, value_dim=128)
WINDOW = AttentionCall(kv_heads=8, key_dim=128, value_dim=128, window=1024)
STATE = StateCall(kernel=4, channels=2048, heads=16, matrix=(64, 128))
LATENT = LatentCall(rank=512, rope_dim=64, sparse=True, index_dim=128)
COMPRESSED = CompressedCall(nope_dim=448, rope_dim=64, window=128, ratio=4, overlap=True, index_dim=128)


def spec_of(*layers: Layer) -> ModelSpec:
    return ModelSpec(architecture="test", layers=layers, context_length=2**20, vocab_size=8, dtype=DType.BFLOAT16)


def windows_only(calls: Iterable[Any]) -> bool:
    attending = [call for call in calls if not isinstance(call, StateCall)]
    return bool(attending) and all(isinstance(call, AttentionCall) and call.window for call in attending)


def configurator(
    *calls: Any, page_size: int = 16, kv_format: str = "bfloat16", mix: Mix | None = None, **options: Any
) -> MemoryPoolConfigurator:
    spec = spec_of(*((call,) for call in calls))
    return create_memory_pool_configurator(
        lambda size: spec.groups(size, KV_FORMATS[kv_format]),
        pool_settings(
            mix=mix or uniform(8192, "requests of 8,192 tokens"), windows_only=windows_only(calls), **options
        ),
        page_size=page_size,
    )


def frames(config: MemoryPoolConfig) -> dict[str, int]:
    return {pool.name: pool.frames for pool in config.pools}


@pytest.mark.parametrize(
    ("calls", "kind"),
    [
        ((FULL,), DefaultPoolConfigurator),
        ((LATENT,), DefaultPoolConfigurator),
        ((FULL, WINDOW), HybridSWAPoolConfigurator),
        ((WINDOW,), HybridSWAPoolConfigurator),
        ((FULL, STATE), RecurrentPoolConfigurator),
        ((FULL, WINDOW, STATE), RecurrentPoolConfigurator),
        ((COMPRESSED,), CompressedPoolConfigurator),
    ],
)
def test_the_groups_choose_the_configurator(calls: tuple[Any, ...], kind: type) -> None:
    assert type(configurator(*calls, page_size=128)) is kind


def test_a_cell_of_plain_attention() -> None:
    """Llama 3 8B: 131,072 bytes a token, so 40 GiB are 327,680 tokens, one page of which is the padding."""
    config = configurator(*[FULL] * 32, page_size=16).calculate_pool_sizes(40 * GIB, 16)
    assert (config.coeff, config.bias) == (131_072, 131_072 * 16)
    assert config.max_total_num_tokens == config.full_max_total_num_tokens == 327_680 - 16
    assert config.bytes == 40 * GIB
    assert config.swa_max_total_num_tokens is None and config.state_slots is None


def test_the_worked_hybrid() -> None:
    """4 full and 20 window layers of 2,048 bytes each at a ratio of 0.8 cost 40,960 bytes a token."""
    full = AttentionCall(kv_heads=4, key_dim=128, value_dim=128)
    window = AttentionCall(kv_heads=4, key_dim=128, value_dim=128, window=128)
    solve = configurator(*[full] * 4, *[window] * 20, page_size=1, swa_full_tokens_ratio=Fraction(4, 5))
    config = solve.calculate_pool_sizes(20 * GIB + solve.bytes_for(1, 1) - 40_960, 1)
    assert config.coeff == 40_960
    assert (config.full_max_total_num_tokens, config.swa_max_total_num_tokens) == (524_288, 419_430)


def test_a_model_of_windows_only_has_no_ratio() -> None:
    plain = configurator(*[WINDOW] * 4, swa_full_tokens_ratio=Fraction(1, 10)).calculate_pool_sizes(GIB, 16)
    assert plain.full_max_total_num_tokens is None
    assert plain.swa_max_total_num_tokens == plain.max_total_num_tokens
    assert plain.coeff == 4 * 2 * 8 * 128 * 2


def test_a_cap_shrinks_every_pool() -> None:
    """A cap once shrank one side only; the other kept the bytes and requests failed on the small side."""
    solve = configurator(FULL, WINDOW, STATE, swa_full_tokens_ratio=Fraction(1, 2))
    free = solve.calculate_pool_sizes(8 * GIB, 16)
    capped = solve.calculate_pool_sizes_from_max_tokens(free.max_total_num_tokens // 2, 16)
    for name, count in frames(capped).items():
        assert count == pytest.approx(frames(free)[name] / 2, rel=0.01), name
    assert capped.bytes == pytest.approx(free.bytes / 2, rel=0.01)


@pytest.mark.parametrize(("tokens", "floored"), [(1600, 1600), (1615, 1600), (16, 16)])
def test_a_cap_is_floored_to_whole_pages(tokens: int, floored: int) -> None:
    assert configurator(FULL).calculate_pool_sizes_from_max_tokens(tokens, 16).max_total_num_tokens == floored


def test_less_than_a_page_is_refused() -> None:
    with pytest.raises(PlanError, match="less than one page"):
        configurator(FULL).calculate_pool_sizes_from_max_tokens(15, 16)
    with pytest.raises(PlanError, match="cannot hold one page"):
        configurator(FULL).calculate_pool_sizes(100, 16)


@pytest.mark.parametrize("ratio", [None, Fraction(4, 5)])
def test_a_window_pool_is_capped_by_requests_where_nothing_stays_cached(ratio: Fraction | None) -> None:
    given = {"mix": uniform(1200, "short requests"), "chunk": 512, "swa_full_tokens_ratio": ratio}
    kept = configurator(FULL, WINDOW, concurrency=4, **given).calculate_pool_sizes(GIB, 16)
    solve = configurator(FULL, WINDOW, concurrency=4, enable_prefix_caching=False, **given)
    config = solve.calculate_pool_sizes(GIB, 16)
    per_request = solve.options.window_tokens(ReachSpec("window", 1024), 16)
    assert config.swa_max_total_num_tokens == 4 * -(-per_request // 16) * 16 + 512
    assert config.max_total_num_tokens > 1.5 * kept.max_total_num_tokens
    assert config.bytes <= GIB < config.bytes + config.coeff * 16 + 1
    assert solve.bytes_for(config.max_total_num_tokens, 16) <= GIB
    assert solve.calculate_pool_sizes_from_max_tokens(config.max_total_num_tokens, 16).pools == config.pools
    few = solve.calculate_pool_sizes_from_max_tokens(1600, 16)
    assert few.bytes < config.bytes and few.swa_max_total_num_tokens < config.swa_max_total_num_tokens


def test_a_window_pool_that_holds_no_request_is_refused() -> None:
    """It must exceed the window and one page; the reference of the time started such a server and hung."""
    solve = configurator(FULL, WINDOW, swa_full_tokens_ratio=Fraction(1, 10))
    with pytest.raises(PlanError, match=r"one request needs more than 1,040") as caught:
        solve.calculate_pool_sizes(solve.bytes_for(10_400, 16), 16)
    assert "raise the ratio" in caught.value.fix
    found = solve.calculate_pool_sizes(solve.bytes_for(10_560, 16), 16)
    assert found.swa_max_total_num_tokens == 1056


@pytest.mark.parametrize(("size", "requests"), [(1, 1), (2, 1), (3, 1), (6, 2)])
def test_fewer_states_than_a_request_uses_are_for_one_request(size: int, requests: int) -> None:
    """It runs with the one it writes; checkpoints are optional work."""
    solve = configurator(FULL, STATE, max_mamba_cache_size=size)
    slots = solve.calculate_pool_sizes(GIB, 16).state_slots
    assert slots == size and solve.options.requests_in(slots) == requests


def test_no_state_is_refused() -> None:
    solve = configurator(FULL, STATE, mamba_full_memory_ratio=Fraction(1, 10**6))
    with pytest.raises(PlanError, match="no state slot would remain") as caught:
        solve.calculate_pool_sizes(GIB, 16)
    assert "raise the KV memory or the ratio" in caught.value.fix


def test_states_and_drafted_states_are_solved_for_together() -> None:
    """30 GiB of states of 100 MiB with 4 drafted tokens and 5 states a request: 167 slots, 306 without speculation."""
    state = StateCall(heads=100, matrix=(1024, 256))  # 100 MiB
    spec = spec_of((FULL,), (state,))

    def slots(speculation: SpeculativeConfig | None) -> int | None:
        options = pool_settings(
            mix=uniform(8192, "x"),
            speculative_config=speculation,
            mamba_full_memory_ratio=Fraction(1),
            concurrency=None,
        )
        solve = create_memory_pool_configurator(spec.groups, options, page_size=1)
        return solve.calculate_pool_sizes(60 * GIB, 1).state_slots

    assert slots(None) == 306
    # (307.2 - 1 - 4) / (1 + 4 / 3) with three states a request instead of the worked example's five
    assert slots(SpeculativeConfig(method="eagle", num_steps=3, num_draft_tokens=4)) == 129


def test_drafted_states_are_kept_for_every_request_and_the_padding_row() -> None:
    speculation = SpeculativeConfig(method="eagle", num_steps=3, num_draft_tokens=4)
    solve = configurator(FULL, STATE, max_mamba_cache_size=30, speculative_config=speculation)
    config = solve.calculate_pool_sizes(GIB, 16)
    assert config.state_slots == 30 and solve.options.requests_in(30) == 10
    assert frames(config)["state-draft"] + 1 == 4 * (10 + 1)


def test_compressed_entries_are_counted() -> None:
    config = configurator(COMPRESSED, page_size=128, kv_format="fp8_e4m3").calculate_pool_sizes(GIB, 128)
    assert dict(config.compressed_max_total_num_tokens) == {4: config.max_total_num_tokens // 4}
    with pytest.raises(InvalidInput, match="one entry per 4 tokens"):
        configurator(COMPRESSED, page_size=6)


@pytest.mark.parametrize("name", ["swa_full_tokens_ratio", "mamba_full_memory_ratio", "max_mamba_cache_size"])
@pytest.mark.parametrize("value", [0, -1])
def test_a_ratio_is_above_zero(name: str, value: int) -> None:
    with pytest.raises(InvalidInput, match=name):
        configurator(FULL, WINDOW, STATE, **{name: value})


def test_without_a_ratio_the_mix_splits_the_budget() -> None:
    """Short requests are all window; of long ones the window is a small part."""
    short = configurator(FULL, WINDOW, mix=uniform(512, "short")).calculate_pool_sizes(8 * GIB, 16)
    long = configurator(FULL, WINDOW, mix=uniform(131_072, "long")).calculate_pool_sizes(8 * GIB, 16)
    assert short.swa_max_total_num_tokens == pytest.approx(short.full_max_total_num_tokens, rel=0.01)
    assert long.swa_max_total_num_tokens < 0.02 * long.full_max_total_num_tokens
    assert long.max_total_num_tokens > 1.9 * short.max_total_num_tokens


# -- latents in host memory

HOT = HotBuffers(group=0, buffer_size=4096, top_k=2048)
INDEX, ROW = 132, 2 * 576  # bytes of a token of LATENT: its index key in 8 bits, and its latent in bfloat16


def test_a_ratio_couples_tokens_in_host_memory_and_on_the_device() -> None:
    """tokens = bytes / (index keys + latents / ratio); the buffers take what the latents' share pays for."""
    solve = configurator(LATENT, hot=HOT, host_to_device_ratio=Fraction(8))
    assert type(solve) is HiSparsePoolConfigurator
    config = solve.calculate_pool_sizes(GIB, 16)
    assert config.coeff == INDEX + Fraction(ROW, 8)
    assert config.max_total_num_tokens == int((GIB - 16 * (INDEX + ROW)) / config.coeff) // 16 * 16
    on_host, on_device, buffers = config.pools
    assert (on_host.name, on_device.name, buffers.name) == ("full", "indexer", "full-hot")
    assert on_host.frames == on_device.frames == config.max_total_num_tokens // 16
    assert buffers.frames % 257 == 0 and 0 <= config.max_total_num_tokens // 128 - buffers.frames < 257
    assert config.bytes == on_device.bytes + buffers.bytes <= GIB
    assert on_host.on_host and on_host.bytes == records_bytes([on_host.group], [on_host.frames])


def test_without_a_ratio_buffers_are_for_the_expected_requests() -> None:
    def held(**options: Any) -> tuple[int, int]:
        config = configurator(LATENT, hot=HOT, mix=uniform(65_536, "long"), **options).calculate_pool_sizes(GIB, 16)
        return config.pools[-1].frames // 257, config.max_total_num_tokens

    requests, tokens = held()
    assert requests == tokens // 65_536 == GIB // (65_536 * INDEX + 257 * 16 * ROW)
    assert held(concurrency=3)[0] == held(max_running_requests=3)[0] == 3
    assert held(concurrency=3)[1] == held(max_running_requests=3)[1] > tokens
    with pytest.raises(PlanError, match="smallest pools") as caught:
        held(concurrency=300)
    assert "lower the device_buffer_size" in caught.value.fix


def test_host_memory_bounds_the_tokens() -> None:
    free = configurator(LATENT, hot=HOT).calculate_pool_sizes(GIB, 16)
    enough = records_bytes([free.pools[0].group], [free.pools[0].frames])
    assert configurator(LATENT, hot=HOT, latent_bytes=enough).calculate_pool_sizes(GIB, 16) == free
    less = configurator(LATENT, hot=HOT, latent_bytes=enough - 1).calculate_pool_sizes(GIB, 16)
    assert free.max_total_num_tokens - 64 < less.max_total_num_tokens < free.max_total_num_tokens
    assert less.pools[0].bytes < enough and less.bytes <= free.bytes
    for asked in ({"latent_bytes": 4095}, {"latent_bytes": enough - 1, "host_to_device_ratio": Fraction(16)}):
        with pytest.raises(PlanError, match="of host memory") as caught:
            configurator(LATENT, hot=HOT, **asked).calculate_pool_sizes(GIB, 16)
        size = parse_bytes(caught.value.fix.split("--host-memory ")[1].split(" or")[0])
        found = configurator(LATENT, hot=HOT, **asked | {"latent_bytes": size}).calculate_pool_sizes(GIB, 16)
        assert found.bytes > 0.95 * GIB


# -- properties

attention = st.builds(
    AttentionCall,
    kv_heads=st.integers(1, 16),
    key_dim=st.sampled_from([32, 64, 128, 192, 256]),
    value_dim=st.sampled_from([32, 64, 128]),
)
sliding = st.builds(
    AttentionCall,
    kv_heads=st.integers(1, 16),
    key_dim=st.sampled_from([32, 64, 128]),
    value_dim=st.sampled_from([32, 64, 128]),
    window=st.integers(1, 8192),
    chunked=st.booleans(),
)
latent = st.builds(
    LatentCall,
    rank=st.sampled_from([128, 256, 512]),
    rope_dim=st.sampled_from([32, 64]),
    sparse=st.just(True),
    index_dim=st.sampled_from([0, 128]),
)
state = st.builds(
    StateCall,
    kernel=st.integers(2, 4),
    channels=st.integers(1, 4096),
    groups=st.integers(0, 8),
    group_channels=st.integers(1, 256),
    heads=st.integers(1, 64),
    matrix=st.tuples(st.integers(1, 128), st.integers(1, 128)),
)
hot_buffers = st.none() | st.builds(HotBuffers, group=st.just(0), buffer_size=st.integers(1, 5000), top_k=st.just(1))
mixes = st.builds(mix_of, st.lists(st.integers(1, 200_000), min_size=1, max_size=5), st.just("random requests"))


@st.composite
def solvers(draw: Callable[..., Any], with_ratio: bool = True) -> tuple[MemoryPoolConfigurator, int, int]:
    """A configurator of a random model and random options, a page size, and the ranks that share a page."""
    attending = draw(st.lists(draw(st.sampled_from([attention, latent])), max_size=3))
    calls = attending + draw(st.lists(sliding, max_size=3)) + draw(st.lists(state, max_size=2))
    assume(calls)
    sparse = any(isinstance(call, LatentCall) and call.index_dim for call in calls)
    hot = draw(hot_buffers) if sparse and all(isinstance(call, LatentCall) for call in calls) else None
    page_size = draw(st.sampled_from([1, 4, 16, 64, 128]))
    ranks = draw(st.sampled_from([1, 1, 2, 8])) if hot is None else 1
    steps = draw(st.integers(0, 4))
    speculation = SpeculativeConfig(method="eagle", num_steps=steps, num_draft_tokens=steps + 1) if steps else None
    ratio = draw(st.sampled_from([None, Fraction(1, 10), Fraction(4, 5)])) if with_ratio else None
    options = pool_settings(
        mix=draw(mixes),
        chunk=draw(st.sampled_from([0, 512, 2048])),
        enable_prefix_caching=draw(st.booleans()),
        token_ranks=ranks,
        speculative_config=speculation,
        swa_full_tokens_ratio=ratio,
        windows_only=windows_only(calls),
        hot=hot,
        host_to_device_ratio=draw(st.sampled_from([None, Fraction(3, 2), Fraction(8)])),
        max_running_requests=draw(st.sampled_from([1, 7, 256])),
    )
    spec = spec_of(*((call,) for call in calls))
    formats = ["bfloat16", "fp8_e4m3", "nvfp4"] + ([] if any(isinstance(c, LatentCall) for c in calls) else ["mxfp8"])
    kept = KV_FORMATS[draw(st.sampled_from(formats))]
    return (
        create_memory_pool_configurator(lambda size: spec.groups(size, kept), options, page_size=page_size),
        page_size,
        ranks,
    )


def solved(solve: MemoryPoolConfigurator, size: int, page_size: int) -> MemoryPoolConfig | None:
    try:
        return solve.calculate_pool_sizes(size, page_size)
    except PlanError:
        return None


budgets = st.integers(1, 2**42)


@slow_unless_changed(*SPECS)
@given(solvers(), budgets, budgets)
@settings(max_examples=400)
def test_more_bytes_never_hold_less_and_pools_never_exceed_them(
    drawn: tuple[MemoryPoolConfigurator, int, int], one: int, other: int
) -> None:
    solve, page_size, ranks = drawn
    small, large = (solved(solve, size, page_size) for size in sorted((one, other)))
    for config, size in ((small, min(one, other)), (large, max(one, other))):
        if config is not None:
            assert config.bytes <= size
            assert config.max_total_num_tokens % (page_size * ranks) == 0 < config.max_total_num_tokens
            assert all(pool.frames > 0 for pool in config.pools)
            assert config.coeff >= 0 and config.bias > 0
            # The line is the budget's: the floors of single pools only ever leave something over.
            assert config.bytes <= config.max_total_num_tokens * config.coeff + config.bias <= size
    if small is not None:
        assert large is not None
        assert large.max_total_num_tokens >= small.max_total_num_tokens
        assert all(frames(large)[name] >= count for name, count in frames(small).items())


@slow_unless_changed(*SPECS)
@given(solvers(), st.integers(1, 2**22))
@settings(max_examples=400)
def test_tokens_to_bytes_to_tokens_is_exact(drawn: tuple[MemoryPoolConfigurator, int, int], pages: int) -> None:
    solve, page_size, ranks = drawn
    tokens = pages * page_size * ranks
    try:
        wanted = solve.calculate_pool_sizes_from_max_tokens(tokens, page_size)
    except PlanError:
        return  # a window pool by ratio may be too small for one request
    assume(wanted.full_max_total_num_tokens or wanted.swa_max_total_num_tokens)  # tokens cost a model of states nothing
    found = solve.calculate_pool_sizes(solve.bytes_for(tokens, page_size), page_size)
    assert found == wanted
    less = solved(solve, solve.bytes_for(tokens, page_size) - 1, page_size)
    assert less is None or less.max_total_num_tokens < tokens


@given(solvers(), st.integers(1, 2**20))
def test_a_refused_budget_names_one_that_works(drawn: tuple[MemoryPoolConfigurator, int, int], size: int) -> None:
    solve, page_size, _ = drawn
    try:
        solve.calculate_pool_sizes(size, page_size)
    except PlanError as error:
        if "at least" in error.fix and "states" not in error.fix:
            advice = error.fix.split("at least ")[1].split(",")[0]
            if solve.options.swa_full_tokens_ratio is None:
                assert solve.calculate_pool_sizes(parse_bytes(advice), page_size).max_total_num_tokens > 0


# -- the same laws in volume, without the cost of shrinking


def random_solver(rng: random.Random) -> tuple[MemoryPoolConfigurator, int, int]:
    """As `solvers`, drawn from a generator."""
    calls: list[Any] = [
        LatentCall(rank=rng.choice([128, 512]), rope_dim=64, sparse=True, index_dim=rng.choice([0, 128]))
        if rng.random() < 0.3
        else AttentionCall(kv_heads=rng.randint(1, 16), key_dim=rng.choice([64, 192]), value_dim=128)
        for _ in range(rng.randint(0, 2))
    ]
    calls += [
        AttentionCall(kv_heads=rng.randint(1, 16), key_dim=64, value_dim=64, window=int(2 ** rng.uniform(0, 14)))
        for _ in range(rng.randint(0 if calls else 1, 2))
    ]
    if rng.random() < 0.1:
        calls = [LATENT] * rng.randint(1, 3)
    elif rng.random() < 0.4:
        calls.append(StateCall(kernel=4, channels=rng.randint(1, 4096), heads=rng.randint(1, 64), matrix=(64, 64)))
    page_size, ranks = rng.choice([1, 4, 16, 64, 256]), rng.choice([1, 1, 2, 8])
    sparse = any(isinstance(call, LatentCall) and call.index_dim for call in calls)
    hot = None
    if sparse and all(isinstance(call, LatentCall) for call in calls):
        hot, ranks = HotBuffers(group=0, buffer_size=rng.randint(1, 5000), top_k=1), 1
    steps, ratio = rng.choice([0, 0, 3]), rng.choice([None, Fraction(3)])
    options = pool_settings(
        mix=mix_of([int(2 ** rng.uniform(0, 18)) for _ in range(rng.randint(1, 4))], "random requests"),
        chunk=rng.choice([0, 2048]),
        enable_prefix_caching=rng.random() < 0.8,
        token_ranks=ranks,
        speculative_config=SpeculativeConfig(method="eagle", num_steps=steps, num_draft_tokens=steps + 1)
        if steps
        else None,
        swa_full_tokens_ratio=rng.choice([None, None, Fraction(1, 10), Fraction(4, 5)]),
        concurrency=rng.choice([None, None, rng.randint(1, 64)]),
        windows_only=windows_only(calls),
        hot=hot,
        latent_bytes=None if ratio else rng.choice([None, 2**36]),  # a ratio never takes less than it says
        host_to_device_ratio=ratio,
        max_running_requests=rng.choice([2, 256]),
    )
    spec = spec_of(*((call,) for call in calls))
    kept = KV_FORMATS[rng.choice(["bfloat16", "fp8_e4m3", "nvfp4"])]
    solve = create_memory_pool_configurator(lambda size: spec.groups(size, kept), options, page_size=page_size)
    return solve, page_size, ranks


def check_laws(seed: int) -> bool:
    """Budgets in order hold tokens in order, within the budget, in whole pages; and back. Whether anything fitted."""
    rng = random.Random(seed)
    solve, page_size, ranks = random_solver(rng)
    found: MemoryPoolConfig | None = None
    for size in sorted(int(2 ** rng.uniform(10, 41)) for _ in range(3)):
        config = solved(solve, size, page_size)
        if config is None:
            assert found is None, f"seed {seed}: {size} bytes hold nothing and fewer held something"
            continue
        assert config.bytes <= size and config.max_total_num_tokens % (page_size * ranks) == 0
        assert min(pool.frames for pool in config.pools) > 0
        if found is not None:
            assert config.max_total_num_tokens >= found.max_total_num_tokens, f"seed {seed}"
            assert all(frames(config)[name] >= count for name, count in frames(found).items()), f"seed {seed}"
        found = config
    if found is not None and (found.full_max_total_num_tokens or found.swa_max_total_num_tokens):
        tokens = found.max_total_num_tokens
        assert solve.calculate_pool_sizes_from_max_tokens(tokens, page_size) == found, f"seed {seed}"
        assert solve.calculate_pool_sizes(solve.bytes_for(tokens, page_size), page_size) == found, f"seed {seed}"
    return found is not None


def test_laws_of_random_models() -> None:
    assert sum(check_laws(seed) for seed in range(1_000)) > 800


@pytest.mark.slow
def test_laws_of_a_hundred_thousand_random_models() -> None:
    assert sum(check_laws(seed) for seed in range(100_000)) > 80_000


@pytest.mark.parametrize("kind", ["window", "chunk"])
def test_the_smallest_pool_that_is_planned_lets_a_request_go_on(kind: str) -> None:
    """Planning and the cache have one idea of the frames that a request needs, for every window and page."""
    for page_size in (1, 2, 16, 64):
        for tokens in (1, 2, 3, 7, 8, 15, 16, 17, 18, 20, 31, 63, 64, 65, 66, 130):
            reach = ReachSpec(kind, tokens)
            need = tokens + page_size + ragged(reach, page_size)  # tokens; a pool must hold more
            assert need // page_size + 1 >= reach_of(reach, page_size).held(10**6), (page_size, tokens)
