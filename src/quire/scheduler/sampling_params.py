"""SamplingParams: how one request's tokens are drawn and when it stops. The field's names and defaults."""

from __future__ import annotations

import math
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, Literal

import msgspec

from quire.errors import InvalidInput
from quire.spec.grammar import Grammar

MAX_LOGPROBS = 20
_MOST_ID = 2**31 - 1
_UNMARKED = ("skip_special_tokens", "unmarked")


class _NamedFields(msgspec.StructMeta):
    """A call with an unknown name raises InvalidInput, where a Struct raises TypeError."""

    def __call__(self, *args: Any, **given: Any) -> Any:
        known = self.__struct_fields__
        for name in given:
            if name not in known:
                near = get_close_matches(name, known, n=1)
                fix = f"did you mean '{near[0]}'?" if near else f"use some of {', '.join(known)}."
                raise InvalidInput(f"'{name}' is no field of {self.__name__}.", fix=fix)
        return super().__call__(*args, **given)


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True, metaclass=_NamedFields):
    """How the tokens of a sequence are drawn, and when it ends.

    Raises InvalidInput for an unknown name, and with the valid range for a value outside of it.

    `temperature` 0 is greedy. `top_k` 0 or -1 and `top_p` 1 keep everything. `max_tokens` None means "to the end of the
    context". `seed` makes the draw a function of (seed, index, position) alone, whatever else runs in the batch.
    `skip_special_tokens` leaves them out of the text; "unmarked" only those that mark no part of an answer.
    `logprobs` is the number of alternatives reported per token (0: only the chosen one). `prompt_logprobs` is that of
    each token of the prompt; with it, `max_tokens` may be 0. `n` sequences share the prompt's pages. With a `grammar`
    (`quire.grammar`) the output is a text that it allows, unless `max_tokens` cuts it off: when it is complete the
    sequence ends, also with `ignore_eos`. Of a prompt that is `pooled`, the answer is an embedding or a score.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: list[str] | str = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | Literal["unmarked"] = True
    include_stop_str_in_output: bool = False
    grammar: Grammar | None = None
    pooled: bool = False

    def __post_init__(self) -> None:
        self.stop = _list_of("stop", [self.stop] if isinstance(self.stop, str) else self.stop, str)
        self.stop_token_ids = _list_of("stop_token_ids", self.stop_token_ids, int)
        for token in self.stop_token_ids:
            _check_int("stop_token_ids", token, 0, _MOST_ID)
        if not all(self.stop):
            raise InvalidInput("stop must be non-empty strings.", fix="leave empty stop strings out.")
        self.logit_bias = dict(self.logit_bias or {})
        for token, bias in self.logit_bias.items():
            _check_int("logit_bias token", token, 0, _MOST_ID)
            _check_float(f"logit_bias of token {token}", bias, -100.0, 100.0)
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool) and (name, getattr(self, name)) != _UNMARKED:
                raise InvalidInput(f"{name} must be true or false, got {getattr(self, name)!r}.")
        _check_int("n", self.n, 1, 128)
        _check_float("temperature", self.temperature, 0.0, 100.0)
        _check_float("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_int("top_k", self.top_k, -1, _MOST_ID)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1 if self.prompt_logprobs is None else 0, _MOST_ID)
        _check_int("min_tokens", self.min_tokens, 0, _MOST_ID if self.max_tokens is None else self.max_tokens)
        _check_float("repetition_penalty", self.repetition_penalty, 0.0, 10.0, open_low=True)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**64 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 0, MAX_LOGPROBS)
        if self.grammar is not None:
            self._check_grammar()

    def _check_grammar(self) -> None:
        if not isinstance(self.grammar, Grammar):
            raise InvalidInput(f"grammar must be made by quire.grammar, got a {type(self.grammar).__name__}.")
        if self.min_tokens:
            raise InvalidInput(
                "min_tokens cannot be used with a grammar: the grammar says where a text may end.",
                fix="leave out min_tokens.",
            )

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < 1e-5

    @property
    def needs_history(self) -> bool:
        """Whether the next draw depends on earlier tokens, so that they must have reached the host."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def _list_of(name: str, values: Any, kind: type) -> list[Any]:
    """A copy of a list setting; None becomes empty."""
    if values is None:
        return []
    if not isinstance(values, (list, tuple, set, frozenset)) or not all(isinstance(value, kind) for value in values):
        raise InvalidInput(f"{name} must be a list of {kind.__name__} values, got {values!r}.")
    return list(values)


def _check_int(name: str, value: Any, low: int, high: int | None) -> None:
    top = "" if high is None else f" and at most {high}"
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        raise InvalidInput(f"{name} must be an integer of at least {low}{top}, got {value!r}.")


def _check_float(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not good or not (low < value if open_low else low <= value) or value > high:
        bound = "above" if open_low else "at least"
        raise InvalidInput(f"{name} must be a number {bound} {low:g} and at most {high:g}, got {value!r}.")


def eos_or_stop(params: SamplingParams, eos_token_ids: Sequence[int]) -> frozenset[int]:
    """Token ids that end a sequence drawn with `params`."""
    eos = () if params.ignore_eos and params.grammar is None else eos_token_ids
    return frozenset(eos) | frozenset(params.stop_token_ids)
