"""PlanRequest: the arguments of `quire plan`, and the settings of its plan. Planning is imported on demand."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, field_validator

from quire.engine.config import HiSparse, Speculation
from quire.engine.setting import Bytes, Settings, Tokens, own_names, setting
from quire.errors import InvalidInput

if TYPE_CHECKING:
    from quire.cli.planned_model import PlannedModel
    from quire.plan.mix import Mix
    from quire.plan.parallel import Parallelism
    from quire.plan.plan import PlanSettings
    from quire.spec.speculation import SpeculativeConfig

_BUDGET, _LOAD, _SPLIT, _RANKS, _DRAFT = "Budget", "Load", "Split between pools", "Parallelism", "Speculation"
_HISPARSE = "Latents in host memory"
_FROM_LOAD = "from the load"


def _ratio(value: Any) -> Fraction:
    """A ratio as it was written, without rounding to floating point."""
    try:
        return Fraction(str(value))
    except ValueError:
        raise InvalidInput(f"a ratio of {value}.", fix="give a number above zero.") from None


Ratio = Annotated[Fraction, BeforeValidator(_ratio)]


class PlanRequest(Settings):
    """A model and the load to plan for; None is the planner's choice. Sizes are those of one rank."""

    model: str | None = setting(
        None, "A name in the catalogue, a bundled model, a config.json or its folder, or a hub id."
    )
    kv_memory: Bytes | None = setting(
        None, "Exactly the bytes that the pools of a rank may take: 40GiB.", group=_BUDGET
    )
    gpu: str | None = setting(None, "A device by name: h100-80gb. The pools get what the rest leaves.", group=_BUDGET)
    device_memory: Bytes | None = setting(
        None, "The device's memory, where its name is not known: 80GiB.", group=_BUDGET
    )
    mem_fraction_static: float | None = setting(
        None,
        "Share of the device for weights and pools, such as 0.85; printed back in bytes.",
        group=_BUDGET,
        aliases=("--gpu-memory-utilization",),
    )
    weights: Bytes | None = setting(None, "Bytes of weights on a rank, instead of the estimate.", group=_BUDGET)
    kv_dtype: str = setting(
        "auto",
        "auto, fp8_e4m3, fp8_e5m2, mxfp8, nvfp4 or fp4_e2m1.",
        group=_BUDGET,
        aliases=("--kv-cache-dtype",),
    )
    dtype: str | None = setting(None, "The model's dtype, where its configuration names none.", group=_BUDGET)
    state_dtype: str | None = setting(None, "Element type of recurrent states.", group=_BUDGET, otherwise="float32")
    page_size: int | None = setting(
        None, "Tokens in a page.", group=_BUDGET, aliases=("--block-size",), otherwise="16", ge=1
    )
    context: Tokens | None = setting(
        None,
        "Longest request, in tokens: 32k.",
        group=_LOAD,
        aliases=("--max-model-len", "--context-length"),
        otherwise="the model's",
    )
    concurrency: int | None = setting(
        None, "Requests of that length that must fit at once.", group=_LOAD, otherwise="1", ge=1
    )
    input_tokens: Tokens | None = setting(None, "Tokens of an expected prompt.", group=_LOAD)
    output_tokens: Tokens | None = setting(None, "Tokens of an expected answer.", group=_LOAD)
    trace: Path | None = setting(None, "Expected requests, from a trace: JSON lines or CSV.", group=_LOAD)
    max_running_requests: int = setting(
        256, "Sequences that hold memory at once.", group=_LOAD, aliases=("--max-num-seqs",), ge=1, le=65_536
    )
    max_num_batched_tokens: Tokens = setting(2048, "Tokens of one step.", group=_LOAD)
    prefix_caching: bool = setting(
        True,
        "Keep finished prefixes.",
        group=_LOAD,
        aliases=("--enable-prefix-caching/--no-enable-prefix-caching",),
    )
    swa_full_tokens_ratio: Ratio | None = setting(
        None, "Window tokens per full token.", group=_SPLIT, otherwise=_FROM_LOAD, metavar="NUMBER"
    )
    mamba_full_memory_ratio: Ratio | None = setting(
        None, "Bytes of state per other byte.", group=_SPLIT, otherwise=_FROM_LOAD, metavar="NUMBER"
    )
    max_mamba_cache_size: int | None = setting(None, "State slots.", group=_SPLIT, otherwise=_FROM_LOAD, ge=1)
    max_total_tokens: Tokens | None = setting(None, "At most this many tokens; every pool follows.", group=_SPLIT)
    window_pool: bool = setting(True, "Windows have a pool of their own.", group=_SPLIT)
    tp: int = setting(1, "Tensor parallelism.", group=_RANKS, aliases=("--tensor-parallel-size", "--tp-size"))
    pp: int | None = setting(None, "Pipeline stages.", group=_RANKS, otherwise="1")
    pp_layers: str | None = setting(None, "Layers of each stage: 20,20,24.", group=_RANKS)
    dp: int = setting(1, "Attention groups among the tp ranks.", group=_RANKS)
    dcp: int = setting(1, "Ranks that share a page's tokens.", group=_RANKS)
    hisparse: HiSparse | None = setting(
        None,
        "Latents of sparse attention in host memory, as for `quire serve`: a JSON object, or {} for planned sizes.",
        group=_HISPARSE,
        aliases=("--hisparse-config",),
        metavar="JSON",
        otherwise="all latents on the device",
    )
    host_memory: Bytes | None = setting(
        None, "Host memory of a rank for them.", group=_HISPARSE, otherwise="as much as they need"
    )
    hit_rate: float | None = setting(
        None, "Share of the selected tokens that a buffer has.", group=_HISPARSE, otherwise="0.85", ge=0, le=1
    )
    host_bandwidth: float | None = setting(
        None, "GB/s from host memory to the device.", group=_HISPARSE, otherwise="80 % of the --gpu's bus", gt=0
    )
    decode_ms: float | None = setting(
        None,
        "Milliseconds of a decode step, beside those that each request adds.",
        group=_HISPARSE,
        otherwise="estimated from the --gpu",
        gt=0,
    )
    speculative_config: Speculation | None = setting(
        None,
        "How tokens are drafted, as for `quire serve`: a JSON object.",
        group=_DRAFT,
        metavar="JSON",
        otherwise="one token a step",
    )
    speculative_num_steps: int | None = setting(None, "Depth of a draft.", group=_DRAFT)
    speculative_topk: int | None = setting(None, "Branches of a draft.", group=_DRAFT, otherwise="1")
    speculative_num_draft_tokens: int | None = setting(
        None, "Tokens verified at once.", group=_DRAFT, otherwise="one more than the depth"
    )
    speculative_draft_layers: int | None = setting(
        None, "Draft layers with keys and values.", group=_DRAFT, otherwise="1"
    )

    @field_validator("mem_fraction_static")
    @classmethod
    def _share(cls, value: float | None) -> float | None:
        if value is not None and not 0 < value < 1:
            raise InvalidInput(f"{value} is not a share.", fix="give a share between 0 and 1, such as 0.85.")
        return value

    def planned_model(self) -> PlannedModel:
        """The model, from its configuration. Raises what `planned_model` raises, and InvalidInput without a name."""
        if self.model is None:
            raise InvalidInput("no model is named.", fix="name one: `quire plan llama-3.1-8b`, or see --list.")
        from quire.cli.planned_model import planned_model

        return planned_model(self.model, dtype=self.dtype, state_dtype=self.state_dtype)

    def changed(self, text: str) -> PlanRequest:
        """This request with the model and the settings of `text`, as in `name,kv-dtype=fp8,tp=2`.

        A switch is written without its "no": `window-pool=false`. Raises InvalidInput.
        """
        name, *changes = text.split(",")
        found: dict[str, Any] = {"model": name}
        for change in changes:
            option, _, value = change.partition("=")
            found |= own_names([PlanRequest], {option.strip(): value}, where=f"'{text}'")
        return PlanRequest.read({**{name: getattr(self, name) for name in self.model_fields_set}, **found})

    def settings(self) -> PlanSettings:
        """The settings of the plan. Raises InvalidInput for those that contradict each other."""
        from quire.plan.devices import Device, find_device
        from quire.plan.plan import PlanSettings

        device = Device(name=self.gpu or "device", memory=self.device_memory) if self.device_memory else None
        if device is None and self.gpu is not None:
            device = find_device(self.gpu)
        if self.mem_fraction_static is not None and device is None:
            raise InvalidInput("--mem-fraction-static is a share of a device.", fix="name one with --gpu.")
        return PlanSettings(
            kv_memory=self.kv_memory,
            device=device,
            mem_fraction_static=self.mem_fraction_static,
            weight_bytes=self.weights,
            kv_dtype=self.kv_dtype,
            page_size=self.page_size,
            context=self.context,
            concurrency=self.concurrency,
            mix=self._mix(),
            chunk=self.max_num_batched_tokens,
            shares=self.prefix_caching,
            parallel=self._parallel(),
            speculation=self._speculation(),
            swa_full_tokens_ratio=self.swa_full_tokens_ratio,
            mamba_full_memory_ratio=self.mamba_full_memory_ratio,
            max_mamba_cache_size=self.max_mamba_cache_size,
            max_total_tokens=self.max_total_tokens,
            max_requests=self.max_running_requests,
            window_pool=self.window_pool,
            hisparse=self.hisparse,
            host_memory=self.host_memory,
        )

    def _mix(self) -> Mix | None:
        from quire.plan.mix import read_trace, uniform

        lengths = [tokens for tokens in (self.input_tokens, self.output_tokens) if tokens is not None]
        if self.trace is not None:
            if lengths:
                raise InvalidInput(
                    "a trace has lengths of its own.", fix="give --trace, or --input-tokens and --output-tokens."
                )
            return read_trace(self.trace)
        return uniform(sum(lengths), f"requests of {sum(lengths):,} tokens") if lengths else None

    def _parallel(self) -> Parallelism:
        from quire.plan.parallel import Parallelism

        try:
            layers = tuple(int(part) for part in self.pp_layers.split(",")) if self.pp_layers else ()
        except ValueError:
            raise InvalidInput(f"'{self.pp_layers}' are not layer counts.", fix="write them as 20,20,24.") from None
        stages = self.pp if self.pp is not None else len(layers) or 1
        return Parallelism(tp=self.tp, pp=stages, dp=self.dp, dcp=self.dcp, pp_layers=layers)

    def _speculation(self) -> SpeculativeConfig | None:
        from quire.spec.speculation import SpeculativeConfig

        given = {
            "num_steps": self.speculative_num_steps,
            "topk": self.speculative_topk,
            "num_draft_tokens": self.speculative_num_draft_tokens,
            "num_layers": self.speculative_draft_layers,
        }
        if all(number is None for number in given.values()):
            return self.speculative_config
        if self.speculative_config is not None:
            raise InvalidInput(
                "--speculative-config beside other options of speculation.", fix="write all of them into its JSON."
            )
        return SpeculativeConfig.parse({"method": "mtp", **given})
