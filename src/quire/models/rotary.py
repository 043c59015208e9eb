"""Rotary embeddings: angles that would depend on the batch are fixed once per deployment, and kept by position."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

_KEPT = 4 << 20


def fix_rotary(model: torch.nn.Module, max_length: int) -> int:
    """Make rotary modules of `model` use one set of angles for every batch; returns how many sets there were to fix.

    Two variants would read the longest position of the batch, so that a request's output depended on its neighbours.
    Here both use the angles that transformers gives a sequence of the deployment's `max_length` tokens, also for
    shorter ones. So outputs differ from what transformers gives for a shorter sequence alone:

    - `longrope`: the long factors if `max_length` exceeds the length the model was first trained on, else the short.
    - `dynamic` (NTK): the base stretched for `max_length` if that exceeds `max_position_embeddings`, else unchanged.

    Kinds of layers with rotary embeddings of their own are fixed one by one.
    """
    fixed = 0
    for module, kind, variant in _variants(model):
        if variant in ("longrope", "dynamic"):
            _fix(module, variant, max_length, kind)
            if kind is None:
                module.rope_type = "default"
            else:
                module.rope_type[kind] = "default"
            fixed += 1
    return fixed


def grows_with_length(model: torch.nn.Module) -> bool:
    """Whether angles follow the length, so that a deployment may be longer than `max_position_embeddings`."""
    return any(variant == "dynamic" for _, _, variant in _variants(model))


class Angles:
    """What a rotary module gives at each position, kept for the first positions of a context: as many as take `_KEPT`
    bytes. Where the module gives other angles beside other positions, none are kept, and it is called each time."""

    def __init__(self, module: torch.nn.Module, rows: Tensor, context_length: int) -> None:
        """`rows` `[1, T, hidden]` have the dtype of the model."""
        self._module = module
        found = self._of(rows, torch.zeros(1, dtype=torch.int64))
        bytes_each = sum(angles.nbytes for angles in found)
        count = min(context_length, _KEPT // bytes_each)
        kept = self._of(rows, torch.arange(count))
        ends = [*range(min(count, 3)), *range(max(count - 3, 0), count)]
        alone = [self._of(rows, torch.tensor([position])) for position in ends]
        last = self._of(rows, torch.tensor([*ends, context_length - 1]))
        same = all(
            torch.equal(angles[0, ends], torch.cat([each[of][0] for each in alone]))
            and torch.equal(angles[0, ends], last[of][0, :-1])
            for of, angles in enumerate(kept)
        )
        self._kept = [angles[0].clone() if same else angles[0, :0].clone() for angles in kept]

    @property
    def num_bytes(self) -> int:
        """Bytes of what is kept."""
        return sum(angles.nbytes for angles in self._kept)

    def at(self, positions: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of `positions` int64 `[T]`, each `[1, T, dim]`, in the dtype of `rows` `[1, T, hidden]`."""
        cos, sin = self._kept
        if int(positions.max()) < cos.shape[0]:
            return cos.index_select(0, positions)[None], sin.index_select(0, positions)[None]
        return self._of(rows, positions)

    def _of(self, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self._module(rows, positions[None])
        return cos, sin


def _variants(model: torch.nn.Module) -> Iterator[tuple[Any, str | None, str]]:
    """(module, kind of layers, variant) of all rotary embeddings; the kind is None if a module has one variant."""
    for module in model.modules():
        found: Any = getattr(module, "rope_type", None)
        if isinstance(found, dict):
            yield from ((module, kind, variant) for kind, variant in list(found.items()))
        elif found is not None:
            yield module, None, found


def _fix(module: Any, variant: str, max_length: int, kind: str | None) -> None:
    """Set the frequencies of `module` to those of `max_length`; if it has several kinds, only those of `kind`."""
    config = module.config
    buffer: Tensor = module.inv_freq if kind is None else getattr(module, f"{kind}_inv_freq")
    if variant == "dynamic":
        if max_length <= config.max_position_embeddings:
            return  # the initial value, whose base some models choose themselves
        length = max_length
    else:
        parameters = config.rope_parameters if kind is None else config.rope_parameters[kind]
        original = int(parameters["original_max_position_embeddings"])
        length = original + 1 if max_length > original else original
        mscale = parameters.get("long_mscale" if max_length > original else "short_mscale")
        if mscale is not None:  # PhiMoE, which chooses by the batch
            parameters |= {"short_mscale": mscale, "long_mscale": mscale}
    of_kind = {} if kind is None else {"layer_type": kind}
    chosen, _ = ROPE_INIT_FUNCTIONS[variant](config, buffer.device, seq_len=length, **of_kind)
    buffer.copy_(chosen)
