"""Options that several commands share, and the engine configuration they make."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from quire.engine.config import EngineConfig

MEMORY = "Memory"
TIERS = "Tiers below the device"
SCHEDULING = "Scheduling"

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
DebugOption = Annotated[bool, typer.Option("--debug", hidden=True, help="Show tracebacks.")]
ModelOption = Annotated[
    str | None, typer.Option("--model", "-m", help="A model's folder or hub name. (default: the bundled model)")
]
TokenizerOption = Annotated[str | None, typer.Option(help="The tokenizer's folder or hub name, if not the model's.")]
DeviceOption = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:N or auto. (default: auto)")]
DtypeOption = Annotated[str | None, typer.Option(help="auto, float32, float16 or bfloat16. (default: auto)")]
MaxModelLenOption = Annotated[
    int | None,
    typer.Option(help="Longest sequence, prompt and output, in tokens. (default: the model's context)"),
]
PageSizeOption = Annotated[int | None, typer.Option(help="Tokens in a page. (default: 16)", rich_help_panel=MEMORY)]
KvDtypeOption = Annotated[
    str | None,
    typer.Option(
        help="auto, fp8_e4m3, fp8_e5m2, mxfp8, nvfp4 or fp4_e2m1: how the cache is stored. (default: auto)",
        rich_help_panel=MEMORY,
    ),
]
KvMemoryOption = Annotated[
    str | None,
    typer.Option(
        help="What the KV pools may take: 2GiB, 512MiB. (default: a share of what is free)", rich_help_panel=MEMORY
    ),
]
EvictionOption = Annotated[
    str | None,
    typer.Option(
        help="density, lru, lfu, slru, fifo, mru, filo, priority, gdsf or s3fifo. (default: density)",
        rich_help_panel=MEMORY,
    ),
]
PrefixCachingOption = Annotated[
    bool,
    typer.Option(
        "--prefix-caching/--no-prefix-caching", help="Share the pages of common prefixes.", rich_help_panel=MEMORY
    ),
]
ExplainOption = Annotated[
    bool,
    typer.Option(
        "--explain/--no-explain", help="Keep why prompts of the last requests were not cached.", rich_help_panel=MEMORY
    ),
]
WeightsEpochOption = Annotated[
    int | None,
    typer.Option(
        "--weights-epoch",
        help="Count of the weights under this name; pages of another are never found. (default: 0)",
        rich_help_panel=MEMORY,
        min=0,
    ),
]
RetainShareOption = Annotated[
    float | None,
    typer.Option(
        "--retain-share",
        help="What of the pool clients may ask to keep, 0 for nothing. (default: 0.25)",
        rich_help_panel=MEMORY,
    ),
]
SwaRatioOption = Annotated[
    float | None,
    typer.Option(
        "--swa-full-tokens-ratio",
        help="Tokens of window pools per token of full ones. (default: what the load asks for)",
        rich_help_panel=MEMORY,
    ),
]
MambaRatioOption = Annotated[
    float | None,
    typer.Option(
        "--mamba-full-memory-ratio",
        help="Bytes of states per byte of other pools. (default: what the load asks for)",
        rich_help_panel=MEMORY,
    ),
]
MambaSizeOption = Annotated[
    int | None,
    typer.Option(
        "--max-mamba-cache-size", help="States. (default: what the load asks for)", rich_help_panel=MEMORY, min=1
    ),
]
CheckpointOption = Annotated[
    int | None,
    typer.Option(
        "--checkpoint-interval",
        help="Tokens between states that a request leaves on its way. (default: 512)",
        rich_help_panel=MEMORY,
        min=1,
    ),
]
HostMemoryOption = Annotated[
    str | None,
    typer.Option(
        "--host-memory",
        help="Host memory for pages that leave the device, in all: 8GiB, or auto for twice the KV memory where there "
        "is as much. (default: none, or auto with --storage)",
        rich_help_panel=TIERS,
    ),
]
StorageOption = Annotated[
    str | None,
    typer.Option(
        "--storage",
        help="Where pages outlive the server: a directory, or a URL (valkey://, redis://, s3://, mooncake://).",
        rich_help_panel=TIERS,
    ),
]
StorageSizeOption = Annotated[
    str | None,
    typer.Option(
        "--storage-size",
        help="What may be kept there: 100GiB. (default: as the store is; half of the free disk, at most 32GiB, if new)",
        rich_help_panel=TIERS,
    ),
]
WritePolicyOption = Annotated[
    str | None,
    typer.Option(
        "--write-policy",
        help="When a page is copied to the host: write_through, write_through_selective or write_back. "
        "(default: write_through)",
        rich_help_panel=TIERS,
    ),
]
LoadOption = Annotated[
    str | None,
    typer.Option(
        "--load",
        help="break_even loads what is sooner loaded than computed, as measured; always loads all. "
        "(default: break_even)",
        rich_help_panel=TIERS,
    ),
]
PrefetchOption = Annotated[
    str | None,
    typer.Option(
        "--prefetch",
        help="How long a request waits for storage: break_even, best_effort, wait_complete or timeout. "
        "(default: break_even)",
        rich_help_panel=TIERS,
    ),
]
PrefetchSecondsOption = Annotated[
    float | None,
    typer.Option(
        "--prefetch-seconds",
        help="How long that is with --prefetch timeout. (default: 2)",
        rich_help_panel=TIERS,
        min=0,
    ),
]
MaxRunningOption = Annotated[
    int | None,
    typer.Option(
        "--max-running-requests", help="Sequences that run at once. (default: 256)", rich_help_panel=SCHEDULING
    ),
]
MaxBatchedOption = Annotated[
    int | None,
    typer.Option("--max-num-batched-tokens", help="Tokens in one step. (default: 2048)", rich_help_panel=SCHEDULING),
]
PolicyOption = Annotated[
    str | None,
    typer.Option(help="fcfs, or lpm (longest cached prefix first). (default: fcfs)", rich_help_panel=SCHEDULING),
]
ThreadsOption = Annotated[
    int | None,
    typer.Option(help="CPU threads of the engine. (default: 1 for a tiny model, else torch's)"),
]


def make_config(**settings: Any) -> EngineConfig:
    """The engine configuration; None means the engine's own default. Raises InvalidInput."""
    from quire.engine.config import engine_config

    return engine_config(**{name: value for name, value in settings.items() if value is not None})
