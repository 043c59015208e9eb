"""EngineConfig: every setting of an engine, checked once at the entry."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import field_validator, model_validator

from quire.errors import InvalidInput, RefusedCombination
from quire.settings.fields import (
    MEMORY,
    SCHEDULING,
    TIERS,
    TRANSFER,
    PoolFields,
    RankFields,
    StepFields,
    TenantFields,
    TierFields,
    TransferFields,
    WorthFields,
)
from quire.settings.setting import Bytes, Settings, Tokens, setting, shown_of
from quire.spec.bundled import DEFAULT_MODEL, bundled_name
from quire.spec.kv_format import kv_format
from quire.spec.layout import DType
from quire.transfer.address import parse_address, parse_peers
from quire.transfer.connectors.registry import connector_kind

if TYPE_CHECKING:
    from quire.models.tokenizer import Tokenizer

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
    "--max-replicas": "--max-replicas 4",
    "--kv-events": "--kv-events tcp://127.0.0.1:5557",
    "prefix caching": "--prefix-caching",
    "a range of --kv-memory": "--kv-memory 1GiB..4GiB",
}

_ADD_FOR = {"prefill_peers": "--role decode", "transfer_listen": "--role prefill"}
"""Where less than `_ADD` would be refused."""

MOST_EPOCHS = 2**63

RoleWord = Literal["prefill", "decode", "both"]

SHORT_DTYPES = {"half": "float16", "fp16": "float16", "bf16": "bfloat16", "float": "float32", "fp32": "float32"}
_KV_MEMORY_INSTEAD = (
    "leave it out (pools take 80 % of a GPU's free memory after loading, or a quarter of a CPU's, at most 4 GiB), "
    "or give the bytes of the KV pools: --kv-memory 40GiB. "
    "`quire plan MODEL --gpu h100-80gb --mem-fraction-static 0.85` says how many those are."
)
_SHARE = (
    "is a share of the GPU for weights, activations and pools together; Quire takes the bytes of the KV pools alone."
)


_DRAFT = """use --speculative-config '{"method": "ngram", "num_speculative_tokens": 4}'."""


class ModelFields(Settings):
    """The model of an engine, its tokenizer and its device."""

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
    response_template: str = setting(
        "auto",
        "How the model writes tool calls and reasoning: auto (the tokenizer's own, or that of its chat template),"
        " none, the name of a family, or a JSON file.",
        metavar="NAME",
    )
    served_model_name: str | None = setting(None, "The model's name for clients.", otherwise="that of the model")
    skip_tokenizer_init: bool = setting(False, "Token ids in, token ids out: load no tokenizer.")
    device: str = setting("auto", "cpu, cuda, cuda:N, or auto: the first GPU, else the CPU.")
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = setting(
        "auto", "What the model computes in: {choices}; auto is the model's own."
    )


class CacheFields(WorthFields, TenantFields):
    """What an engine keeps in its pools, for which clients, and how it is checked."""

    GROUP: ClassVar[str] = MEMORY

    checkpoint_interval: int = setting(
        512, "Tokens between the states that a request leaves on its way, where frames are to spare.", ge=1
    )
    eviction: str = setting(
        "density",
        "Which cached pages go first: density, lru, lfu, slru, fifo, mru, filo, priority, gdsf, s3fifo, or "
        "one of your own (`register_eviction`).",
    )
    explain: bool = setting(
        True, "Keep why prompts of the last requests were not cached, and count prompt tokens by cause."
    )
    weights_epoch: int = setting(
        0,
        "How often weights were replaced under the same name; pages of another epoch are never found.",
        ge=0,
        lt=MOST_EPOCHS,
    )
    retain_share: float = setting(0.25, "Share of the pool that clients may ask to keep; 0 for nothing.", ge=0, le=0.9)
    session_share: float = setting(
        0.25, "Share of the pool that sessions may hold between turns; 0 for nothing.", ge=0, le=0.9
    )
    session_ttl: float = setting(300.0, "Seconds for which a session is kept after its last turn.", gt=0, le=86_400)
    canary: str = setting(
        "1%",
        "Share of the time in which cached pages on the device are looked at again: 1%, off, or all (each page at each "
        "step).",
        metavar="SHARE",
        pattern=r"^(off|all|[0-4]?[0-9](\.[0-9]+)?%)$",
    )
    canary_reports: str | None = setting(
        None, "Folder for a file about each damaged page.", metavar="DIR", otherwise="the log, and GET /v1/cache/audit"
    )
    kv_pressure: bool = setting(
        False,
        "The KV memory gets smaller while the container, or the machine, is short of memory, and larger after that.",
        needs="a range of --kv-memory",
    )
    elastic_gpu: bool = setting(
        False,
        "Map the KV memory of a GPU piece by piece, by CUDA's driver, so that its size can change while a server runs. "
        "No GPU has run it yet.",
    )
    identify_weights: bool = setting(False, "Read all weights to tell them from others.", option=None)
    kv_events: str | None = setting(
        None,
        "Where routers read what is cached, in vLLM's format: tcp://HOST:PORT. Tokens are in clear.",
        needs="prefix caching",
        metavar="URL",
        otherwise="nowhere",
    )
    kv_events_replay: str | None = setting(
        None,
        "Where they ask for events that they missed.",
        needs="--kv-events",
        metavar="URL",
        otherwise="nowhere",
    )


class StorageFields(TierFields):
    """Where pages outlive an engine."""

    GROUP: ClassVar[str] = TIERS

    storage: str | None = setting(
        None,
        "Where pages outlive the engine: a directory, or a URL (valkey://, redis://, s3://, mooncake://).",
        metavar="DIR_OR_URL",
    )
    storage_size: Bytes | None = setting(
        None,
        "What may be kept there: 100GiB.",
        needs="storage",
        otherwise="as the store is; of a new directory half of the free disk, at most 32GiB",
    )
    prefetch_seconds: float = setting(2.0, "The seconds of --prefetch timeout.", needs="--prefetch timeout", ge=0)


class RoleFields(TransferFields):
    """What an engine does beside others of the same model."""

    GROUP: ClassVar[str] = TRANSFER

    role: RoleWord | None = setting(
        None,
        "What this engine does beside others of the same model: {choices}. prefill computes prompts for others, decode "
        "has others compute its prompts.",
        aliases=("--disaggregation-mode",),
        otherwise="an engine on its own",
    )
    prefill_peers: str | None = setting(
        None,
        "Where the engines listen that compute prompts for this one: HOST:PORT, several with commas.",
        needs="--role",
        metavar="ADDRESSES",
        otherwise="none until PUT /v1/cache/peers",
    )
    transfer_listen: str = setting(
        "127.0.0.1:8998",
        "Where an engine that computes prompts listens for others: HOST:PORT. Pages for this engine arrive at HOST.",
        needs="--role",
    )
    transfer_connector: str = setting(
        "auto", "What carries pages: tcp, nixl, mooncake, or auto: nixl if installed, on loopback.", needs="--role"
    )
    transfer_unauthenticated: bool = setting(
        False, "nixl may listen off loopback, mooncake anywhere: who reaches them can write pages.", needs="--role"
    )
    transfer_secret: str | None = setting(
        None,
        "What engines show each other before anything else, 16 characters or more; better as QUIRE_TRANSFER_SECRET.",
        metavar="SECRET",
        secret=True,
    )
    transfer_name: str | None = setting(
        None,
        "What other engines call this one in metrics, explanations and logs, such as prefill-0.",
        needs="--role",
        metavar="NAME",
        pattern=r"^[A-Za-z0-9._:-]{1,64}$",
        otherwise="its address",
    )
    transfer_min_tokens: Tokens = setting(128, "Prompts that lack fewer tokens are computed here.", needs="--role")


class EngineConfig(RoleFields, StorageFields, CacheFields, StepFields, RankFields, PoolFields, ModelFields):
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

    policy: Literal["fcfs", "lpm"] = setting(
        "fcfs",
        "Which waiting request goes first: {choices} (longest cached prefix first).",
        group=SCHEDULING,
        aliases=("--schedule-policy",),
    )
    threads: int | None = setting(
        None, "CPU threads of torch in the engine's process.", otherwise="as many as cores", ge=1, le=1024
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
    otlp_traces_endpoint: str | None = setting(
        None,
        "Where a server sends spans of its requests, by OpenTelemetry: http://127.0.0.1:4318/v1/traces.",
        metavar="URL",
        otherwise="nowhere",
        pattern=r"^https?://.+$",
    )

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

    @field_validator("transfer_listen")
    @classmethod
    def _listens(cls, value: str) -> str:
        parse_address(value)
        return value

    @field_validator("prefill_peers")
    @classmethod
    def _peers(cls, value: str | None) -> str | None:
        parse_peers(value.split(",") if value is not None else ())
        return value

    @field_validator("kv_events", "kv_events_replay")
    @classmethod
    def _zeromq(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"tcp://.+:\d{1,5}", value):
            raise InvalidInput(
                f"'{value}' is no address of ZeroMQ.", fix="use tcp://HOST:PORT, as in tcp://127.0.0.1:5557."
            )
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
        if self.role == "prefill" and self.prefill_peers:
            raise InvalidInput(
                "role prefill computes its own prompts, and --prefill-peers names others.", fix="use --role both."
            )
        host, _ = parse_address(self.transfer_listen)
        connector_kind(self.transfer_connector, host, unauthenticated=self.transfer_unauthenticated)
        if (self.prefill_peers or self.role == "decode") and host in ("0.0.0.0", "::"):
            raise InvalidInput(
                f"other engines send pages to the host of --transfer-listen, and {self.transfer_listen} names none.",
                fix="give the address of this machine that they reach.",
            )
        if not self.enable_prefix_caching:
            raise InvalidInput("transferred pages are cached prefixes, and prefix caching is off.", fix="leave it on.")
        return self

    @model_validator(mode="after")
    def _pressure_is_of_the_host(self) -> EngineConfig:
        if self.kv_pressure and self.elastic_gpu:
            raise RefusedCombination(
                "--kv-pressure follows the memory of the host, and with --elastic-gpu KV memory is a GPU's.",
                fix="leave one of them out.",
            )
        return self

    @model_validator(mode="after")
    def _drafts_follow_tokens(self) -> EngineConfig:
        if self.overlap and not self.may_overlap:
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
            "--kv-events": given.get("kv_events") is not None,
            "prefix caching": given.get("enable_prefix_caching", True),
            "a range of --kv-memory": "kv_memory_least" in given or ".." in str(given.get("kv_memory")),
        }
        needed = {name: shown_of(cls, name)["needs"] for name in given if name in cls.model_fields}
        return {name: what for name, what in needed.items() if what and not there[what]}

    @property
    def has_tiers(self) -> bool:
        """Whether pages are stored on any lower tier."""
        return self.host_memory is not None or self.storage is not None or self.role is not None

    @property
    def sends_pages(self) -> bool:
        """Whether host memory has pages of requests that run: those that go to another engine, or come from one."""
        return self.role is not None

    @property
    def may_overlap(self) -> bool:
        """Whether a step can be launched before the one before it has settled: drafts follow tokens that have
        settled."""
        return self.speculative_config is None

    @property
    def has_fixed_steps(self) -> bool:
        """Whether decode steps have fixed shapes: they compute no drafts, and swap nothing in from host memory."""
        return self.speculative_config is None and self.hisparse is None

    @property
    def warms_up(self) -> bool:
        """Whether steps at start compile kernels. Latents in host memory are read by requests that were admitted, so
        their kernels are compiled by the first ones."""
        return not self.skip_warmup and self.attention_backend != "torch" and self.hisparse is None

    @property
    def why_loads(self) -> str:
        """Why pages are loaded even where computing would be quicker; "" if they are not."""
        if self.role is not None:
            return "so it is with a role"
        return "load is 'always'" if self.load == "always" else ""

    @property
    def shares_pages(self) -> bool:
        """Whether pages leave this process, for a store or for another engine."""
        return self.storage is not None or self.role is not None

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
        return load_tokenizer(
            self.tokenizer or self.model,
            revision=revision,
            chat_template=self.chat_template,
            response_template=self.response_template,
        )


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
