"""EngineConfig: every setting of an engine, declared and checked once at the entry."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, InstanceOf, field_validator, model_validator

from quire.engine.setting import Bytes, Settings, Tokens, setting
from quire.errors import InvalidInput, RefusedCombination
from quire.spec.bundled import DEFAULT_MODEL, bundled_name
from quire.spec.hisparse import HiSparseConfig
from quire.spec.kv_format import kv_format
from quire.spec.layout import DType
from quire.spec.speculation import SpeculativeConfig
from quire.transfer.address import parse_address

if TYPE_CHECKING:
    from quire.models.tokenizer import Tokenizer
    from quire.plan.plan import PlanSettings

STORE_DRAIN_S = 30.0
"""Seconds that transfers to storage may take when an engine ends."""

FLUSH_S = 5.0
"""Seconds that the answer to a flush waits until storage has removed everything."""

_STOP_S = 5.0
_ADD = {
    "storage": "--storage DIR",
    "host memory or storage": "--host-memory auto",
    "--prefetch timeout": "--prefetch timeout",
    "--role": "--role prefill, decode or both",
    "--prefill": "--prefill 1",
}

_ADD_FOR = {"prefill_peers": "--role decode", "transfer_listen": "--role prefill"}
"""Where less than `_ADD` would be refused."""

_NEEDS = {
    "storage_size": "storage",
    "prefetch": "storage",
    "write_policy": "host memory or storage",
    "load": "host memory or storage",
    "prefetch_seconds": "--prefetch timeout",
} | dict.fromkeys(
    [f"transfer_{each}" for each in ("listen", "connector", "unauthenticated", "seconds", "min_tokens", "name")]
    + ["prefill_peers"],
    "--role",
)

MOST_EPOCHS = 2**63

WriteWord = Literal["write_through", "write_through_selective", "write_back"]
LoadWord = Literal["break_even", "always"]
TargetItl = Annotated[float, Field(gt=0)] | Literal["auto", "off"]
RoleWord = Literal["prefill", "decode", "both"]
PrefetchWord = Literal["break_even", "best_effort", "wait_complete", "timeout"]

_MEMORY = "Memory"
_TIERS = "Tiers below the device"
_SCHEDULING = "Scheduling"
_SPECULATION = "Speculation"
_TRANSFER = "Transfer between engines"

Speculation = Annotated[InstanceOf[SpeculativeConfig], BeforeValidator(SpeculativeConfig.read)]
"""How tokens are drafted, also as JSON or a mapping."""

HiSparse = Annotated[InstanceOf[HiSparseConfig], BeforeValidator(HiSparseConfig.read)]
"""Latents in host memory, also as JSON or a mapping."""

SHORT_DTYPES = {"half": "float16", "fp16": "float16", "bf16": "bfloat16", "float": "float32", "fp32": "float32"}
_LOAD_ASKS = "what the load asks for"
_KV_MEMORY_INSTEAD = (
    "leave it out (pools take 80 % of a GPU's free memory after loading, or a quarter of a CPU's, at most 4 GiB), "
    "or give the bytes of the KV pools: --kv-memory 40GiB. "
    "`quire plan MODEL --gpu h100-80gb --mem-fraction-static 0.85` says how many those are."
)
_SHARE = (
    "is a share of the GPU for weights, activations and pools together; Quire takes the bytes of the KV pools alone."
)


_DRAFT = """use --speculative-config '{"method": "ngram", "num_speculative_tokens": 4}'."""


class EngineConfig(Settings):
    """Settings of one engine. Frozen; create it with `engine_config`, which turns a bad value into `InvalidInput`.

    None lets the engine choose and report its choice. `host_memory` is one total in bytes for all groups. Settings that
    contradict each other, or would have no effect, are refused.
    """

    ENVIRONMENT: ClassVar[bool] = True
    FOREIGN: ClassVar[Mapping[str, tuple[str, str]]] = {
        "gpu_memory_utilization": (f"--gpu-memory-utilization {_SHARE}", _KV_MEMORY_INSTEAD),
        "mem_fraction_static": (f"--mem-fraction-static {_SHARE}", _KV_MEMORY_INSTEAD),
        "trust_remote_code": (
            "--trust-remote-code: Quire never runs code that comes with a model.",
            "leave it out; use a model type that transformers has.",
        ),
        "quantization": (
            "--quantization: weights are loaded as the model's configuration says.",
            "leave it out; --kv-dtype fp8 stores the cache in 8 bits.",
        ),
        "max_total_tokens": (
            "--max-total-tokens: a server is given the bytes of its pools.",
            "use --kv-memory; `quire plan MODEL --max-total-tokens N` says how many bytes N tokens take.",
        ),
        "swap_space": ("--swap-space: host memory keeps pages that leave the device.", "use --host-memory 8GiB."),
        "kv_offloading_size": ("--kv-offloading-size is another name here.", "use --host-memory 8GiB."),
        "hicache_size": ("--hicache-size is another name here.", "use --host-memory 8GiB."),
        "enable_hierarchical_cache": ("--enable-hierarchical-cache needs a size here.", "use --host-memory auto."),
        "hicache_storage_backend": ("--hicache-storage-backend is a URL here.", "use --storage DIR or --storage URL."),
        "enable_hisparse": ("--enable-hisparse needs a value here.", "use --hisparse '{}'."),
        "disable_radix_cache": ("--disable-radix-cache is another name here.", "use --no-prefix-caching."),
        **{
            f"speculative_{name}": (f"--speculative-{name.replace('_', '-')} is a field of one setting here.", _DRAFT)
            for name in ("algorithm", "num_steps", "eagle_topk", "num_draft_tokens", "draft_model_path")
        },
        "pipeline_parallel_size": ("--pipeline-parallel-size: this version runs on one device.", "leave it out."),
        "data_parallel_size": ("--data-parallel-size: this version runs on one device.", "leave it out."),
        "enable_chunked_prefill": (
            "--enable-chunked-prefill: long prompts are always computed in chunks.",
            "leave it out; --max-num-batched-tokens bounds a chunk.",
        ),
    }

    model: str = setting(
        DEFAULT_MODEL,
        "A bundled model's name, a folder or a hub name.",
        aliases=("-m", "--model-path"),
        otherwise="the bundled model",
    )
    revision: str | None = setting(
        None, "Branch, tag or commit of a model on the hub.", otherwise="its main branch", aliases=("--model-revision",)
    )
    tokenizer: str | None = setting(
        None, "Folder or hub name of the tokenizer.", aliases=("--tokenizer-path",), otherwise="the model's"
    )
    chat_template: str | None = setting(
        None, "File with the chat template, in Jinja.", metavar="FILE", otherwise="the tokenizer's"
    )
    served_model_name: str | None = setting(None, "The model's name for clients.", otherwise="that of the model")
    skip_tokenizer_init: bool = setting(False, "Token ids in, token ids out: load no tokenizer.")
    device: str = setting("auto", "cpu, cuda, cuda:N, or auto: the first GPU, else the CPU.")
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = setting(
        "auto", "What the model computes in: {choices}; auto is the model's own."
    )
    tensor_parallel_size: int = setting(
        1, "Devices of the engine; this version runs on 1.", aliases=("--tp-size", "--tp", "-tp"), ge=1
    )
    kv_dtype: str = setting(
        "auto",
        "How keys, values and latents are stored: auto (as the model computes them), fp8_e4m3, fp8_e5m2, mxfp8, nvfp4, "
        "fp4_e2m1, or a plain dtype.",
        group=_MEMORY,
        aliases=("--kv-cache-dtype",),
    )
    page_size: int | None = setting(
        None,
        "Tokens in a page, and the shortest prefix that can be shared.",
        group=_MEMORY,
        aliases=("--block-size",),
        otherwise="16, or what compressed entries need",
        ge=1,
        le=1024,
    )
    kv_memory: Bytes | None = setting(
        None,
        "Bytes of the KV pools: 2GiB, 512MiB.",
        group=_MEMORY,
        otherwise="on a CPU a quarter of the free memory, at most 4GiB; on a GPU 80 % of what is free after loading; "
        "never more than all requests can use",
    )
    max_model_len: Tokens | None = setting(
        None,
        "Longest sequence, prompt and output, in tokens: 32k.",
        aliases=("--context-length",),
        otherwise="the model's context",
    )
    max_running_requests: int = setting(
        256, "Sequences that hold memory at once.", group=_SCHEDULING, aliases=("--max-num-seqs",), ge=1, le=65_536
    )
    max_num_batched_tokens: Tokens = setting(
        2048,
        "Tokens in one step; longer prompts are computed in chunks.",
        group=_SCHEDULING,
        aliases=("--chunked-prefill-size",),
    )
    target_itl_ms: TargetItl = setting(
        "auto",
        "Most milliseconds between two tokens of a request because of other prompts: these are computed in chunks that "
        "fit. auto: about four times a step without prompts, or more while many prompts wait; off: prompts first.",
        group=_SCHEDULING,
        metavar="MS",
        otherwise="auto; off in scripts with LLM",
    )
    window_pool: bool = setting(
        True, "Windows have a pool of their own, and free what they have passed.", group=_MEMORY
    )
    swa_full_tokens_ratio: float | None = setting(
        None, "Tokens of window pools per token of full ones.", group=_MEMORY, otherwise=_LOAD_ASKS, gt=0, le=1
    )
    mamba_full_memory_ratio: float | None = setting(
        None, "Bytes of states per byte of the other pools.", group=_MEMORY, otherwise=_LOAD_ASKS, gt=0
    )
    max_mamba_cache_size: int | None = setting(None, "Number of states.", group=_MEMORY, otherwise=_LOAD_ASKS, ge=1)
    checkpoint_interval: int = setting(
        512,
        "Tokens between the states that a request leaves on its way, where frames are to spare.",
        group=_MEMORY,
        ge=1,
    )
    policy: Literal["fcfs", "lpm"] = setting(
        "fcfs",
        "Which waiting request goes first: {choices} (longest cached prefix first).",
        group=_SCHEDULING,
        aliases=("--schedule-policy",),
    )
    eviction: str = setting(
        "density",
        "Which cached pages go first: density, lru, lfu, slru, fifo, mru, filo, priority, gdsf, s3fifo, or "
        "one of your own (`register_eviction`).",
        group=_MEMORY,
    )
    enable_prefix_caching: bool = setting(
        True,
        "Share the pages of common prefixes.",
        group=_MEMORY,
        option="--prefix-caching/--no-prefix-caching",
        aliases=("--enable-prefix-caching/--no-enable-prefix-caching",),
    )
    enable_kv_events: bool = setting(False, "Record pages stored and removed (`engine.events`).", option=None)
    host_memory: Bytes | Literal["auto"] | None = setting(
        None,
        "Host memory for pages that leave the device, in all: 8GiB, or auto for twice the KV memory where there is as "
        "much.",
        group=_TIERS,
        metavar="SIZE",
        otherwise="none, or auto with --storage",
    )
    storage: str | None = setting(
        None,
        "Where pages outlive the engine: a directory, or a URL (valkey://, redis://, s3://, mooncake://).",
        group=_TIERS,
        metavar="DIR_OR_URL",
    )
    storage_size: Bytes | None = setting(
        None,
        "What may be kept there: 100GiB.",
        group=_TIERS,
        otherwise="as the store is; of a new directory half of the free disk, at most 32GiB",
    )
    write_policy: WriteWord = setting("write_through", "When a page is copied to the host: {choices}.", group=_TIERS)
    load: LoadWord = setting(
        "break_even",
        "Whether a cached page is loaded: {choices}; break_even only where that is faster than computing it, as "
        "measured.",
        group=_TIERS,
    )
    prefetch: PrefetchWord = setting("break_even", "How long a request waits for storage: {choices}.", group=_TIERS)
    prefetch_seconds: float = setting(2.0, "The seconds of --prefetch timeout.", group=_TIERS, ge=0)
    explain: bool = setting(
        True, "Keep why prompts of the last requests were not cached, and count prompt tokens by cause.", group=_MEMORY
    )
    weights_epoch: int = setting(
        0,
        "How often weights were replaced under the same name; pages of another epoch are never found.",
        group=_MEMORY,
        ge=0,
        lt=MOST_EPOCHS,
    )
    retain_share: float = setting(
        0.25, "Share of the pool that clients may ask to keep; 0 for nothing.", group=_MEMORY, ge=0, le=0.9
    )
    session_share: float = setting(
        0.25, "Share of the pool that sessions may hold between turns; 0 for nothing.", group=_MEMORY, ge=0, le=0.9
    )
    session_ttl: float = setting(
        300.0, "Seconds for which a session is kept after its last turn.", group=_MEMORY, gt=0, le=86_400
    )
    speculative_config: Speculation | None = setting(
        None,
        "Draft tokens and verify several in a step: a JSON object, such as "
        '{"method": "ngram", "num_speculative_tokens": 4}.',
        group=_SPECULATION,
        metavar="JSON",
        otherwise="one token a step",
    )
    hisparse: HiSparse | None = setting(
        None,
        "Keep the latents of sparse attention in host memory, and a hot buffer for each request on the device: a JSON "
        'object, such as {"device_buffer_size": 4096}, or {} for planned sizes.',
        group=_MEMORY,
        aliases=("--hisparse-config",),
        metavar="JSON",
        otherwise="all latents on the device",
    )
    role: RoleWord | None = setting(
        None,
        "What this engine does beside others of the same model: {choices}. prefill computes prompts for others, decode "
        "has others compute its prompts.",
        group=_TRANSFER,
        aliases=("--disaggregation-mode",),
        otherwise="an engine on its own",
    )
    prefill_peers: str | None = setting(
        None,
        "Where the engines listen that compute prompts for this one: HOST:PORT, several with commas.",
        group=_TRANSFER,
        metavar="ADDRESSES",
        otherwise="none",
    )
    transfer_listen: str = setting(
        "127.0.0.1:8998",
        "Where an engine that computes prompts listens for others: HOST:PORT. Pages for this engine arrive at HOST.",
        group=_TRANSFER,
    )
    transfer_connector: str = setting(
        "auto", "What carries pages: tcp, nixl, mooncake, or auto: nixl if installed, on loopback.", group=_TRANSFER
    )
    transfer_unauthenticated: bool = setting(
        False, "nixl may listen off loopback, mooncake anywhere: who reaches them can write pages.", group=_TRANSFER
    )
    transfer_secret: str | None = setting(
        None,
        "What engines show each other before anything else, 16 characters or more; better as QUIRE_TRANSFER_SECRET.",
        group=_TRANSFER,
        metavar="SECRET",
        secret=True,
    )
    transfer_name: str | None = setting(
        None,
        "What other engines call this one in metrics, explanations and logs, such as prefill-0.",
        group=_TRANSFER,
        metavar="NAME",
        pattern=r"^[A-Za-z0-9._:-]{1,64}$",
        otherwise="its address",
    )
    transfer_min_tokens: Tokens = setting(128, "Prompts that lack fewer tokens are computed here.", group=_TRANSFER)
    transfer_seconds: float = setting(
        30.0,
        "How long a request waits for another engine before its prompt is computed here.",
        group=_TRANSFER,
        gt=0,
        le=3600,
    )
    canary: str = setting(
        "1%",
        "Share of the time in which cached pages on the device are looked at again: 1%, off, or all (each page at each "
        "step).",
        group=_MEMORY,
        metavar="SHARE",
        pattern=r"^(off|all|[0-4]?[0-9](\.[0-9]+)?%)$",
    )
    canary_reports: str | None = setting(
        None,
        "Folder for a file about each damaged page.",
        group=_MEMORY,
        metavar="DIR",
        otherwise="the log, and GET /v1/cache/audit",
    )
    overlap: bool | None = setting(
        None, "Schedule a step while one is in flight.", group=_SCHEDULING, otherwise="where the device is not the CPU"
    )
    threads: int | None = setting(
        None,
        "CPU threads of torch in the engine's process.",
        otherwise="as many as cores",
        ge=1,
        le=1024,
    )
    native_kernels: bool = setting(True, "Compile kernels for this CPU at the first start, and use them.")
    attention_backend: Literal["auto", "native", "torch", "triton"] = setting(
        "auto", "What computes attention: {choices}; auto is the kernel of the device where there is one."
    )
    disable_cuda_graph: bool = setting(
        False, "On a GPU, launch each kernel of a decode step alone.", aliases=("--enforce-eager",)
    )
    cuda_graph_max_bs: int = setting(
        256, "Requests of the largest CUDA graph of decode steps.", aliases=("--max-cudagraph-capture-size",), ge=1
    )
    skip_warmup: bool = setting(False, "On a GPU, compile kernels as needed.", aliases=("--skip-server-warmup",))
    pack_weights: bool = setting(
        True, "On a CPU, lay out the weights of linear layers for it, and compute known decoder layers in few calls."
    )
    seed: int = setting(0, "Seed of requests that have none.", aliases=("--random-seed",))

    @field_validator("kv_memory", mode="before")
    @classmethod
    def _auto(cls, value: Any) -> Any:
        return None if value == "auto" else value

    @field_validator("dtype", mode="before")
    @classmethod
    def _long_dtype(cls, value: Any) -> Any:
        return SHORT_DTYPES.get(value, value) if isinstance(value, str) else value

    @field_validator("tensor_parallel_size")
    @classmethod
    def _one_device(cls, value: int) -> int:
        if value > 1:
            raise InvalidInput(
                f"this version runs a model on one device, and {value} were asked for.",
                fix=f"leave it out, or give 1; `quire plan MODEL --tp {value}` plans more.",
            )
        return value

    @field_validator("prefill_peers", "transfer_listen")
    @classmethod
    def _addresses(cls, value: str | None) -> str | None:
        for address in value.split(",") if value is not None else ():
            try:
                parse_address(address)
            except ValueError as error:
                fix = "use HOST:PORT, as in 127.0.0.1:8998 or [::1]:8998."
                raise InvalidInput(f"'{address}' is no address.", fix=fix) from error
        return value

    @field_validator("role", mode="before")
    @classmethod
    def _role(cls, value: Any) -> Any:
        return {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "both", "null": None}.get(value, value)

    @field_validator("chat_template")
    @classmethod
    def _readable(cls, value: str | None) -> str | None:
        if value is not None and not Path(value).is_file():
            raise InvalidInput(f"there is no file '{value}'.", fix="give a file that holds the template.")
        return value

    @field_validator("kv_dtype")
    @classmethod
    def _format(cls, value: str) -> str:
        return value if value == "auto" else kv_format(value, DType.FLOAT32).name

    @field_validator("eviction")
    @classmethod
    def _eviction(cls, value: str) -> str:
        from quire.prefix.evict import eviction_policy

        eviction_policy(value)
        return value

    @field_validator("model", "tokenizer", mode="before")
    @classmethod
    def _path(cls, value: str | Path | None) -> str | None:
        return None if value is None else str(value)

    @model_validator(mode="after")
    def _tiers_agree(self) -> EngineConfig:
        """A setting that would have no effect is refused: it is a mistake."""
        if self.has_tiers and not self.enable_prefix_caching:
            raise InvalidInput(
                "host memory and storage keep cached prefixes, and prefix caching is off.",
                fix="leave prefix caching on, or leave --host-memory and --storage out.",
            )
        if self.storage is not None and not self.storage:
            raise InvalidInput("the storage has no name.", fix="give --storage a directory or a URL, or leave it out.")
        fields = type(self).model_fields
        given = {name: getattr(self, name) for name in fields if getattr(self, name) != fields[name].default}
        for name, what in self.idle(given).items():
            flag = f"--{name.replace('_', '-')}"
            add = _ADD_FOR.get(name, _ADD[what])
            if what == "--role" and self.transfer_secret is None:
                add += " and QUIRE_TRANSFER_SECRET"
            raise InvalidInput(f"{flag} does nothing without {what}.", fix=f"add {add}, or leave it out.")
        return self

    @model_validator(mode="after")
    def _roles_agree(self) -> EngineConfig:
        if self.role is None:
            return self
        if self.transfer_secret is None or len(self.transfer_secret) < 16:
            given = "there is none" if self.transfer_secret is None else f"it has {len(self.transfer_secret)}"
            raise InvalidInput(
                f"engines that transfer pages show each other a secret of 16 characters or more, and {given}.",
                fix="set QUIRE_TRANSFER_SECRET to the same text for all of them.",
            )
        if self.role == "decode" and not self.prefill_peers:
            raise InvalidInput(
                "role decode has others compute its prompts, and no other engine is named.",
                fix="add --prefill-peers HOST:PORT.",
            )
        if self.role == "prefill" and self.prefill_peers:
            raise InvalidInput(
                "role prefill computes its own prompts, and --prefill-peers names others.", fix="use --role both."
            )
        if self.prefill_peers and self.transfer_listen.rpartition(":")[0] in ("0.0.0.0", "::", "[::]"):
            raise InvalidInput(
                f"other engines send pages to the host of --transfer-listen, and {self.transfer_listen} names none.",
                fix="give the address of this machine that they reach.",
            )
        if not self.enable_prefix_caching:
            raise InvalidInput("transferred pages are cached prefixes, and prefix caching is off.", fix="leave it on.")
        return self

    @model_validator(mode="after")
    def _drafts_follow_tokens(self) -> EngineConfig:
        if self.overlap and self.speculative_config is not None:
            raise RefusedCombination(
                "drafts follow the tokens of the last step, and --overlap schedules a step before these are known.",
                fix="leave --overlap out.",
            )
        return self

    @classmethod
    def idle(cls, given: Mapping[str, Any]) -> dict[str, str]:
        """Settings of tiers that are not configured, each with the option that it needs."""
        storage = given.get("storage") is not None
        there = {
            "storage": storage,
            "host memory or storage": storage or any(given.get(name) is not None for name in ("host_memory", "role")),
            "--prefetch timeout": given.get("prefetch") == "timeout",
            "--role": given.get("role") is not None,
        }
        return {name: what for name, what in _NEEDS.items() if name in given and not there[what]}

    @property
    def has_tiers(self) -> bool:
        """Whether pages are stored on any lower tier."""
        return self.host_memory is not None or self.storage is not None or self.role is not None

    @property
    def stop_seconds(self) -> float:
        """Seconds that an engine may take to end: with storage, until pending transfers have arrived."""
        return _STOP_S if self.storage is None else _STOP_S + STORE_DRAIN_S

    @property
    def model_name(self) -> str:
        """The name for clients: as served, that of a bundled model, or the last part of the model's path or hub id."""
        return self.served_model_name or bundled_name(self.model) or self.model.rstrip("/").rsplit("/", 1)[-1]

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer, with the configured chat template. Imports transformers. Raises ModelLoadError."""
        from quire.models.tokenizer import load_tokenizer

        revision = self.revision if self.tokenizer is None else None
        return load_tokenizer(self.tokenizer or self.model, revision=revision, chat_template=self.chat_template)


def engine_config(**settings: Any) -> EngineConfig:
    """The settings, by name or alias. Raises InvalidInput that names each bad one, its value and the valid values."""
    return EngineConfig.read(settings)


def loading_options(config: EngineConfig) -> dict[str, Any]:
    """Arguments of `load_model` besides the model and its device."""
    return {
        "dtype": config.dtype,
        "max_length": config.max_model_len,
        "revision": config.revision,
        "pack": config.pack_weights,
    }


def plan_settings(config: EngineConfig) -> PlanSettings:
    """The settings of an engine that planning needs, except its budget.

    Latents in host memory may take `--host-memory`, or half of what is available; with tiers half of that, because
    pages that have left the device have latents too.
    """
    from quire.engine.host_memory import host_memory
    from quire.plan.host import host_budget
    from quire.plan.plan import PlanSettings

    hosted = None
    if config.hisparse is not None:
        memory, asked = host_memory(), config.host_memory if config.host_memory is not None else "auto"
        hosted = host_budget(
            asked,
            available=memory.available,
            limit=memory.limit,
            total=memory.total,
            device_bytes=memory.available,
        ) // (2 if config.has_tiers else 1)
    return PlanSettings(
        kv_dtype=config.kv_dtype,
        page_size=config.page_size,
        context=config.max_model_len,
        chunk=config.max_num_batched_tokens,
        shares=config.enable_prefix_caching,
        max_requests=config.max_running_requests,
        swa_full_tokens_ratio=_fraction(config.swa_full_tokens_ratio),
        mamba_full_memory_ratio=_fraction(config.mamba_full_memory_ratio),
        max_mamba_cache_size=config.max_mamba_cache_size,
        window_pool=config.window_pool,
        speculation=config.speculative_config,
        hisparse=config.hisparse,
        host_memory=hosted,
    )


def _fraction(value: float | None) -> Fraction | None:
    """A ratio as it was written, without rounding to floating point."""
    return None if value is None else Fraction(str(value))
