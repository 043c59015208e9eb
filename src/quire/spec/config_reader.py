"""ConfigReader: a Hugging Face configuration, read field by field. What is missing or odd is refused by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from quire.errors import UnsupportedModel
from quire.spec.layout import DType

_TEXT_PARTS = ("text_config", "llm_config", "language_config", "text_model_config", "thinker_config")
_MOST = 2**40  # no size of a model is beyond this
_ODD_VALUE = (TypeError, ValueError, AttributeError, LookupError, RecursionError, ArithmeticError)
"""What arithmetic on a value of the wrong kind ends in."""


class ConfigReader:
    """The language model's part of a configuration, wherever a wrapper of several models keeps it.

    A field is looked for in the language model's part first and in the wrapper after it. `kind` is the `model_type` of
    the language model; `architecture` is the name for messages.
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
        names = config.get("architectures") or self.text.get("architectures") or []
        named = isinstance(names, list) and bool(names)
        self.architecture = str(names[0]) if named else self.kind or "unnamed architecture"
        self._read: set[str] = set()

    def get(self, *names: str, default: Any = None) -> Any:
        """The first of these fields that is set to something other than null."""
        self._read.update(names)
        for part in (self.text, self.outer):
            for name in names:
                if part.get(name) is not None:
                    return part[name]
        return default

    def has(self, *names: str) -> bool:
        """Whether any of these fields is set, to something other than null, zero, false or empty."""
        self._read.update(names)
        return any(self.text.get(name) for name in names)

    def unread(self) -> list[str]:
        """Fields of the language model's part that are set (not null, zero, false or empty) and were not asked for."""
        return sorted(name for name, value in self.text.items() if value and name not in self._read)

    def size(self, *names: str, default: int | None = None) -> int:
        """The positive whole number under the first of these names that is set; `default` where none is, or it is 0.

        Raises UnsupportedModel where there is neither, and for a value that is no such number.
        """
        self._read.update(names)
        for part in (self.text, self.outer):
            for name in names:
                value = part.get(name)
                if value is None or (default is not None and value in (0, False)):
                    continue
                if isinstance(value, float) and value.is_integer():
                    value = int(value)
                if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= _MOST:
                    raise self.wrong(name, value, "a positive whole number")
                return value
        if default is not None:
            return default
        raise self.missing(*names)

    def number(self, *names: str, default: float) -> float:
        """The positive number under the first of these names that is set, else `default`. Raises UnsupportedModel."""
        value = self.get(*names, default=default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= _MOST:
            raise self.wrong(names[0], value, "a positive number")
        return float(value)

    def sequence(self, name: str, length: int | None = None) -> list[Any]:
        """A list of `length` entries (None: any). Raises UnsupportedModel where it is absent or of another length."""
        found = self.get(name)
        if not isinstance(found, Sequence) or isinstance(found, str):
            raise self.missing(name)
        if length is not None and len(found) != length:
            raise UnsupportedModel(
                f"the configuration of {self.architecture} names {len(found)} {name} for {length} layers.",
                fix="restore config.json from the original.",
            )
        return list(found)

    def dtype(self, *names: str, default: DType | None = None) -> DType:
        """The element type under the first of these names; float32 where no name has one and there is no default."""
        found = self.get(*names)
        if found is None:
            return default if default is not None else DType.FLOAT32
        name = str(found).removeprefix("torch.")
        if name not in ("float32", "float16", "bfloat16"):
            raise UnsupportedModel(
                f"the configuration's {names[0]} is '{name}'; Quire computes in float32, float16 or bfloat16.",
                fix="name one of these.",
            )
        return DType(name)

    def wrong(self, name: str, value: Any, wanted: str) -> UnsupportedModel:
        """The refusal of a configuration whose field `name` has a value of another kind."""
        shown = repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:60]}..."
        return UnsupportedModel(
            f"the configuration of {self.architecture} has {shown} as '{name}', which should be {wanted}.",
            fix="restore config.json from the original.",
        )

    def missing(self, *names: str) -> UnsupportedModel:
        """The refusal of a configuration that lacks every one of these fields."""
        return UnsupportedModel(
            f"the configuration of {self.architecture} has no '{names[0]}'"
            + (f" (nor {', '.join(repr(n) for n in names[1:])})" if len(names) > 1 else "")
            + ", which the cache's layout needs.",
            fix=f"add '{names[0]}' to config.json.",
        )

    def refusal(self, what: str, field: str) -> UnsupportedModel:
        """The refusal of a configuration whose `field` means something the plan does not know how to price."""
        return UnsupportedModel(
            f"{self.architecture} {what} (configuration field '{field}'), so its cache cannot be read off the "
            "configuration.",
            fix="load the model, which finds its layout by running it, or use a supported model.",
        )


def _language_part(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The part of a wrapper that holds the language model; None where the configuration is one itself."""
    parts = (config.get(name) for name in _TEXT_PARTS)
    return next((part for part in parts if isinstance(part, Mapping) and part), None)


@contextmanager
def understood(config: Mapping[str, Any]) -> Iterator[None]:
    """Turn what a value of an unexpected kind leads to inside into UnsupportedModel. Refusals pass as they are."""
    try:
        yield
    except UnsupportedModel:
        raise
    except _ODD_VALUE as error:
        name = config.get("model_type") if isinstance(config, Mapping) else None
        raise UnsupportedModel(
            f"the configuration of {name or 'this model'} has a value that is not understood: "
            f"{type(error).__name__}: {error}.",
            fix="restore config.json from the original.",
        ) from error
