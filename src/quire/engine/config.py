"""EngineConfig: every setting of an engine, checked once, on the way in."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from quire.cache.kv_cache import CHECKPOINT_INTERVAL
from quire.errors import InvalidInput
from quire.offload.retention import RETAIN_SHARE
from quire.plan.budget import parse_bytes
from quire.plan.plan import PlanSettings
from quire.prefix.evict import DEFAULT_POLICY, eviction_policy
from quire.spec.bundled import DEFAULT_MODEL, bundled_name
from quire.spec.kv_format import kv_format
from quire.spec.layout import DType

STORE_DRAIN_S = 30.0
"""What bytes on their way to storage may take to arrive when an engine ends."""

FLUSH_S = 5.0
"""What the answer to a flush waits for storage to have removed everything."""

_STOP_S = 5.0
_ADD = {
    "storage": "--storage DIR",
    "host memory or storage": "--host-memory auto",
    "--prefetch timeout": "--prefetch timeout",
}

MOST_EPOCHS = 2**63


class EngineConfig(BaseModel):
    """Settings of one engine. Frozen; construct with `engine_config`, which turns a bad value into `InvalidInput`.

    `kv_dtype` is how keys, values and latents are stored: `auto` as the model computes them, or a `KVFormat` by name.
    `page_size` None: 16 tokens, or what the model's compressed entries need.
    `kv_memory` is what the KV pools may take, in bytes or as text (`8GiB`); None lets the engine choose and say so.
    `max_model_len` None means the model's own context. `max_num_batched_tokens` bounds a step: longer prompts are
    computed in chunks. `overlap` schedules the next step while one is in flight; None: where the device computes on its
    own. `threads` is how many CPU threads torch uses in this process; None: one for a model so small that a second
    would mostly wait, else as many as torch would take. `explain`: each request's prompt tokens are counted by what
    became of them, and the last requests can be asked about. `weights_epoch` counts how often weights were replaced
    under the same name: pages of another epoch are never found (`EngineCore.set_weights_epoch` while it runs).
    `retain_share` is what of the pool callers may ask to keep (`quire.offload.retention`), 0 for nothing.

    Of models that keep less than every token in some layers: `window_pool` off keeps windows whole, in the pool of the
    other layers; `swa_full_tokens_ratio` is tokens of window pools per token of full ones, `mamba_full_memory_ratio`
    bytes of states per byte of other pools, `max_mamba_cache_size` states, all by default what the load asks for; and
    `checkpoint_interval` is the tokens between states that a request leaves on its way, where frames are to spare.

    Below the device: `host_memory` is one total in bytes for all groups (`auto`: as much as is useful and there; None:
    none, or `auto` where there is `storage`); `storage` is a directory or a URL (`quire.tiers.stores.registry`), and
    `storage_size` what may be kept there (None: as the store is, or what the disk of a new directory has room for).
    `write_policy` says when a cached page is copied to the host, `load` whether it is loaded only where that is quicker
    than to compute it, as measured, and `prefetch` how long a request waits for what is stored, `prefetch_seconds` so
    with `timeout`. What contradicts itself, or would do nothing, is refused.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: str = DEFAULT_MODEL
    tokenizer: str | None = None
    served_model_name: str | None = None
    skip_tokenizer_init: bool = False
    device: str = "auto"
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    kv_dtype: str = "auto"
    page_size: int | None = Field(default=None, ge=1, le=1024)
    kv_memory: int | None = Field(default=None)
    max_model_len: int | None = Field(default=None, ge=1)
    max_running_requests: int = Field(default=256, ge=1, le=65_536)
    max_num_batched_tokens: int = Field(default=2048, ge=1)
    window_pool: bool = True
    swa_full_tokens_ratio: float | None = Field(default=None, gt=0, le=1)
    mamba_full_memory_ratio: float | None = Field(default=None, gt=0)
    max_mamba_cache_size: int | None = Field(default=None, ge=1)
    checkpoint_interval: int = Field(default=CHECKPOINT_INTERVAL, ge=1)
    policy: Literal["fcfs", "lpm"] = "fcfs"
    eviction: str = DEFAULT_POLICY
    enable_prefix_caching: bool = True
    enable_kv_events: bool = False
    host_memory: int | Literal["auto"] | None = None
    storage: str | None = None
    storage_size: int | None = None
    write_policy: Literal["write_through", "write_through_selective", "write_back"] = "write_through"
    load: Literal["break_even", "always"] = "break_even"
    prefetch: Literal["break_even", "best_effort", "wait_complete", "timeout"] = "break_even"
    prefetch_seconds: float = Field(default=2.0, ge=0)
    explain: bool = True
    weights_epoch: int = Field(default=0, ge=0, lt=MOST_EPOCHS)
    retain_share: float = Field(default=RETAIN_SHARE, ge=0, le=0.9)
    overlap: bool | None = None
    threads: int | None = Field(default=None, ge=1, le=1024)
    seed: int = 0

    @field_validator("kv_memory", mode="before")
    @classmethod
    def _bytes(cls, value: str | int | None) -> int | None:
        return None if value is None or value == "auto" else parse_bytes(value)

    @field_validator("host_memory", "storage_size", mode="before")
    @classmethod
    def _size(cls, value: str | int | None) -> int | str | None:
        return value if value is None or value == "auto" else parse_bytes(value)

    @field_validator("kv_dtype")
    @classmethod
    def _format(cls, value: str) -> str:
        return value if value == "auto" else kv_format(value, DType.FLOAT32).name

    @field_validator("eviction")
    @classmethod
    def _eviction(cls, value: str) -> str:
        eviction_policy(value)
        return value

    @field_validator("model", "tokenizer", mode="before")
    @classmethod
    def _path(cls, value: str | Path | None) -> str | None:
        return None if value is None else str(value)

    @model_validator(mode="after")
    def _tiers_agree(self) -> EngineConfig:
        """A setting that would do nothing is a mistake of whoever gave it."""
        if self.has_tiers and not self.enable_prefix_caching:
            raise InvalidInput(
                "host memory and storage keep cached prefixes, and prefix caching is off.",
                fix="leave prefix caching on, or leave --host-memory and --storage out.",
            )
        if self.storage is not None and not self.storage:
            raise InvalidInput("the storage has no name.", fix="give --storage a directory or a URL, or leave it out.")
        needs = {
            "storage": ("storage_size", "prefetch"),
            "host memory or storage": ("write_policy", "load"),
            "--prefetch timeout": ("prefetch_seconds",),
        }
        there = {
            "storage": self.storage is not None,
            "host memory or storage": self.has_tiers,
            "--prefetch timeout": self.prefetch == "timeout",
        }
        for what, names in needs.items():
            for name in () if there[what] else names:
                if getattr(self, name) != type(self).model_fields[name].default:
                    flag = f"--{name.replace('_', '-')}"
                    raise InvalidInput(
                        f"{flag} does nothing without {what}.", fix=f"add {_ADD[what]}, or leave it out."
                    )
        return self

    @property
    def has_tiers(self) -> bool:
        """Whether anything is kept below the device."""
        return self.host_memory is not None or self.storage is not None

    @property
    def stop_seconds(self) -> float:
        """What an engine may take to end: with storage, until what is on its way there has arrived."""
        return _STOP_S if self.storage is None else _STOP_S + STORE_DRAIN_S

    @property
    def model_name(self) -> str:
        """The name clients use: as served, that of a bundled model, or the last part of the model's path or hub id."""
        return self.served_model_name or bundled_name(self.model) or self.model.rstrip("/").rsplit("/", 1)[-1]


def engine_config(**settings: Any) -> EngineConfig:
    """Build the settings. Raises InvalidInput naming each bad one, what it got and what is allowed."""
    try:
        return EngineConfig(**settings)
    except ValidationError as error:
        causes = [cause["ctx"]["error"] for cause in error.errors() if "error" in cause.get("ctx", {})]
        for cause in causes:
            if isinstance(cause, InvalidInput):
                raise cause from error
        lines = [f"{'.'.join(map(str, e['loc']))}: {e['msg']} (got {e['input']!r})" for e in error.errors()]
        raise InvalidInput("settings: " + "; ".join(lines), fix="correct the settings named.") from error


def plan_settings(config: EngineConfig) -> PlanSettings:
    """What planning is told of an engine's settings, but for its budget."""
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
    )


def _fraction(value: float | None) -> Fraction | None:
    """A ratio as it was written, not as floating point keeps it."""
    return None if value is None else Fraction(str(value))
