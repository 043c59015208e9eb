"""MtpHead: the layer of a model that predicts one token further (multi-token prediction), as a draft head.

transformers builds the layer from the model's own classes, and leaves its weights out of the model. Checkpoints have
them as `model.layers.N` behind the N layers of the model, or as `mtp`. Of several such layers the first drafts all
tokens: its output at a position stands in for what the model computes at the next one.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from safetensors import safe_open
from torch import Tensor, nn
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_layers import MtpModel
from transformers.modeling_utils import LoadStateDictConfig

from quire.errors import ModelLoadError, UnsupportedModel
from quire.memory.pool import torch_dtype
from quire.models.draft_head import LoadedHead
from quire.models.forward import LAST_HIDDEN
from quire.models.hf import LoadedModel
from quire.models.hidden import DraftHead
from quire.models.latent import install_latents
from quire.models.source import ModelSource, quiet, reading
from quire.plan.speculation import prediction_tensors, refuse_mtp


class MtpHead(DraftHead):
    """See the module. The embedding, the output layer and the rotary embedding are the model's."""

    def __init__(self, mtp: MtpModel) -> None:
        super().__init__()
        self.config = mtp.config
        self.layer = mtp.layers[0]
        self.norm = getattr(mtp, "shared_post_norm", None)
        self._forward_layer = mtp.forward_layer  # a method is no submodule, so what is shared is not among the weights
        self._project = mtp._project_to_logits

    def forward(self, embeddings: Tensor, features: Tensor, positions: Tensor) -> Tensor:
        """See `DraftHead`. The layer is at the positions of the tokens, one behind those of the features."""
        out: Tensor = self._forward_layer(0, features, positions + 1, None, inputs_embeds=embeddings)
        return out

    def logits(self, features: Tensor, target_head: nn.Module) -> Tensor:
        del target_head  # the layer has it
        out: Tensor = self._project(features)
        return out


def load_mtp(target: LoadedModel, revision: str | None = None) -> LoadedHead:
    """Read the first prediction layer of `target` from its checkpoint. `revision` is that of the hub.

    Raises UnsupportedModel if transformers does not compute its kind, and ModelLoadError if the checkpoint has no such
    layer or a tensor does not fit.
    """
    refuse_mtp(target.config, target.name)
    source = ModelSource.find(target.name, revision)
    with ExitStack() as opened, quiet(), reading(source, "the prediction layer"):
        tensors = _find_tensors(source, target, opened)
        mtp = _build(target)
        _fill(mtp, target, tensors)
    install_latents(mtp.layers)
    return LoadedHead(MtpHead(mtp), target, name=f"{target.name} (mtp)", layers=(LAST_HIDDEN,))


def _find_tensors(source: ModelSource, target: LoadedModel, opened: ExitStack) -> dict[str, Any]:
    """The tensors of the first layer by their names, not read yet. Their files are closed with `opened`."""
    files = [opened.enter_context(safe_open(path, framework="pt")) for path in source.weight_files()]
    where = {key: file for file in files for key in file.keys()}  # noqa: SIM118 (a file is no mapping)
    return {key: where[key].get_slice(key) for key in prediction_tensors(where, target.num_layers, target.name)}


def _build(target: LoadedModel) -> MtpModel:
    """The layer without weights."""
    text = target.module.config.get_text_config()
    if getattr(text, "num_mtp_layers", None) is None:  # Qwen's configurations have other names for it, or none
        text.num_mtp_layers = 1
    if getattr(text, "layer_types", None) and not getattr(text, "mtp_layer_types", None):
        text.mtp_layer_types = ["full_attention"] * text.num_mtp_layers
    with ExitStack() as contexts:
        for context in MtpModel.get_init_context(torch_dtype(target.spec.dtype), False, False, None):
            contexts.enter_context(context)
        mtp = MtpModel(target.module, 1)
    norms = type(mtp.layers[0].enorm), type(target.module.get_decoder().norm)
    if norms[0] is not norms[1]:  # the model's last layer may be of another kind
        raise UnsupportedModel(
            f"the prediction layer of '{target.name}' would have a {norms[0].__name__} where the model has a "
            f"{norms[1].__name__}: the model's last layer is no attention.",
            fix="use another method, such as ngram.",
        )
    return mtp


def _fill(mtp: MtpModel, target: LoadedModel, tensors: dict[str, Any]) -> None:
    """Read the tensors into the layer, under the names and in the forms that the model's classes have."""
    config = LoadStateDictConfig(
        weight_mapping=mtp.get_weight_conversions(target.module),
        device_map={"": target.device},
        dtype=torch_dtype(target.spec.dtype),
    )
    loaded, _ = convert_and_load_state_dict_in_model(model=mtp, state_dict=tensors, load_config=config)
    own = sorted(key for key in loaded.missing_keys if key.startswith(("layers.", "shared_post_norm.")))
    wrong = [f"'{name}' is {list(has)}, and must be {list(needs)}" for name, has, needs in loaded.mismatched_keys]
    wrong += [f"'{name}' cannot be made of its tensors" for name in loaded.conversion_errors]
    wrong += [f"it lacks '{name}'" for name in own]
    wrong += [f"it has '{name}', which is not computed" for name in sorted(loaded.unexpected_keys)]
    if wrong:
        raise ModelLoadError(
            f"the prediction layer of '{target.name}' does not fit: {wrong[0]} ({len(wrong)} in all).",
            fix="copy all *.safetensors files, and check that config.json belongs to them.",
        )
    assert not any(tensor.device.type == "meta" for tensor in mtp.state_dict().values())
