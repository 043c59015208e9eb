"""PlanRequest: the arguments of `quire plan`, and the settings of its plan. Planning is imported on demand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire.errors import InvalidInput
from quire.plan.settings import LoadFields, PlanSettings
from quire.settings.fields import MEMORY, SPECULATION, BusFields, CostFields, HostFields, RankFields, TenantFields
from quire.settings.setting import Bytes, Tokens, own_names, setting

if TYPE_CHECKING:
    from quire.cli.planned_model import PlannedModel
    from quire.plan.mix import Mix
    from quire.plan.parallel import Parallelism
    from quire.spec.speculation import SpeculativeConfig

_LOAD, _RANKS = "Load", "Parallelism"


class PlanRequest(TenantFields, HostFields, BusFields, CostFields, RankFields, LoadFields):
    """A model and the load to plan for; None is the planner's choice. Sizes are those of one rank."""

    planned: str | None = setting(
        None, "A name in the catalogue, a bundled model, a config.json or its folder, or a hub id.", option="--model"
    )
    device_memory: Bytes | None = setting(
        None, "The device's memory, where its name is not known: 80GiB.", group=MEMORY
    )
    model_dtype: str | None = setting(
        None, "The model's dtype, where its configuration names none.", group=MEMORY, option="--dtype"
    )
    input_tokens: Tokens | None = setting(None, "Tokens of an expected prompt.", group=_LOAD)
    output_tokens: Tokens | None = setting(None, "Tokens of an expected answer.", group=_LOAD)
    trace: str | None = setting(None, "Expected requests: what `quire replay` takes as a trace.", group=_LOAD)
    pp: int | None = setting(None, "Pipeline stages.", group=_RANKS, otherwise="1")
    pp_layers: str | None = setting(None, "Layers of each stage: 20,20,24.", group=_RANKS)
    dp: int = setting(1, "Attention groups among the tp ranks.", group=_RANKS)
    dcp: int = setting(1, "Ranks that share a page's tokens.", group=_RANKS)
    hit_rate: float | None = setting(
        None, "Share of the selected tokens that a hot buffer has.", group=MEMORY, otherwise="0.85", ge=0, le=1
    )
    speculative_num_steps: int | None = setting(None, "Depth of a draft.", group=SPECULATION)
    speculative_topk: int | None = setting(None, "Branches of a draft.", group=SPECULATION, otherwise="1")
    speculative_num_draft_tokens: int | None = setting(
        None, "Tokens verified at once.", group=SPECULATION, otherwise="one more than the depth"
    )

    def planned_model(self) -> PlannedModel:
        """The model, from its configuration. Raises what `planned_model` raises, and InvalidInput without a name."""
        if self.planned is None:
            raise InvalidInput("no model is named.", fix="name one: `quire plan llama-3.1-8b`, or see --list.")
        from quire.cli.planned_model import planned_model

        return planned_model(self.planned, dtype=self.model_dtype)

    def variant(self, text: str) -> PlanRequest:
        """This request with the model and the settings of `text`, as in `name,kv-dtype=fp8,tp=2`.

        A switch is written without its "no": `window-pool=false`. Raises InvalidInput.
        """
        name, *changes = text.split(",")
        found: dict[str, Any] = {"planned": name}
        for change in changes:
            option, _, value = change.partition("=")
            found |= own_names([PlanRequest], {option.strip(): value}, where=f"'{text}'")
        return PlanRequest.read({**{name: getattr(self, name) for name in self.model_fields_set}, **found})

    def settings(self) -> PlanSettings:
        """The settings of the plan. Raises InvalidInput for those that contradict each other."""
        from quire.plan.devices import Device, find_device

        device = Device(name=self.gpu or "device", memory=self.device_memory) if self.device_memory else None
        if device is None and self.gpu is not None:
            device = find_device(self.gpu)
        if self.mem_fraction_static is not None and device is None:
            raise InvalidInput("--mem-fraction-static is a share of a device.", fix="name one with --gpu.")
        return PlanSettings(
            **self.shared(PlanSettings)
            | {
                "rank_device": device,
                "mix": self._mix(),
                "parallel": self._parallel(),
                "speculative_config": self._speculation(),
                "latent_bytes": self.host_memory if self.host_memory != "auto" else None,
            }
        )

    def _mix(self) -> Mix | None:
        from quire.plan.mix import mix_of, uniform

        lengths = [tokens for tokens in (self.input_tokens, self.output_tokens) if tokens is not None]
        if self.trace is not None:
            if lengths:
                raise InvalidInput(
                    "a trace has lengths of its own.", fix="give --trace, or --input-tokens and --output-tokens."
                )
            from quire.sim.trace import open_trace

            trace = open_trace(self.trace)
            return mix_of(map(sum, trace.lengths), f"{len(trace):,} requests of {trace.name}")
        return uniform(sum(lengths), f"requests of {sum(lengths):,} tokens") if lengths else None

    def _parallel(self) -> Parallelism:
        from quire.plan.parallel import Parallelism

        try:
            layers = tuple(int(part) for part in self.pp_layers.split(",")) if self.pp_layers else ()
        except ValueError:
            raise InvalidInput(f"'{self.pp_layers}' are not layer counts.", fix="write them as 20,20,24.") from None
        stages = self.pp if self.pp is not None else len(layers) or 1
        return Parallelism(tp=self.tensor_parallel_size, pp=stages, dp=self.dp, dcp=self.dcp, pp_layers=layers)

    def _speculation(self) -> SpeculativeConfig | None:
        from quire.spec.speculation import SpeculativeConfig

        given = {
            "num_steps": self.speculative_num_steps,
            "topk": self.speculative_topk,
            "num_draft_tokens": self.speculative_num_draft_tokens,
        }
        if all(number is None for number in given.values()):
            return self.speculative_config
        if self.speculative_config is not None:
            raise InvalidInput(
                "--speculative-config beside other options of speculation.", fix="write all of them into its JSON."
            )
        return SpeculativeConfig.parse({"method": "mtp", **given})
