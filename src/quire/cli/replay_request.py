"""What `quire replay` and `quire explain` are asked of a trace."""

from __future__ import annotations

from quire.engine.config import LoadWord, PrefetchWord, WriteWord
from quire.engine.setting import Bytes, Settings, Tokens, setting

_COST, _ENGINE, _TIERS = "Cost of steps", "Engine", "Below the device"


class ReplayedCache(Settings):
    """The caches that a trace is replayed through, and which part of the trace."""

    policy: str = setting("lru,density", "Eviction policies to compare: lru,lfu.", group="Cache")
    pool_tokens: str | None = setting(
        None,
        "Pool sizes: tokens (64k), or parts of what the trace would fill (1/16,1/4).",
        group="Cache",
        otherwise="1/8, or more where that holds no request",
    )
    page_size: str = setting("16", "Page sizes, in tokens: 1,16,64.", group="Cache", aliases=("--block-size",))
    model: list[str] = setting(
        [],
        "Plan the pools of this model: a name of the catalogue or a config.json; may be repeated.",
        group="Cache",
        aliases=("-m",),
    )
    limit: int | None = setting(None, "Only the first N requests.", group="Output", ge=1)
    seed: int = setting(0, "Seed of a workload.", group="Output")


class ReplayedEngine(Settings):
    """The engine that replays, and what its steps cost."""

    gpu: str = setting("h100-80gb", "A device whose published peaks give the times.", group=_COST)
    tp: int = setting(1, "Devices that share the work of a step.", group=_COST)
    prefill_rate: float | None = setting(None, "Prompt tokens per second, instead of a device.", group=_COST)
    decode_ms: float | None = setting(None, "Milliseconds of a decode step, instead of a device.", group=_COST)
    fit: bool = setting(False, "Measure the engine here with the bundled model.", group=_COST, option="--fit")
    max_running_requests: int = setting(
        256, "Requests that run at once.", group=_ENGINE, aliases=("--max-running", "--max-num-seqs"), ge=1
    )
    max_num_batched_tokens: int = setting(2048, "Tokens of one step.", group=_ENGINE)
    overlap: bool = setting(False, "Launch a step before the one before it has settled.", group=_ENGINE)
    order: str = setting("fcfs", "Which waiting request goes first: fcfs, or lpm.", group=_ENGINE)
    check: str = setting(
        "off", "off; reads: every page that a step reads; all: and the laws of the cache.", group="Output"
    )


class ReplayedTiers(Settings):
    """The tiers below the simulated device; bandwidths in GB/s."""

    host_tokens: Tokens | None = setting(
        None, "Tokens that host memory holds; everything is replayed without it and with it.", group=_TIERS
    )
    host_memory: Bytes | None = setting(None, "The same in bytes: 64GiB.", group=_TIERS)
    storage_tokens: Tokens | None = setting(None, "Tokens that storage behind it holds.", group=_TIERS)
    host_bandwidth: float | None = setting(None, "GB/s each way.", group=_TIERS, otherwise="the device's bus", gt=0)
    storage_bandwidth: float | None = setting(None, "GB/s each way.", group=_TIERS, otherwise="7", gt=0)
    write_policy: WriteWord = setting("write_through", "{choices}.", group=_TIERS)
    prefetch_policy: PrefetchWord = setting("break_even", "{choices}.", group=_TIERS, aliases=("--prefetch",))
    load: LoadWord = setting(
        "break_even", "{choices}; break_even only where that is faster than computing.", group=_TIERS
    )
