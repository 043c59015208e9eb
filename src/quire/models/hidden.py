"""Hidden states of a target, kept by hooks of the modules that return them, and DraftHead, which reads them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from quire.errors import UnsupportedModel
from quire.models.forward import LAST_HIDDEN, RunningForward, current_forward, in_forward, keep_hidden


class DraftHead(nn.Module, ABC):
    """One layer that drafts from what a target computed. Its parameters are those that it does not share with it.

    `config` is that of its layer; its `_attn_implementation` names the attention function.
    """

    config: Any

    def features(self, captured: Tensor) -> Tensor:
        """Features `[..., hidden]` from the hidden states that the target kept, side by side."""
        return captured

    @abstractmethod
    def forward(self, embeddings: Tensor, features: Tensor, positions: Tensor) -> Tensor:
        """Features of the next position, `[1, T, hidden]`.

        `embeddings` `[1, T, hidden]` are those of the tokens behind the positions `[1, T]` of the features.
        """

    def prepare(self, context_length: int) -> int:
        """Compute once what passes up to this context need again and again. Returns its bytes."""
        return 0

    @abstractmethod
    def logits(self, features: Tensor, target_head: nn.Module) -> Tensor:
        """Logits `[..., draft vocabulary]` of the token that follows; `target_head` is the target's output layer."""

    def target_ids(self) -> Tensor | None:
        """The target's ids of the draft vocabulary, int64; None if both are the same."""
        return None


class ReadingLayer(nn.Module):
    """A Llama layer whose attention reads rows that its caller gives, in place of a norm of those that it adds to: a
    head's."""

    self_attn: Any
    post_attention_layernorm: Any
    mlp: Any

    def forward(self, rows: Tensor, read: Tensor, **others: Any) -> Tensor:
        """Rows after the layer, `[1, T, hidden]`, of those before it and what its attention reads, `[1, T, inputs]`."""
        attended, _ = self.self_attn(read, **others)
        attended = rows + attended
        out: Tensor = attended + self.mlp(self.post_attention_layernorm(attended))
        return out


def capture_hidden(decoder: nn.Module, layers: Sequence[int], name: str) -> list[RemovableHandle]:
    """Keep the outputs of these layers of `decoder`, or its own, in each forward pass on the pools.

    It ends when the returned hooks are removed. Raises UnsupportedModel, before there are any, if `decoder` has no such
    layer.
    """
    found: Any = getattr(decoder, "layers", None) or getattr(decoder, "h", ())  # as in the family of GPT-2
    absent = [layer for layer in layers if layer != LAST_HIDDEN and not 0 <= layer < len(found)]
    if absent:
        raise UnsupportedModel(
            f"the head reads the output of layer {absent[0]}, and '{name}' has {len(found)} layers.",
            fix="use a head that was trained for this target.",
        )
    modules = [decoder if layer == LAST_HIDDEN else found[layer] for layer in layers]
    return [module.register_forward_hook(partial(_keep, layer)) for layer, module in zip(layers, modules, strict=True)]


@contextmanager
def keeping_output(decoder: nn.Module, running: RunningForward) -> Iterator[None]:
    """Inside the block, `running` keeps what `decoder` returns."""

    def keep(module: nn.Module, inputs: Any, output: Any) -> None:
        del module, inputs
        running.output = output

    hook = decoder.register_forward_hook(keep)
    try:
        yield
    finally:
        hook.remove()


def output_of_rows(output: Any, rows: Tensor) -> Any:
    """What a decoder that returned `output` for all rows of a step returns for these alone."""
    return type(output)(**dict(output) | {"last_hidden_state": output.last_hidden_state[:, rows]})


@contextmanager
def returning(decoder: nn.Module, output: Any) -> Iterator[None]:
    """Inside the block, `decoder` computes nothing and returns `output`."""
    own = vars(decoder).get("forward")  # only if it is not its class's
    decoder.forward = lambda *args, **kwargs: output
    try:
        yield
    finally:
        del decoder.forward
        if own is not None:
            decoder.forward = own


def _keep(layer: int, module: nn.Module, inputs: Any, output: Any) -> None:
    del module, inputs
    if in_forward():
        states: Tensor = output if isinstance(output, Tensor) else output[0]
        keep_hidden(current_forward(), layer, states[0])
