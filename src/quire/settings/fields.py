"""Settings that several parts have, each declared once. A part takes a class of them whole, and adds its own."""

from __future__ import annotations

from enum import StrEnum
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, InstanceOf, field_validator, model_validator

from quire.errors import InvalidInput
from quire.settings.setting import Bytes, Settings, Speed, Tokens, exact_bytes, setting
from quire.spec.hisparse import HiSparseConfig
from quire.spec.speculation import SpeculativeConfig

MEMORY, SCHEDULING, SPECULATION = "Memory", "Scheduling", "Speculation"
TIERS, TRANSFER, COSTS = "Tiers below the device", "Transfer between engines", "Cost of steps"

_LOAD_ASKS = "what the load asks for"

Speculation = Annotated[InstanceOf[SpeculativeConfig], BeforeValidator(SpeculativeConfig.parse)]
"""How tokens are drafted, also as JSON or a mapping."""

HiSparse = Annotated[InstanceOf[HiSparseConfig], BeforeValidator(HiSparseConfig.parse)]
"""Latents in host memory, also as JSON or a mapping."""

TargetItl = Annotated[float, Field(gt=0)] | Literal["auto", "off"]
"""Milliseconds between two tokens."""


def _ratio(value: Any) -> Fraction:
    """A ratio as it was written, without rounding to floating point."""
    try:
        found = Fraction(str(value))
    except ValueError:
        found = Fraction(0)
    if found <= 0:
        raise InvalidInput(f"a ratio of {value}.", fix="give a number above zero.")
    return found


Ratio = Annotated[Fraction, BeforeValidator(_ratio)]
"""A number above zero, exactly as it was written."""


class WritePolicy(StrEnum):
    """When a cached page is copied to the host."""

    THROUGH = "write_through"
    """As soon as it is cached, so that eviction from the device costs nothing."""
    SELECTIVE = "write_through_selective"
    """When a second request uses it, or when its request is preempted."""
    BACK = "write_back"
    """When it is evicted from the device: the two tiers together have the most capacity, and eviction waits for the
    copy. Groups that are read in part are copied when cached: their frames are small, and are evicted early."""


class PrefetchPolicy(StrEnum):
    """How long a request waits for pages that come from storage."""

    BREAK_EVEN = "break_even"
    """Until computing them would have been faster, as measured."""
    BEST_EFFORT = "best_effort"
    """Not at all: a request uses the pages that have arrived when it is admitted."""
    WAIT_COMPLETE = "wait_complete"
    """Until all stored pages have arrived."""
    TIMEOUT = "timeout"
    """Up to `prefetch_seconds`."""


class BatchFields(Settings):
    """What one step holds."""

    GROUP: ClassVar[str] = SCHEDULING

    max_running_requests: int = setting(
        256, "Sequences that hold memory at once.", aliases=("--max-num-seqs", "--max-running"), ge=1, le=65_536
    )
    max_num_batched_tokens: Tokens = setting(
        2048, "Tokens in one step; longer prompts are computed in chunks.", aliases=("--chunked-prefill-size",)
    )


class StepFields(BatchFields):
    """When steps are launched, and what prompts may take of them."""

    GROUP: ClassVar[str] = SCHEDULING

    target_itl_ms: TargetItl = setting(
        "auto",
        "Most milliseconds between two tokens of a request because of other prompts: these are computed in chunks that "
        "fit. auto: about three times a step without prompts, or more while many prompts wait; off: prompts first.",
        metavar="MS",
        otherwise="auto; off in scripts with LLM, and in replays",
    )
    overlap: bool | None = setting(
        None, "Schedule a step while one is in flight.", otherwise="where the device is not the CPU; off in replays"
    )


class RankFields(Settings):
    """Devices of one engine."""

    tensor_parallel_size: int = setting(
        1, "Devices that share each layer; an engine runs on 1.", aliases=("--tp-size", "--tp", "-tp"), ge=1
    )


class HiSparseFields(Settings):
    """Latents in host memory."""

    GROUP: ClassVar[str] = MEMORY

    hisparse: HiSparse | None = setting(
        None,
        "Keep the latents of sparse attention in host memory, and a hot buffer for each request on the device: a JSON "
        'object, such as {"device_buffer_size": 4096}, or {} for planned sizes.',
        aliases=("--hisparse-config",),
        metavar="JSON",
        otherwise="all latents on the device",
    )


class WorthFields(Settings):
    """What eviction keeps pages for."""

    GROUP: ClassVar[str] = MEMORY

    eviction_worth: Literal["tokens", "flops"] = setting(
        "tokens",
        "What density keeps pages for: {choices}. With flops the ends of long prompts stay longer: they cost most.",
    )


class ArenaFields(Settings):
    """Memory that groups of a model share."""

    GROUP: ClassVar[str] = MEMORY

    arena: bool = setting(
        False,
        "Windows, chunks or states share their bytes with pages of full attention, and frames move while requests run.",
    )


class PoolFields(ArenaFields, HiSparseFields, BatchFields):
    """What determines the pools of an engine."""

    GROUP: ClassVar[str] = MEMORY

    kv_memory: Bytes | None = setting(
        None,
        "Bytes of the KV pools: 2GiB, 512MiB. From the least to the most, 8GiB..24GiB, they can change while a server "
        "runs, on a GPU with --elastic-gpu; it starts with the most.",
        otherwise="on a CPU a quarter of the free memory, at most 4GiB; on a GPU 80 % of what is free after loading; "
        "never more than all requests can use; in a plan what the --gpu leaves",
    )
    kv_memory_least: Bytes | None = setting(None, "The least bytes of a range of `kv_memory`.", option=None)
    kv_dtype: str = setting(
        "auto",
        "How keys, values and latents are stored: auto (as the model computes them), fp8_e4m3, fp8_e5m2, mxfp8, nvfp4, "
        "fp4_e2m1, or a plain dtype.",
        aliases=("--kv-cache-dtype",),
    )
    page_size: int | None = setting(
        None,
        "Tokens in a page, and the shortest prefix that can be shared.",
        aliases=("--block-size",),
        otherwise="16, or what compressed entries need",
        ge=1,
        le=1024,
    )
    max_model_len: Tokens | None = setting(
        None,
        "Longest sequence, prompt and output, in tokens: 32k.",
        aliases=("--context-length", "--context"),
        otherwise="the model's context",
    )
    enable_prefix_caching: bool = setting(
        True,
        "Share the pages of common prefixes.",
        option="--prefix-caching/--no-prefix-caching",
        aliases=("--enable-prefix-caching/--no-enable-prefix-caching",),
    )
    window_pool: bool = setting(True, "Windows have a pool of their own, and free what they have passed.")
    swa_full_tokens_ratio: Ratio | None = setting(
        None, "Tokens of window pools per token of full ones.", otherwise=_LOAD_ASKS, metavar="NUMBER"
    )
    mamba_full_memory_ratio: Ratio | None = setting(
        None, "Bytes of states per byte of the other pools.", otherwise=_LOAD_ASKS, metavar="NUMBER"
    )
    max_mamba_cache_size: int | None = setting(None, "Number of states.", otherwise=_LOAD_ASKS, ge=1)
    speculative_config: Speculation | None = setting(
        None,
        "Draft tokens and verify several in a step: a JSON object, such as "
        '{"method": "ngram", "num_speculative_tokens": 4}.',
        group=SPECULATION,
        metavar="JSON",
        otherwise="one token a step",
    )

    @model_validator(mode="before")
    @classmethod
    def _range(cls, given: Any) -> Any:
        value = given.get("kv_memory")
        if not isinstance(value, str) or ".." not in value:
            return given
        least, _, most = value.partition("..")
        return {**given, "kv_memory": most, "kv_memory_least": least}

    @model_validator(mode="after")
    def _range_is_one(self) -> Self:
        least, most = self.kv_memory_least, self.kv_memory
        if least is not None and (most is None or least > most):
            given = f"--kv-memory {exact_bytes(least)}..{exact_bytes(most) if most else 'auto'}"
            raise InvalidInput(f"{given}: the least is more than the most.", fix="write 8GiB..24GiB, the least first.")
        return self

    @field_validator("kv_memory", mode="before")
    @classmethod
    def _auto(cls, value: Any) -> Any:
        return None if value == "auto" else value


class TenantFields(Settings):
    """Whose requests are whose."""

    GROUP: ClassVar[str] = MEMORY

    tenants: Path | None = setting(
        None,
        "File that gives keys of --api-keys to tenants, and each of these a floor, a ceiling and a weight: "
        '{"quiet": {"keys": ["alice"], "floor": "25%"}}.',
        metavar="FILE",
        otherwise="all requests share the KV memory",
    )


class HostFields(Settings):
    """Host memory for pages."""

    GROUP: ClassVar[str] = TIERS

    host_memory: Bytes | Literal["auto"] | None = setting(
        None,
        "Host memory for pages that leave the device, in all: 8GiB, or auto for twice the KV memory where there is as "
        "much.",
        metavar="SIZE",
        otherwise="none, or auto with --storage",
    )


class TierFields(HostFields):
    """How pages move between the device, host memory and storage."""

    GROUP: ClassVar[str] = TIERS

    write_policy: WritePolicy = setting(
        WritePolicy.THROUGH, "When a page is copied to the host: {choices}.", needs="host memory or storage"
    )
    load: Literal["break_even", "always"] = setting(
        "break_even",
        "Whether a cached page is loaded: {choices}; break_even only where that is faster than computing it, as "
        "measured.",
        needs="host memory or storage",
    )
    prefetch: PrefetchPolicy = setting(
        PrefetchPolicy.BREAK_EVEN,
        "How long a request waits for storage: {choices}.",
        aliases=("--prefetch-policy",),
        needs="storage",
    )


class TransferFields(Settings):
    """Prompts that other engines compute."""

    GROUP: ClassVar[str] = TRANSFER

    transfer_seconds: float = setting(
        30.0,
        "How long a request waits for another engine before its prompt is computed here.",
        needs="--role",
        gt=0,
        le=3600,
    )


class CostFields(Settings):
    """What steps and copies of an engine take, where no engine is there to measure."""

    GROUP: ClassVar[str] = COSTS

    gpu: str | None = setting(
        None,
        "A device by name, such as h100-80gb: its memory, and its published peaks.",
        otherwise="none; h100-80gb in replays",
    )
    prefill_rate: float | None = setting(
        None, "Prompt tokens an engine computes in a second.", otherwise="estimated from the --gpu", gt=0
    )
    decode_ms: float | None = setting(
        None,
        "Milliseconds of a decode step, beside those that each request adds.",
        otherwise="estimated from the --gpu",
        gt=0,
    )


class BusFields(Settings):
    """The way between host memory and the device."""

    GROUP: ClassVar[str] = COSTS

    host_bandwidth: float | None = setting(
        None, "GB/s between host memory and the device, each way.", otherwise="the device's bus", gt=0
    )


class LinkFields(Settings):
    """The network between engines."""

    GROUP: ClassVar[str] = TRANSFER

    link_rate: Speed = setting(10**10, "Speed of each engine's link.", option="--link", otherwise="10GB/s")
