"""Recurrent layers of transformers on Quire's pools of states, in flat batches of pieces of many sequences.

A layer's own code computes, or Quire's code with its weights if that cannot continue a sequence. Each call gets the
rows of one run of pieces and, as its cache, their states. The rest of the model (attention, experts) stays flat.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from quire.models.forward import Forward, RecordingForward, current_forward, in_forward
from quire.models.mixer_cache import MixerStates, RecordedStates
from quire.models.recurrences import headed_selective_mixer, lightning_mixer, lru_mixer, selective_mixer
from quire.spec.config_reader import ConfigReader
from quire.spec.families.state import recurrence_dtype
from quire.spec.layout import DType

_STORES = frozenset({"update_conv_state", "update_recurrent_state"})
"""What the forward pass of a layer with states calls on its cache."""
_CACHE_NAMES = ("cache_params", "past_key_values")
_STEP = "mamba2_selective_state_update"
"""Name of the function that advances a Mamba-2 layer by one token in transformers."""
_SMALLEST_CHUNK = 16
"""Rows. Mamba 2 scans in chunks of a fixed size, often 256, and its code for CPUs pads the last one."""


@dataclass(frozen=True, slots=True)
class _Ours:
    """Layers whose forward pass is Quire's, identified by a name that their own code mentions.

    `compute` is a function of `recurrences`. `pair`: the layer also returns a second value, which is not read.
    """

    mark: str
    compute: Callable[[Any, Tensor, MixerStates, Tensor | None], Tensor]
    pair: bool = False


_OURS = (
    _Ours("x_proj_weight", headed_selective_mixer),
    _Ours("mamba_selective_scan", selective_mixer),
    _Ours("set_linear_cache", lightning_mixer, pair=True),
    _Ours("conv1d_state", lru_mixer, pair=True),
)


def install_mixers(model: nn.Module) -> int:
    """Make the recurrent layers of `model` compute on pools inside a forward pass; returns how many there are.

    Outside one they compute as before. Bound methods are wrapped: no module is replaced and no weight copied.
    """
    config: Any = model.config
    state_dtype = recurrence_dtype(ConfigReader(config.to_dict()))
    installed = 0
    for module in model.modules():
        names = _names_in_forward(module)
        ours = next((kind for kind in _OURS if kind.mark in names), None)
        if not (ours or _STORES & names) or isinstance(module.forward, _Mixer):
            continue
        layer: Any = module
        if _STEP in names:
            layer.forward = _with_limited_step(layer)
        layer.forward = _Mixer(layer, ours, state_dtype)
        installed += 1
    return installed


def _names_in_forward(module: nn.Module) -> frozenset[str]:
    """Every attribute and global that the code of the class's forward pass mentions."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return frozenset(code.co_names) if code is not None else frozenset()


def _with_limited_step(layer: Any) -> Callable[..., Any]:
    """The forward pass of a Mamba-2 layer, limiting step sizes for one token as it does for several.

    transformers omits the limits for one token: a state would depend on how its tokens were divided. Only if the layer
    has limits does its code run with another function for that step; the code itself is the same.
    """
    own: Callable[..., Any] = layer.forward
    low, high = layer.time_step_limit
    if low <= 0 and math.isinf(high):
        return own
    function: Any = inspect.unwrap(type(layer).forward)
    step = function.__globals__[_STEP]

    def limited(
        state: Tensor, rows: Tensor, dt: Tensor, *others: Any, dt_bias: Tensor, dt_softplus: bool, **kwargs: Any
    ) -> Any:
        assert dt_softplus
        return step(state, rows, softplus(dt + dt_bias.to(dt.dtype)).clamp(low, high), *others, **kwargs)

    changed = FunctionType(
        function.__code__,
        {**function.__globals__, _STEP: limited},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    changed.__kwdefaults__ = function.__kwdefaults__
    return MethodType(changed, layer)


class _Mixer:
    """The forward pass of one recurrent module. It may serve several layers, as attention modules may."""

    def __init__(self, module: Any, ours: _Ours | None, state_dtype: DType) -> None:
        self._module = module
        self._own: Callable[..., Any] = module.forward
        self._chunk = int(getattr(module, "chunk_size", 0))
        self._pair = ours is not None and ours.pair
        self._state_dtype = state_dtype
        if ours is not None:
            self._compute: Callable[[Tensor, MixerStates, Tensor | None], Tensor] = partial(ours.compute, module)
        else:
            parameters = inspect.signature(module.forward).parameters
            self._cache_name = next(name for name in _CACHE_NAMES if name in parameters)
            self._compute = self._with_cache

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function that the surrounding layer calls; its rows are `[1, T, hidden]` in a forward pass."""
        if not in_forward():
            return self._own(*args, **kwargs)
        hidden: Tensor = args[0] if args else kwargs["hidden_states"]
        out = self._run(hidden, kwargs.get("position_ids"), current_forward())
        return (out, None) if self._pair else out

    def _run(self, hidden: Tensor, positions: Tensor | None, forward: Forward) -> Tensor:
        if isinstance(forward, RecordingForward):
            recorded = RecordedStates()
            out = self._compute(hidden, recorded, positions)
            forward.note(recorded.call(self._state_dtype))
            return out
        layers, batch = forward.states(forward.next_ordinal())
        conv, ssm = layers.get("conv"), layers.get("ssm")
        result = None
        for run in batch.runs(hidden.device):
            states = MixerStates(
                None if conv is None else batch.moves.read_states(conv, run.sources),
                None if ssm is None else batch.moves.read_states(ssm, run.sources, torch.float32),
            )
            rows = hidden[0, run.rows].view(run.count, run.length, -1)
            at = None if positions is None else positions[0, run.rows].view(run.count, run.length)
            computed = self._compute(rows, states, at).flatten(0, 1)
            if result is None:
                result = hidden.new_zeros(1, hidden.shape[1], computed.shape[-1])
            result[0, run.rows] = computed
            for layer, kept in ((conv, states.conv), (ssm, states.ssm)):
                if layer is not None and kept is not None:
                    batch.moves.write_states(layer, run.targets, kept)
        assert result is not None, "a step has rows"
        return result

    def _with_cache(self, rows: Tensor, states: MixerStates, positions: Tensor | None) -> Tensor:
        """The module's own forward pass; a short piece is computed in one chunk that is not much longer."""
        chunk = max(_SMALLEST_CHUNK, 1 << (rows.shape[1] - 1).bit_length())
        shorter = chunk < self._chunk and rows.device.type == "cpu"
        if shorter:
            self._module.chunk_size = chunk
        try:
            out: Tensor = self._own(rows, **{self._cache_name: states})
        finally:
            if shorter:
                self._module.chunk_size = self._chunk
        return out
