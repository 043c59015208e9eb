"""LoadedModel: a Hugging Face causal language model that computes on Quire's pools. No model code is replaced.

Loading refuses models that are known not to run, records the attention calls of one run, and then compares steps of
mixed, paged, chunked sequences with the model's own forward pass: a model that would silently be wrong is refused.
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES, AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, AutoModelForCausalLM

from quire.errors import InvalidInput, LayoutMismatch, ModelCheckFailed, ModelLoadError, QuireError, UnsupportedModel
from quire.memory.pool import torch_dtype
from quire.models.attention import IMPLEMENTATION, OWN_ATTENTION, install_kv_sharing
from quire.models.block_sparse import install_block_indexers
from quire.models.check import check_forward, plain_logits
from quire.models.chunked import install_chunks
from quire.models.compressed import install_compressors
from quire.models.decoder_layer import FusedDecoder, fuse_layers
from quire.models.fingerprint import fingerprint_weights, identity_of
from quire.models.forward import HIDDEN, RecordingForward, RunningForward, forward_pass
from quire.models.hidden import capture_hidden, keeping_output, output_of_rows, returning
from quire.models.latent import install_latents
from quire.models.linear import Packing, linear_inputs, prepare_linears, weight_bytes
from quire.models.mixers import install_mixers
from quire.models.pooling import Pooler, read_pooler
from quire.models.registry import ALIASES, refuse_unsupported
from quire.models.rotary import fix_rotary, grows_with_length
from quire.models.source import ModelSource, quiet, reading
from quire.models.sparse import install_indexers
from quire.plan.source import QUANTISATION, with_quantisation
from quire.spec.kv_format import plain_format
from quire.spec.layers import AttentionCall, Call, LatentCall, LayerField
from quire.spec.layout import DType
from quire.spec.model import ModelSpec, config_dtype

logger = logging.getLogger(__name__)

DTYPES = ("auto", "float32", "float16", "bfloat16")

_SOME_TOKENS = 2

_UNNEEDED = (
    ".k_scale",
    ".v_scale",
    ".q_scale",
    ".k_proj.output_scale",
    ".v_proj.output_scale",
    ".inv_freq",
    "._extra_state",
)
"""Ends of the names of tensors without effect here: scales of an FP8 cache, angles that are computed, and notes of
libraries."""

INSTALLS = (
    install_mixers,
    install_latents,
    install_kv_sharing,
    install_chunks,
    install_compressors,
    install_block_indexers,
)
"""The functions that let modules with attention or recurrence of their own store their data in the pools."""

_FEW_PARAMETERS = 1 << 26
"""Below so many, one thread checks a model as fast as several do, and they wait for work all the while."""

_ELEMENTWISE = {
    getattr(Tensor, name) for name in ("__truediv__", "__rtruediv__", "div", "reciprocal", "__rpow__", "pow")
}


class LoadedModel:
    """A checked model. `spec` says what its pools store; `run` computes on them."""

    def __init__(
        self, model: Any, *, name: str, max_length: int | None = None, check: bool = True, pack: bool = True
    ) -> None:
        """Wrap `model`, a transformers causal language model with weights; `load_model` is the usual way here."""
        self.name = name
        self.config: dict[str, Any] = model.config.to_dict()
        self.device: torch.device = model.device
        self.module = model.eval()
        """The transformers model."""
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self._dtypes = {name: tensor.dtype for name, tensor in _weights(model).items()}
        self._keeps_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        text_config = model.config.get_text_config()
        self.num_layers = int(text_config.num_hidden_layers)
        """Decoder layers."""
        self.hidden_size = int(text_config.hidden_size)
        self._captured: set[int] = set()
        self.pooler: Pooler | None = None
        """What it gives for a text in place of tokens; None for a model that generates text."""
        self.num_changes = 0
        """How often the weights were replaced."""
        context_length = getattr(text_config, "max_position_embeddings", None) or max_length or self._endless()
        if context_length is None:
            raise UnsupportedModel(
                f"the configuration of '{name}' has no 'max_position_embeddings', the longest context it was made for.",
                fix="add 'max_position_embeddings' to config.json.",
            )
        if grows_with_length(model):
            context_length = max(int(context_length), max_length or 0)
        self._rotary_length = max_length or int(context_length)
        if not fix_rotary(model, self._rotary_length):
            self._rotary_length = 0
        self._dtype = DType(str(model.dtype).removeprefix("torch."))
        prepare_linears(model)
        for install in INSTALLS:
            install(model)
        self._inputs: dict[str, Any] = {"use_cache": False}
        if install_indexers(model):
            # Model code slices a mask for its indexers, which do not read it here.
            self._inputs["attention_mask"] = torch.zeros(1, 1, 1, 1, device=self.device)
        model.set_attn_implementation(IMPLEMENTATION)
        with linear_inputs(model) as inputs:
            self._calls = self.discover()
        self.spec = replace(
            self._read_spec(),
            architecture=type(model).__name__,
            context_length=int(context_length),
            hidden_size=self.hidden_size,
            vocab_size=int(text_config.vocab_size),
            dtype=self._dtype,
        )
        self.eos_token_ids = tuple(token for token in _eos_token_ids(model) if 0 <= token < self.spec.vocab_size)
        self._compare_with_config()
        self.packing = Packing()
        plain = plain_logits(self) if check else []
        if pack:
            self.packing = Packing.of(model, inputs)
        self._decoder: FusedDecoder | None = None
        self.num_fused, self._fused_backend = 0, ""
        if self.packing.products:
            fused = fuse_layers(model, self.spec.context_length, self._run_module)
            self.num_fused, self._fused_backend = len(fused), fused[0].backend if fused else ""
            if self.num_fused == self.num_layers:
                self._decoder = FusedDecoder.of(model, self.spec.context_length, self._inputs)
        if check:
            self._check(plain)
        self.weight_bytes = weight_bytes(model) + (0 if self._decoder is None else self._decoder.angles.num_bytes)
        """Bytes of weights, and of what is computed once beside them."""

    def _check(self, plain: Sequence[Tensor]) -> None:
        """Check the steps that go layer by layer, then those of one call, which is not used if it differs. Raises
        ModelCheckFailed."""
        native = None if self._decoder is None else self._decoder.native
        if native is not None:
            native.is_on = False
        check_forward(self, plain=plain)
        if native is None:
            return
        native.is_on = True
        try:
            check_forward(self, plain=plain)
        except ModelCheckFailed as error:
            logger.warning("layers of '%s' are computed one by one: %s", self.name, error)
            native.is_on = False

    @cached_property
    def weights_fingerprint(self) -> bytes:
        """32 bytes that depend on every byte of the weights at the first call. O(bytes of weights)."""
        found = fingerprint_weights(_weights(self.module), self._dtypes)
        self.packing.pack()
        return found

    def weights_changed(self) -> None:
        """The weights were replaced: they are packed again, and their fingerprint is computed at the next call."""
        self.__dict__.pop("weights_fingerprint", None)
        self.num_changes += 1
        self.packing.pack(again=True)

    def forward_statistics(self) -> dict[str, int | str]:
        """Decoder layers, how many of them are fused, and by what (native, torch or empty); whether the model runs
        without transformers' code around them (1 or 0); linear layers whose weights are packed, and their bytes."""
        return {
            "layers": self.num_layers,
            "fused_layers": self.num_fused,
            "fused_backend": self._fused_backend,
            "fused_decoder": int(self._decoder is not None),
            "packed_linears": self.packing.num_layers,
            "packed_bytes": self.packing.num_bytes,
        }

    def identity(self, weights_epoch: int = 0, *, exact: bool = False) -> bytes:
        """32 bytes for everything on which pages depend besides tokens, namespace and layouts.

        Without `exact` the model's name identifies the weights, which suffices if no stored page outlives the process.
        `exact` hashes all weights, once (`weights_fingerprint`), and not the name: copies in other folders are equal.
        """
        named = ("_name_or_path", "transformers_version")
        config = {key: value for key, value in self.config.items() if key not in named}
        facts = ["" if exact else self.name, self._dtype.value, self._rotary_length, config]
        described = json.dumps(facts, sort_keys=True, default=str).encode()
        return identity_of(described, self.weights_fingerprint if exact else b"", weights_epoch)

    @torch.inference_mode()
    def run(self, running: RunningForward, input_ids: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        """Logits float32 `[len(rows), vocab_size]` of the flat rows `rows` (int64), writing all rows to the pools.

        `input_ids` and `positions` are int64 `[T]`, on the model's device. `running` has a pool of any KV format and a
        batch of them for each group of `spec.groups`.
        """
        with forward_pass(running):
            if self._decoder is not None:
                hidden = self._decoder.hidden(input_ids, positions, self._captured)
                logits = self._decoder.logits(hidden, rows, self._captured)
                running.output = hidden if running.keeps_output else None
            else:
                with keeping_output(self._inner, running) if running.keeps_output else nullcontext():
                    logits = self._own_logits(input_ids, positions, rows)
        assert running.ordinal - running.first == len(self._calls), (
            "a forward pass made other attention calls than at load"
        )
        return logits.float()

    @torch.inference_mode()
    def more_logits(self, running: RunningForward, rows: Tensor) -> Tensor:
        """Logits float32 `[len(rows), vocab_size]` of other ascending flat rows, of a pass that `keeps_output`."""
        if self._decoder is not None:
            return self._decoder.logits(running.output, rows).float()
        ids = torch.zeros(1, len(rows), dtype=torch.int64, device=self.device)
        with returning(self._inner, output_of_rows(running.output, rows)):
            logits: Tensor = self.module(input_ids=ids, **self._inputs).logits[0]
        return logits.float()

    @torch.inference_mode()
    def hidden_states(self, running: RunningForward, rows: Tensor) -> Tensor:
        """What the output layer reads, `[len(rows), hidden]`, of ascending flat rows of a pass that `keeps_output`."""
        if self._decoder is not None:
            return self._decoder.normed(running.output, rows)
        found: Tensor = running.output.last_hidden_state[0].index_select(0, rows)
        return found

    @property
    def _inner(self) -> Any:
        """The module in front of the output layer."""
        decoder = self.module.get_decoder()
        return decoder if decoder is not self.module else self.module.model

    def _own_logits(self, input_ids: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        """Logits by transformers' code around the layers."""
        keep = {"logits_to_keep": rows} if self._keeps_rows else {}
        logits: Tensor = self.module(
            input_ids=input_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), **self._inputs, **keep
        ).logits[0]
        return logits if self._keeps_rows else logits[rows]

    def capture(self, layers: Sequence[int]) -> None:
        """Keep the outputs of these decoder layers in each forward pass, for `RunningForward.captured`. `LAST_HIDDEN`
        is that of the last one after the final norm. Raises UnsupportedModel if there is no such layer, or if it has
        several streams of hidden states."""
        new = [layer for layer in layers if layer not in self._captured]
        if not new:
            return
        hooks = capture_hidden(self._inner, new, self.name)
        found = self._recorded().shared[HIDDEN]
        if any(list(found[layer].shape) != [_SOME_TOKENS, self.hidden_size] for layer in new):
            for hook in hooks:
                hook.remove()
            raise UnsupportedModel(
                f"the layers of '{self.name}' ({type(self.module).__name__}) have several streams of hidden states, "
                "of which no head is known to read one.",
                fix="use another method, such as ngram.",
            )
        self._captured.update(new)

    def refuse_own_attention(self) -> None:
        """Raise UnsupportedModel if a module does more than store its keys and values and read all of them or a window:
        it would not read selected pages."""
        found = next((module for module in self.module.modules() if hasattr(module, OWN_ATTENTION)), None)
        if found is not None:
            raise UnsupportedModel(
                f"{type(found).__name__} of '{self.name}' has attention of its own, which reads no selected pages.",
                fix="leave the selection of hisparse out.",
            )

    @torch.inference_mode()
    def plain_logits(self, input_ids: Tensor) -> Tensor:
        """Logits float32 `[T, vocab_size]` of one sequence by the model's own eager attention and plain weights: the
        reference."""
        self.module.set_attn_implementation("eager")
        try:
            positions = torch.arange(len(input_ids), device=self.device).unsqueeze(0)
            with self.packing.suspended():
                out = self.module(input_ids=input_ids.unsqueeze(0), position_ids=positions, use_cache=False)
        finally:
            self.module.set_attn_implementation(IMPLEMENTATION)
        logits: Tensor = out.logits[0].float()
        return logits

    def discover(self) -> tuple[Call, ...]:
        """The calls of one forward pass."""
        calls = tuple(self._recorded().calls)
        if not calls:
            raise UnsupportedModel(
                f"'{self.name}' ({type(self.module).__name__}) computes attention in code of its own, which "
                "transformers does not let another implementation replace.",
                fix="use a model type listed as verified.",
            )
        return calls

    def _run_module(self, tokens: Tensor, positions: Tensor) -> Any:
        """What the module returns for tokens at positions, both int64 `[1, T]`."""
        return self.module(input_ids=tokens, position_ids=positions, **self._inputs)

    @torch.inference_mode()
    def _recorded(self) -> RecordingForward:
        """A pass over some tokens, without a pool."""
        recording = RecordingForward()
        tokens = torch.zeros(1, _SOME_TOKENS, dtype=torch.int64, device=self.device)
        positions = torch.arange(_SOME_TOKENS, device=self.device).unsqueeze(0)
        with forward_pass(recording):
            self._run_module(tokens, positions)
        return recording

    def _endless(self) -> int | None:
        """The context that planning assumes for a model whose layers have no limit of their own: states, windows."""
        try:
            return ModelSpec.from_config(self.config).context_length
        except UnsupportedModel:
            return None

    def _read_spec(self) -> ModelSpec:
        """The calls that planning reads from the configuration; if it cannot, and shapes suffice, the recorded ones."""
        try:
            return ModelSpec.from_config(self.config)
        except UnsupportedModel:
            if len(self._calls) % self.num_layers or not all(map(_says_everything, self._calls)):
                raise
        return ModelSpec(
            architecture="",
            layers=tuple((call,) for call in self._calls),
            context_length=1,
            vocab_size=1,
            dtype=DType.FLOAT32,
        )

    def _compare_with_config(self) -> None:
        """The calls that planning reads from the configuration must equal the recorded ones, part by part."""
        planned, found = ([self._parts(call) for call in calls] for calls in (self.spec.calls, self._calls))
        if planned == found:
            return
        pairs = zip(planned, found, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(planned), len(found)))
        expected, actual = (calls[at] if at < len(calls) else "no call" for calls in (self.spec.calls, self._calls))
        raise LayoutMismatch(
            f"the configuration of '{self.name}' promises {len(planned)} calls that keep something and the model makes "
            f"{len(found)}; call {at} should be {expected} and is {actual}.",
            fix="correct config.json (window, heads or dims), or report the architecture.",
        )

    def _parts(self, call: Call) -> tuple[LayerField, ...]:
        """What a call keeps. A window that no request outgrows is treated as none."""
        if isinstance(call, AttentionCall) and call.window >= self.spec.context_length:
            call = replace(call, window=0, chunked=False)
        return call.parts(plain_format(self.spec.dtype), self.spec.dtype)


def load_model(
    path_or_id: str,
    *,
    dtype: str = "auto",
    device: str | torch.device = "cpu",
    max_length: int | None = None,
    revision: str | None = None,
    check: bool = True,
    pack: bool = True,
) -> LoadedModel:
    """Read, check and return the model in a folder or on the hub, there of that revision.

    `dtype` is one of `DTYPES`; "auto" is the configuration's. `max_length` is the longest context of this deployment,
    by default the model's own; it matters for rotary embeddings with a short and a long form. Without
    `check`, a model that would silently be wrong is not detected. On a CPU, `pack` lays out weights for it (`Packing`)
    and fuses layers (`FusedLayer`). Raises ModelLoadError (unreadable), UnsupportedModel (cannot run), LayoutMismatch
    or ModelCheckFailed (would be wrong).
    """
    if dtype not in DTYPES:
        raise InvalidInput(f"dtype '{dtype}' is not one of {', '.join(DTYPES)}.", fix="use 'auto' or one of these.")
    source = ModelSource.find(path_or_id, revision)
    config = source.read_config()
    refuse_unknown(config, path_or_id)
    refuse_unsupported(with_quantisation(config, source.read_beside(QUANTISATION)), path_or_id)
    wanted = torch_dtype(config_dtype(config) if dtype == "auto" else DType(dtype))
    pooler = read_pooler(source, config, device, wanted)
    with quiet():
        model = _read_weights(source, wanted, tied=pooler is not None)
        try:
            model = model.to(device)
        except (RuntimeError, AssertionError) as error:
            raise ModelLoadError(
                f"the weights of '{path_or_id}' cannot be moved to device '{device}': {str(error).splitlines()[0]}",
                fix="use device 'cpu', free the device's memory, or use a smaller model.",
            ) from error
        try:
            with _threads_that_pay(model):
                loaded = LoadedModel(model, name=path_or_id, max_length=max_length, check=check, pack=pack)
                loaded.pooler = pooler
                return loaded
        except (QuireError, AssertionError):
            raise
        except Exception as error:
            raise ModelCheckFailed(
                f"'{path_or_id}' ({type(model).__name__}) cannot run a first step: {type(error).__name__}: "
                f"{str(error).splitlines()[0] if str(error) else ''}.",
                fix="use a model type listed as verified; please report this architecture.",
            ) from error


def refuse_unknown(config: dict[str, Any], name: str) -> None:
    """Raise UnsupportedModel if transformers has no causal language model for the configuration."""
    kind = config.get("model_type")
    kind = ALIASES.get(kind, kind) if isinstance(kind, str) else kind
    if not kind or not isinstance(kind, str):
        raise UnsupportedModel(
            f"the configuration of '{name}' names no 'model_type'.", fix="restore config.json from the original."
        )
    if kind not in CONFIG_MAPPING_NAMES:
        raise UnsupportedModel(
            f"transformers {transformers.__version__} does not know model type '{kind}' of '{name}'.",
            fix="check 'model_type' in config.json, or use a model that transformers itself implements.",
        )
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UnsupportedModel(
            f"model type '{kind}' of '{name}' has no causal language model in transformers {transformers.__version__}.",
            fix="use a text generation model.",
        )


def _weights(model: Any) -> dict[str, Tensor]:
    """Every parameter and buffer that is stored with the model, by name."""
    return {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}


def _read_weights(source: ModelSource, dtype: torch.dtype, *, tied: bool) -> Any:
    """The model. With `tied`, its output layer is its embeddings, whatever the checkpoint has."""
    with reading(source, "the configuration"):
        config = _transformers_config(source)
    if tied:
        config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = True
    try:
        with reading(source, "the weights"), _Unfilled():
            model, report = AutoModelForCausalLM.from_pretrained(
                source.name,
                config=config,
                dtype=dtype,
                revision=source.revision,
                local_files_only=source.local,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
    except ModelLoadError as error:
        if isinstance(error.__cause__, SafetensorError):
            raise ModelLoadError(
                f"a weight file of '{source.name}' is corrupt: {error.__cause__}.", fix="copy the weights again."
            ) from error.__cause__
        raise
    absent = sorted(report["missing_keys"]) + sorted(str(key) for key in report.get("mismatched_keys", ()))
    if absent:
        raise ModelLoadError(
            f"the weights of '{source.name}' lack {len(absent)} tensors that {type(model).__name__} needs, "
            f"first '{absent[0]}'.",
            fix="copy all *.safetensors files, and check that config.json belongs to them.",
        )
    _refuse_unread(model, report["unexpected_keys"], source.name)
    return model


def _refuse_unread(model: Any, names: Iterable[str], name: str) -> None:
    """Raise ModelLoadError if a module with weights has more of them in the checkpoint, such as biases or scales: what
    it computes without them is not what the model was trained for. A module that transformers has joined of many, such
    as experts, has theirs, and a checkpoint may leave out the name of the model around them."""
    modules = dict(model.named_modules())

    def is_read(tensor: str) -> bool:
        path = tensor
        while path := path.rpartition(".")[0]:
            holder = modules.get(path, modules.get(f"{model.base_model_prefix}.{path}"))
            if holder is not None:
                return not holder._parameters
        return True

    unread = sorted(each for each in names if not each.endswith(_UNNEEDED) and not is_read(each))
    if unread:
        raise ModelLoadError(
            f"the weights of '{name}' have {len(unread)} tensors that {type(model).__name__} does not read, first "
            f"'{unread[0]}'.",
            fix="check that config.json belongs to them: it must name biases, and no weights are quantised here.",
        )


class _Unfilled(TorchFunctionMode):
    """For models that are built on the meta device, whose tensors have no memory. They are not filled, and what torch
    can only compute of them with sympy is computed on the CPU: its import takes longer than to read a small model."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        filled = kwargs.get("tensor")
        if getattr(func, "__module__", "") == nn.init.__name__ and isinstance(filled, Tensor) and filled.is_meta:
            return filled
        if func is torch.arange and kwargs.get("device") == torch.device("meta"):
            return func(*args, **kwargs | {"device": "cpu"}).to("meta")
        if func in _ELEMENTWISE and any(isinstance(value, Tensor) and value.is_meta for value in args):
            own = (torch.ones((), dtype=v.dtype).expand(v.shape) if isinstance(v, Tensor) else v for v in args)
            return func(*own, **kwargs).to("meta")
        is_like = func is torch.empty_like and args and args[0].is_meta and args[0].is_contiguous()
        if is_like and kwargs.keys() <= {"device", "dtype"}:
            return torch.empty(args[0].shape, **{"dtype": args[0].dtype, "device": "meta"} | kwargs)
        return func(*args, **kwargs)


@contextmanager
def _threads_that_pay(model: nn.Module) -> Iterator[None]:
    """Inside the block a small model computes on one thread: others would wait for each other longer than they
    compute."""
    before = torch.get_num_threads()
    if sum(parameter.numel() for parameter in model.parameters()) < _FEW_PARAMETERS:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _says_everything(call: Call) -> bool:
    """Whether the shapes of a call describe all the data that it stores."""
    if isinstance(call, LatentCall):
        return not call.sparse
    return isinstance(call, AttentionCall) and not call.index_dim


def _transformers_config(source: ModelSource) -> Any:
    """The configuration as transformers reads it; if its type is another name of a known type, as that type."""
    raw = source.read_config()
    other = ALIASES.get(str(raw.get("model_type")))
    if other is None:
        return AutoConfig.from_pretrained(
            source.name, revision=source.revision, local_files_only=source.local, trust_remote_code=False
        )
    own = {name: value for name, value in raw.items() if name not in ("model_type", "auto_map")}
    return AutoConfig.for_model(other, **own)


def _eos_token_ids(model: Any) -> tuple[int, ...]:
    """Token ids that end a sequence: those of the generation configuration, else of the model's."""
    for holder in (getattr(model, "generation_config", None), model.config, model.config.get_text_config()):
        found = getattr(holder, "eos_token_id", None)
        if found is not None:
            return tuple(int(token) for token in found) if isinstance(found, (list, tuple)) else (int(found),)
    return ()
