"""EagleHead, in the public layouts of EAGLE and EAGLE-3; and LoadedHead: a draft head on the pools of its target.

position            n                       n + 1
target computes     features f(n)           features f(n + 1)
head is given       f(n), token n + 1       f(n + 1), token n + 2
head predicts       token n + 2, f'(n + 1)  token n + 3, f'(n + 2)

`f'` stands in for features that the target has not computed yet. EAGLE reads the target's last hidden state and uses
its output layer. EAGLE-3 reads hidden states of several layers and has an output layer of its own, often for fewer
tokens. A head holds weights and computes; it stores nothing besides the keys and values of its attention.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NoReturn

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from quire.errors import ModelLoadError, UnsupportedModel
from quire.kernels.batch import PagedBatch
from quire.memory.pool import Pool, torch_dtype
from quire.models.attention import IMPLEMENTATION
from quire.models.decoder_layer import FusedLayer, fuse_layers, is_close
from quire.models.fingerprint import fingerprint_weights, identity_of
from quire.models.forward import LAST_HIDDEN, RecordingForward, RunningForward, forward_pass
from quire.models.hf import LoadedModel
from quire.models.hidden import DraftHead, ReadingLayer
from quire.models.linear import Packing, linear_inputs, prepare_linears, weight_bytes
from quire.models.native_decoder import NativeDecoder
from quire.models.rotary import Angles, fix_rotary
from quire.models.source import ModelSource, quiet, reading
from quire.plan.speculation import LAYER_IDS, captured_layers, check_head
from quire.spec.families import Layer
from quire.spec.layers import AttentionCall

logger = logging.getLogger(__name__)

_SOME_TOKENS = 4
"""Tokens of a page in the check of a head."""

_PREFIX = re.compile(r"^(model\.)?(layers\.0|midlayer)\.")
_UNUSED = ("embed_tokens.weight", "t2d", "midlayer.self_attn.rotary_emb.inv_freq")
"""Copies of what the target has, and what follows from `d2t`."""

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_INTEGERS = (torch.int64, torch.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """What a head reads. `num_features` hidden states of the target per token, each of `target_hidden` numbers."""

    target_hidden: int
    num_features: int = 1
    draft_vocab: int = 0
    """Tokens that the head's own output layer has. 0: it uses the target's."""
    bias: bool = False  # the fusion's
    norm_before_residual: bool = False

    @property
    def is_eagle3(self) -> bool:
        """Whether features are hidden states of several layers, and the output layer is the head's."""
        return self.draft_vocab > 0


class _EagleBlock(ReadingLayer):
    """Its attention reads the rows as they are."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(config, 0)
        self.mlp = LlamaMLP(config)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)


class _Eagle3Block(_EagleBlock):
    """Its attention reads embeddings and features side by side."""

    def __init__(self, config: LlamaConfig, shape: HeadShape) -> None:
        super().__init__(config)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.norm_before_residual = shape.norm_before_residual
        self.hidden_norm = LlamaRMSNorm(hidden, eps)
        self.input_layernorm = LlamaRMSNorm(hidden, eps)
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow: nn.Linear = getattr(self.self_attn, name)
            setattr(self.self_attn, name, nn.Linear(2 * hidden, narrow.out_features, narrow.bias is not None))

    def inputs(self, embeddings: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """The rows, `[1, T, hidden]`, and what attention reads, `[1, T, 2 * hidden]`."""
        normed = self.hidden_norm(features)
        rows = normed if self.norm_before_residual else features
        return rows, torch.cat((self.input_layernorm(embeddings), normed), -1)


class EagleHead(DraftHead):
    """One decoder layer that drafts from what a target computed. Its methods are those of `DraftHead`."""

    def __init__(self, config: LlamaConfig, shape: HeadShape) -> None:
        super().__init__()
        self.config, self.shape = config, shape
        hidden = config.hidden_size
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self._angles: Angles | None = None
        if shape.is_eagle3:
            self.fc = nn.Linear(shape.num_features * shape.target_hidden, hidden, shape.bias)
            self.midlayer: _EagleBlock = _Eagle3Block(config, shape)
            self.norm = LlamaRMSNorm(hidden, config.rms_norm_eps)
            self.lm_head = nn.Linear(hidden, shape.draft_vocab, bias=False)
            self.d2t = nn.Buffer(torch.zeros(shape.draft_vocab, dtype=torch.int64))
        else:
            self.fc = nn.Linear(2 * hidden, hidden, shape.bias)
            self.midlayer = _EagleBlock(config)

    def features(self, captured: Tensor) -> Tensor:
        """See `DraftHead`; `captured` is `[..., num_features * target_hidden]`."""
        fused: Tensor = self.fc(captured) if self.shape.is_eagle3 else captured
        return fused

    def prepare(self, context_length: int) -> int:
        """Angles of all positions."""
        self._angles = Angles(
            self.rotary_emb, self.midlayer.post_attention_layernorm.weight[None, None], context_length
        )
        return self._angles.num_bytes

    def forward(self, embeddings: Tensor, features: Tensor, positions: Tensor) -> Tensor:
        kept = self._angles
        angles = self.rotary_emb(features, positions) if kept is None else kept.at(positions[0], features)
        if isinstance(self.midlayer, _Eagle3Block):
            rows, read = self.midlayer.inputs(embeddings, features)
        else:
            rows = read = self.fc(torch.cat((embeddings, features), -1))
        out: Tensor = self.midlayer(rows, read, position_embeddings=angles)
        return out

    def logits(self, features: Tensor, target_head: nn.Module) -> Tensor:
        out: Tensor = self.lm_head(self.norm(features)) if self.shape.is_eagle3 else target_head(features)
        return out

    def target_ids(self) -> Tensor | None:
        if not self.shape.is_eagle3:
            return None
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t


def head_config(given: Mapping[str, Any], attention: str) -> LlamaConfig:
    """The configuration of a head's layer, from the contents of its config.json."""
    own = ("model_type", "architectures", "auto_map", "num_hidden_layers", "quantization_config")
    config = LlamaConfig(**{name: value for name, value in given.items() if name not in own}, num_hidden_layers=1)
    config._attn_implementation = attention
    return config


class LoadedHead:
    """See the module. `spec` says what its layer stores; `layers` are those of the target whose outputs it reads. From
    now on the target keeps them (`LoadedModel.capture`)."""

    def __init__(self, head: DraftHead, target: LoadedModel, *, name: str, layers: tuple[int, ...]) -> None:
        self.name = name
        self.layers = layers
        self.hidden_size = target.hidden_size
        self.device = target.device
        self._dtypes = {name: tensor.dtype for name, tensor in head.state_dict().items()}
        self._head = head.to(device=target.device, dtype=torch_dtype(target.spec.dtype)).requires_grad_(False).eval()
        self._embedding: nn.Module = target.module.get_input_embeddings()
        self._output_layer: nn.Module = target.module.get_output_embeddings()
        fix_rotary(head, target.spec.context_length)
        prepare_linears(head)
        with linear_inputs(head) as inputs:
            self._layer = self._discover()
        self._packing = Packing.of(head, inputs) if target.packing.products else Packing()
        self.weight_bytes = weight_bytes(head)
        fused: list[FusedLayer] = []
        if self._packing.products:
            self.weight_bytes += head.prepare(target.spec.context_length)
            fused = fuse_layers(head, target.spec.context_length, self._dry)
        target.packing.pack()
        self.spec = replace(target.spec, architecture=type(head).__name__, layers=(self._layer,), drafts=())
        target.capture(layers)
        if len(fused) == len(self._layer) == 1:
            self._call_once(fused[0])

    @cached_property
    def _fingerprint(self) -> bytes:
        found = fingerprint_weights(self._head.state_dict(), self._dtypes)
        self._packing.pack()
        return found

    def weights_changed(self) -> None:
        """The weights were replaced: they are packed again, and `identity` computes their fingerprint again."""
        self.__dict__.pop("_fingerprint", None)
        self._packing.pack(again=True)

    def identity(self, weights_epoch: int = 0, *, exact: bool = False) -> bytes:
        """As `LoadedModel.identity`."""
        described = json.dumps(["" if exact else self.name, self.layers, self._head.config.to_dict()], default=str)
        return identity_of(described.encode(), self._fingerprint if exact else b"", weights_epoch)

    @torch.inference_mode()
    def features(self, target: RunningForward) -> Tensor:
        """What the head reads of a pass of its target, `[T, hidden]`."""
        return self._head.features(target.captured(self.layers))

    @torch.inference_mode()
    def run(self, running: RunningForward, tokens: Tensor, features: Tensor, positions: Tensor) -> Tensor:
        """Features of the next positions, `[T, hidden]`, writing the keys and values of these to the pools.

        `features` `[T, hidden]` are those of `positions` int64 `[T]`, and `tokens` int64 `[T]` those behind them.
        """
        with forward_pass(running):
            out: Tensor = self._head(self._embedding(tokens)[None], features[None], positions[None])
        assert running.ordinal - running.first == len(self._layer), "a head made other attention calls than at load"
        return out[0]

    def _dry(self, tokens: Tensor, positions: Tensor) -> None:
        """A pass over tokens at positions, both int64 `[1, T]`, with features that no target has computed."""
        embeddings = self._embedding(tokens)
        self._head(embeddings, embeddings.flip(1), positions)

    @torch.inference_mode()
    def _call_once(self, layer: FusedLayer) -> None:
        """From now on one call of the library computes the layer, if it gives what the layer's functions give."""
        native = layer.native = NativeDecoder([layer])
        (group,) = self.spec.groups(_SOME_TOKENS)
        tokens, found = torch.arange(2 * _SOME_TOKENS, device=self.device), []
        features = self._embedding(tokens.flip(0))
        for native.is_on in (True, False):
            batch = PagedBatch.of(np.array([[1, 2]], np.int32), np.array([0]), np.array([len(tokens)]), _SOME_TOKENS)
            running = RunningForward((Pool(group.layout, 3),), (batch,))
            found.append(self.run(running, tokens, features, tokens))
        is_same = is_close(*found)
        native.is_on = is_same and native.num_steps > 0
        if not is_same:
            logger.warning("the layer of '%s' is computed by several calls: one gives other numbers", self.name)

    @torch.inference_mode()
    def _discover(self) -> Layer:
        """The calls of one pass over two tokens. A window is stored whole: only pages that hold all tokens have room
        for a draft."""
        recording = RecordingForward()
        tokens = torch.zeros(1, 2, dtype=torch.int64, device=self.device)
        embeddings = self._embedding(tokens)
        with forward_pass(recording):
            self._head(embeddings, torch.zeros_like(embeddings), torch.arange(2, device=self.device)[None])
        return tuple(
            replace(call, window=0) if isinstance(call, AttentionCall) and not call.chunked else call
            for call in recording.calls
        )

    @torch.inference_mode()
    def logits(self, features: Tensor) -> Tensor:
        """Logits float32 `[T, vocabulary]` of the tokens behind those that these features `[T, hidden]` were computed
        with; -inf of tokens that the head cannot draft."""
        found = self._head.logits(features, self._output_layer).float()
        ids = self._head.target_ids()
        if ids is None:
            return found
        every = found.new_full((len(found), self.spec.vocab_size), -math.inf)
        every[:, ids] = found
        return every


def load_head(name: str, target: LoadedModel, *, eagle3: bool, revision: str | None = None) -> LoadedHead:
    """Read the head in a folder or on the hub, for this target. `revision` is that of the hub.

    Raises ModelLoadError if it cannot be read or a tensor has another shape or type than it needs, and UnsupportedModel
    if it is no head of that kind or does not fit the target.
    """
    source = ModelSource.find(name, revision)
    given = source.read_config()
    check_head(name, given, target.hidden_size)
    with reading(source, "the weights"), quiet():
        tensors = {key: tensor for file in source.weight_files() for key, tensor in load_file(file).items()}
    weights = {_PREFIX.sub("midlayer.", key): tensor for key, tensor in tensors.items()}
    for unused in _UNUSED:
        weights.pop(unused, None)
    shape = _shape_of(name, weights, given, target, eagle3=eagle3)
    with quiet(), reading(source, "the configuration"):
        head = EagleHead(head_config(given, IMPLEMENTATION), shape)
    if shape.is_eagle3 and "d2t" not in weights:
        weights["d2t"] = torch.zeros(shape.draft_vocab, dtype=torch.int64)
    _refuse_tensors(name, weights, head)
    head.load_state_dict(weights)
    _refuse_vocabulary(name, head, target)
    layers = captured_layers(name, given, target.num_layers) if eagle3 else (LAST_HIDDEN,)
    if len(layers) != shape.num_features:
        raise UnsupportedModel(
            f"'fc.weight' of the head '{name}' reads {shape.num_features} states, and {len(layers)} layers are named.",
            fix=f"correct '{LAYER_IDS}' in its config.json.",
        )
    return LoadedHead(head, target, name=name, layers=layers)


def _shape_of(
    name: str, weights: Mapping[str, Tensor], given: Mapping[str, Any], target: LoadedModel, *, eagle3: bool
) -> HeadShape:
    others = sorted({found[0] for key in weights if (found := re.match(r"(model\.)?layers\.\d+", key))})
    if others:
        raise UnsupportedModel(
            f"the head '{name}' has {1 + len(others)} layers, among them '{others[0]}'.", fix="use a head of one layer."
        )
    if "fc.weight" not in weights or ("midlayer.hidden_norm.weight" in weights) != eagle3:
        kind, other = ("eagle3", "eagle") if eagle3 else ("eagle", "eagle3")
        said = f"is one of method {other}" if "fc.weight" in weights else "has no 'fc.weight'"
        raise UnsupportedModel(
            f"'{name}' is no head of method {kind}: it {said}.", fix="change the method or the model."
        )
    for key in ("fc.weight", "lm_head.weight"):
        if key in weights and weights[key].ndim != 2:
            _refuse_tensor(name, key, weights[key], "a matrix")
    hidden, fused = weights["fc.weight"].shape
    if hidden != target.hidden_size:
        _refuse_tensor(name, "fc.weight", weights["fc.weight"], f"a matrix of {target.hidden_size} rows")
    num_features = fused // hidden if eagle3 else 1
    if fused != (num_features if eagle3 else 2) * hidden:
        raise UnsupportedModel(
            f"'fc.weight' of the head '{name}' reads {fused:,} numbers, which are no states of {hidden:,}.",
            fix="use a head that was trained for this target.",
        )
    return HeadShape(
        target_hidden=hidden,
        num_features=num_features,
        draft_vocab=weights["lm_head.weight"].shape[0] if eagle3 and "lm_head.weight" in weights else int(eagle3),
        bias="fc.bias" in weights,
        norm_before_residual=bool(given.get("norm_before_residual")),
    )


def _refuse_tensors(name: str, weights: Mapping[str, Tensor], head: EagleHead) -> None:
    needed = head.state_dict()
    for key in sorted(needed.keys() ^ weights.keys()):
        said = "lacks" if key in needed else "has, besides those of a head,"
        raise ModelLoadError(f"the head '{name}' {said} the tensor '{key}'.", fix="use a head in the layout of EAGLE.")
    for key, tensor in needed.items():
        kinds = _FLOATS if tensor.is_floating_point() else _INTEGERS
        if tensor.shape != weights[key].shape or weights[key].dtype not in kinds:
            _refuse_tensor(name, key, weights[key], f"{list(tensor.shape)} of {_named(*kinds)}")


def _refuse_tensor(name: str, key: str, tensor: Tensor, needed: str) -> NoReturn:
    raise ModelLoadError(
        f"'{key}' of the head '{name}' is {list(tensor.shape)} of {_named(tensor.dtype)}, and must be {needed}.",
        fix="check that config.json belongs to the weights, or fetch the head again.",
    )


def _named(*kinds: torch.dtype) -> str:
    return " or ".join(str(kind).removeprefix("torch.") for kind in kinds)


def _refuse_vocabulary(name: str, head: EagleHead, target: LoadedModel) -> None:
    tokens = head.target_ids()
    if tokens is None:
        return
    outside = tokens[(tokens < 0) | (tokens >= target.spec.vocab_size)]
    if len(outside):
        raise UnsupportedModel(
            f"the head '{name}' drafts token {int(outside[-1]):,}, and the target '{target.name}' has "
            f"{target.spec.vocab_size:,} tokens.",
            fix="use a head that was trained for this target.",
        )
    if len(torch.unique(tokens)) < len(tokens):
        raise ModelLoadError(f"'d2t' of the head '{name}' names a token twice.", fix="fetch the head again.")
