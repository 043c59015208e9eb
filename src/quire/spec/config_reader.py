"""ConfigReader: a Hugging Face configuration, read field by field. It refuses bad fields by name."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quire.errors import UnsupportedModel
from quire.spec.dtype import DType

CONVENTIONS: Mapping[str, Any] = json.loads(Path(__file__).with_name("conventions.json").read_text(encoding="utf-8"))
"""Conventions that configurations do not state, as data.

`model_types` are the decoder-only types with known conventions, each with the facts that no field states:

- `every_layer`: the kind of all layers; `every_layer_slides`: `sliding_window`, if set, holds for all of them;
  `full_attention_every` n: if only a window is given, every n-th layer reads everything.
- `state_before_attention`: a layer runs its recurrence before the attention beside it, so its ordinal is the lower one.
- `attention_calls_vary`: no field says how often, or with which shapes, a layer calls attention.
- `plain_mlp`: two matrices, up and down, instead of three; `gated_query`: true where `attn_output_gate` is absent;
  `shared_experts`: how many, each as wide as a routed one; `tied_embeddings`: true where `tie_word_embeddings` is
  absent; `learned_positions`: a vector per position; `draft_layers`: how many predict a token further, where no field
  says it. Source: the modelling code of transformers 5.23.

`layer_kinds` maps the names of layers in configurations, in lists and in patterns of letters, to kinds of this package.
`encoders` are model types that generate no tokens, as a prefix or suffix of `model_type`.
"""

NUM_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
NUM_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
HIDDEN_SIZE = ("hidden_size", "n_embd", "d_model", "n_embed")
_DRAFT_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "mtp_transformer_layers")
MODEL_DTYPE = ("dtype", "torch_dtype")

_RESTORE = "restore config.json from the original."
_TEXT_PARTS = ("text_config", "llm_config", "language_config", "text_model_config", "thinker_config")
_MOST = 2**40  # no size of a model is beyond this
_ODD_VALUE = (TypeError, ValueError, AttributeError, LookupError, RecursionError, ArithmeticError)
"""The errors of arithmetic on a value of the wrong kind."""


class ConfigReader:
    """The language model's part of a configuration, wherever a wrapper of several models has it.

    Every reader looks for a field in the language model's part first, then in the wrapper. `kind` is the `model_type`
    of the language model, `implied` the conventions of that type; `architecture` is the name for messages.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        if not isinstance(config, Mapping):
            raise UnsupportedModel(
                f"a configuration is a JSON object, and this is a {type(config).__name__}.",
                fix="pass the contents of the model's config.json.",
            )
        self.outer = config
        self.text: Mapping[str, Any] = config
        while (inner := _language_part(self.text)) is not None:
            self.text = inner
        self.kind = str(self.text.get("model_type") or config.get("model_type") or "")
        self.is_known = self.kind in CONVENTIONS["model_types"]
        self.implied: Mapping[str, Any] = CONVENTIONS["model_types"].get(self.kind, {})
        names = config.get("architectures") or self.text.get("architectures") or []
        named = isinstance(names, list) and bool(names)
        self.architecture = str(names[0]) if named else self.kind or "unnamed architecture"
        self._read: set[str] = set()

    def get(self, *names: str, default: Any = None) -> Any:
        """The first of these fields that is set to something other than null."""
        return next((value for _, value in self._found(names)), default)

    def ignore(self, *names: str) -> None:
        """Mark these fields as read: they do not affect the cache."""
        self._read.update(names)

    def has(self, *names: str) -> bool:
        """Whether the language model's part sets any of these fields, to something other than zero, false or empty."""
        self._read.update(names)
        return any(self.text.get(name) for name in names)

    def unread(self) -> list[str]:
        """Fields of the language model's part that are set (not zero, false or empty) and that no reader has read."""
        return sorted(name for name, value in self.text.items() if value and name not in self._read)

    def size(self, *names: str, default: int | None = None) -> int:
        """The positive whole number under the first of these names that is set; `default` if none is, or it is 0.

        Raises UnsupportedModel if there is neither, and for a value that is no such number.
        """
        for name, value in self._found(names):
            if default is not None and value in (0, False):
                continue
            number = int(value) if isinstance(value, float) and value.is_integer() else value
            if not isinstance(number, int) or isinstance(number, bool) or not 0 < number <= _MOST:
                raise self.wrong(name, value, "a positive whole number")
            return number
        if default is None:
            raise self.missing(*names)
        return default

    @property
    def num_draft_layers(self) -> int:
        """Layers of the model that predict tokens further ahead."""
        return self.size(*_DRAFT_LAYERS, default=self.implied.get("draft_layers", 0))

    def number(self, *names: str, default: float) -> float:
        """The positive number under the first of these names that is set, else `default`. Raises UnsupportedModel."""
        value = self.get(*names, default=default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= _MOST:
            raise self.wrong(names[0], value, "a positive number")
        return float(value)

    def sequence(self, name: str, length: int | None = None) -> list[Any]:
        """A list of `length` entries (None: any). Raises UnsupportedModel if it is absent or of another length."""
        found = self.get(name)
        if not isinstance(found, Sequence) or isinstance(found, str):
            raise self.missing(name)
        if length is not None and len(found) != length:
            raise UnsupportedModel(
                f"the configuration of {self.architecture} names {len(found)} {name} for {length} layers.", fix=_RESTORE
            )
        return list(found)

    def entry(self, name: str, layer: int) -> Any:
        """The entry for `layer` of a list with one per layer; None if the field is no list."""
        found = self.get(name)
        if not isinstance(found, Sequence) or isinstance(found, str):
            return None
        if layer >= len(found):
            raise self.unpriced(f"names {len(found)} layers and has more", name)
        return found[layer]

    def dtype(self, *names: str, default: DType = DType.FLOAT32) -> DType:
        """The element type under the first of these names that is set, else `default`. Raises UnsupportedModel."""
        name = str(self.get(*names, default=default.value)).removeprefix("torch.")
        if name not in ("float32", "float16", "bfloat16"):
            raise UnsupportedModel(
                f"the configuration's {names[0]} is '{name}'; Quire computes in float32, float16 or bfloat16.",
                fix="name one of these.",
            )
        return DType(name)

    def wrong(self, name: str, value: Any, wanted: str) -> UnsupportedModel:
        """The error for a configuration whose field `name` has a value of another kind."""
        shown = repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:60]}..."
        return UnsupportedModel(
            f"the configuration of {self.architecture} has {shown} as '{name}', which should be {wanted}.", fix=_RESTORE
        )

    def missing(self, *names: str) -> UnsupportedModel:
        """The error for a configuration that has none of these fields."""
        return UnsupportedModel(
            f"the configuration of {self.architecture} has no '{names[0]}'"
            + (f" (nor {', '.join(repr(n) for n in names[1:])})" if len(names) > 1 else "")
            + ", which the cache's layout needs.",
            fix=f"add '{names[0]}' to config.json.",
        )

    def refusal(self, what: str, field: str) -> UnsupportedModel:
        """The error for a configuration whose `field` does not determine the layout of the cache."""
        return UnsupportedModel(
            f"{self.architecture} {what} (configuration field '{field}'), so its cache cannot be read off the "
            "configuration.",
            fix="load the model, which finds its layout by running it, or use a supported model.",
        )

    def unpriced(self, what: str, field: str) -> UnsupportedModel:
        """The error for a configuration whose `field` does not determine the size of the weights."""
        return UnsupportedModel(
            f"{self.architecture} {what} (configuration field '{field}'), so its weights cannot be estimated.",
            fix="give the bytes of the weights; the checkpoint's files add up to them.",
        )

    def _found(self, names: Sequence[str]) -> Iterator[tuple[str, Any]]:
        """Name and value of each of these fields that is not null, in the order of preference."""
        self._read.update(names)
        for part in (self.text, self.outer):
            yield from ((name, part[name]) for name in names if part.get(name) is not None)


def _language_part(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The part of a wrapper for the language model; None if the configuration is no wrapper."""
    parts = (config.get(name) for name in _TEXT_PARTS)
    return next((part for part in parts if isinstance(part, Mapping) and part), None)


@contextmanager
def understood(config: Mapping[str, Any]) -> Iterator[None]:
    """Raise UnsupportedModel if a value of an unexpected kind raises an error inside."""
    try:
        yield
    except UnsupportedModel:
        raise
    except _ODD_VALUE as error:
        name = config.get("model_type") if isinstance(config, Mapping) else None
        raise UnsupportedModel(
            f"the configuration of {name or 'this model'} has a value that is not understood: "
            f"{type(error).__name__}: {error}.",
            fix=_RESTORE,
        ) from error
