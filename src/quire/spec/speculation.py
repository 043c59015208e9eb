"""SpeculativeConfig: how tokens are drafted and verified, and how far a step may run ahead.

It reads the names of vLLM and SGLang, and loads no model. The functions at the end are the only place that says which
tokens decoding needs beyond the existing ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.errors import InvalidInput
from quire.spec.json_object import SWITCH, TEXT, WHOLE, Kind, read_fields
from quire.spec.pages import pages_for

METHODS = ("ngram", "draft_model", "eagle", "eagle3", "mtp")
"""Drafts from the request's own tokens, from a smaller model, from an EAGLE head, and from the model's own layers."""

STRICT, STANDARD = _SAMPLE_METHODS = ("strict", "standard")
"""A draft is accepted if it equals the token that is drawn anyway, or by rejection sampling."""

_LOADED = ("draft_model", "eagle", "eagle3")
_HEADS = ("eagle", "eagle3", "mtp")
_METHOD_ALIASES = {"standalone": "draft_model", "nextn": "mtp", "deepseek_mtp": "mtp"}
_ALIASES = {
    "speculative_algorithm": "method",
    "speculative_draft_model_path": "model",
    "speculative_draft_model_revision": "revision",
    "num_speculative_tokens": "num_steps",
    "speculative_num_steps": "num_steps",
    "speculative_eagle_topk": "topk",
    "speculative_num_draft_tokens": "num_draft_tokens",
}
_REFUSED = {"draft_tensor_parallel_size": "leave it out: a draft runs on the ranks of its target."}
_BOUNDS = ("prompt_lookup_min", "prompt_lookup_max")
_COUNTS = ("num_steps", "topk", "num_draft_tokens", *_BOUNDS)
_KINDS: Mapping[str, Kind] = dict.fromkeys((*_COUNTS, "num_layers"), WHOLE) | {
    **dict.fromkeys(("method", "model", "revision", "rejection_sample_method"), TEXT),
    "shared_history": SWITCH,
}
_MOST = {"num_steps": 256, "num_draft_tokens": 1024, "topk": 64, "prompt_lookup_max": 64}
_EXAMPLE = 'write it as {"method": "ngram", "num_speculative_tokens": 4}.'
_MOST_DRAFT_LAYERS = 1_000
_ROW_MARGIN = 4  # tokens of a row that any step may write beyond the context


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """How tokens are drafted; frozen for the life of an engine.

    Each step drafts `num_steps` tokens deep along `topk` branches and verifies `num_draft_tokens` tokens at once: the
    last known token and drafts. `model` is the draft's path or hub id, for methods that load one, and
    `revision` that of the hub. `num_layers` draft layers store
    keys and values of their own; n-grams have none, whatever is given. An n-gram of `prompt_lookup_min` to
    `prompt_lookup_max` tokens is looked up; with `shared_history` also in ended requests of the namespace. With the
    `rejection_sample_method` "strict", tokens are those that are drawn without drafts. With "standard", drafts that
    were sampled are verified by rejection sampling: tokens have the same distribution. Raises InvalidInput for an
    unknown method and a number out of range.
    """

    method: str
    num_steps: int
    topk: int = 1
    num_draft_tokens: int
    model: str | None = None
    revision: str | None = None
    num_layers: int = 1
    shared_history: bool = False
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 5
    rejection_sample_method: str = STRICT

    def __post_init__(self) -> None:
        _check_method(self.method)
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise InvalidInput(
                    f"speculation with {name} {getattr(self, name)}: it must be at least 1.", fix=f"raise {name}."
                )
        if not 0 <= self.num_layers <= _MOST_DRAFT_LAYERS:
            raise InvalidInput(
                f"speculation with {self.num_layers:,} draft layers.", fix=f"give 0 to {_MOST_DRAFT_LAYERS:,}."
            )
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise InvalidInput(
                f"n-grams of at least {self.prompt_lookup_min} and at most {self.prompt_lookup_max} tokens.",
                fix=f"give a prompt_lookup_min of at most {self.prompt_lookup_max}.",
            )
        if self.rejection_sample_method not in _SAMPLE_METHODS:
            raise InvalidInput(
                f"'{self.rejection_sample_method}' is not a rejection_sample_method here.",
                fix=f"use one of {', '.join(_SAMPLE_METHODS)}.",
            )
        if self.method == "ngram":
            object.__setattr__(self, "num_layers", 0)

    @property
    def branches(self) -> bool:
        """Whether several drafts may follow one token."""
        return self.topk > 1

    @property
    def keeps_features(self) -> bool:
        """Whether hidden states of the target are kept between steps, for a head that reads them."""
        return self.method in _HEADS

    @classmethod
    def parse(cls, given: SpeculativeConfig | str | Mapping[str, Any]) -> SpeculativeConfig:
        """The configuration itself, or in JSON text or a mapping, by the names of these fields, of vLLM or of SGLang.

        A null counts as absent. A chain (`topk` 1) of n drafts verifies n + 1 tokens, so one number gives the other.
        One bound of n-grams gives the other. Raises InvalidInput for an unknown name, two names of one field, a value
        of another type, and numbers that contradict each other.
        """
        if isinstance(given, SpeculativeConfig):
            return given
        found = read_fields(given, "speculation", _KINDS, names=_ALIASES, refused=_REFUSED, fix=_EXAMPLE)
        if "method" not in found:
            raise InvalidInput("speculation without a method.", fix=f"give method: one of {', '.join(METHODS)}.")
        method = found["method"].lower()
        found["method"] = method = _METHOD_ALIASES.get(method, method)
        _check_method(method)
        for name, most in _MOST.items():
            if found.get(name, 0) > most:
                raise InvalidInput(f"speculation with {name} {found[name]:,}.", fix=f"give at most {most}.")
        if found.get("num_draft_tokens", 2) < 2:
            raise InvalidInput(
                "num_draft_tokens is below 2: the last known token is one of them.", fix="give at least 2."
            )
        bounds = [found[name] for name in _BOUNDS if name in found]
        if bounds and method != "ngram":
            raise InvalidInput(f"{method} looks up no n-grams.", fix=f"leave {' and '.join(_BOUNDS)} out.")
        if method not in _LOADED and "model" in found:
            raise InvalidInput(
                f"{method} drafts without a model beside its target.", fix="leave model out, or use draft_model."
            )
        if method in _LOADED and "model" not in found:
            raise InvalidInput(
                f"{method} without a model.",
                fix="give model, the path or hub id of the draft; mtp and ngram need none.",
            )
        if "revision" in found and "model" not in found:
            raise InvalidInput(f"{method} loads no model, so there is no revision of it.", fix="leave revision out.")
        if bounds:
            found |= dict(zip(_BOUNDS, (bounds[0], bounds[-1]), strict=True))
        return cls(**found, **_derived(found))


def _check_method(method: str) -> None:
    if method not in METHODS:
        raise InvalidInput(f"'{method}' is not a method of drafting.", fix=f"use one of {', '.join(METHODS)}.")


def _derived(found: Mapping[str, Any]) -> dict[str, Any]:
    """The depth or the verified tokens of a chain if one of them is absent."""
    is_chain, absent = found.get("topk", 1) == 1, {"num_steps", "num_draft_tokens"} - found.keys()
    if len(absent) == 2:
        raise InvalidInput("speculation needs its depth.", fix="give num_speculative_tokens (num_steps), such as 3.")
    if absent and not is_chain:
        raise InvalidInput("a draft with branches needs two numbers.", fix=f"give {absent.pop()} too.")
    if "num_steps" in absent:
        return {"num_steps": found["num_draft_tokens"] - 1}
    if absent:
        return {"num_draft_tokens": found["num_steps"] + 1}
    steps, verified = found["num_steps"], found["num_draft_tokens"]
    if is_chain and verified != steps + 1:
        raise InvalidInput(
            f"a chain of {steps:,} drafts and {verified:,} tokens to verify.",
            fix=f"leave num_draft_tokens out, or give {steps + 1:,}.",
        )
    return {}


# -- what a step reserves


def get_alloc_len_per_decode(speculation: SpeculativeConfig | None, page_size: int) -> int:
    """Tokens that one decode step of one request may write, at worst.

    Without speculation 1. Draft layers that follow a tree (`topk` above 1) on pages may start each branch in the middle
    of a page, so a branch has whole pages: `ceil((page_size - 1 + num_steps) / page_size)` of them. Drafts that write
    nothing, for example from n-grams, do not. Source: the report on the reserve of a decode step. `page_size` is the
    allocator's, times the ranks that share a page in decode-context parallelism.
    """
    if speculation is None:
        return 1
    steps, topk = speculation.num_steps, speculation.topk
    if page_size == 1 or topk == 1 or not speculation.num_layers:
        return max(steps * topk, speculation.num_draft_tokens)
    branch = pages_for(page_size - 1 + steps, page_size) * page_size
    return max(branch * topk, speculation.num_draft_tokens)


def get_alloc_reserve_per_decode(speculation: SpeculativeConfig | None, page_size: int) -> int:
    """Tokens that a decoding request holds beyond its settled ones: those of two steps.

    The next step is launched before the last one's verification is known, so both must have room.
    """
    return 2 * get_alloc_len_per_decode(speculation, page_size)


def get_drafts_beyond_end(speculation: SpeculativeConfig | None, page_size: int) -> int:
    """Tokens that a request at its end holds beyond its own: none without speculation, which writes no draft."""
    return get_alloc_reserve_per_decode(speculation, page_size) if speculation is not None else 0


def get_verified_tokens(speculation: SpeculativeConfig | None) -> int:
    """Tokens of a request that a step verifies, after each of which it stores a state; 0 without speculation."""
    return speculation.num_draft_tokens if speculation is not None else 0


def get_topk(speculation: SpeculativeConfig | None) -> int:
    """The most tokens that a step computes after one token."""
    return speculation.topk if speculation is not None else 1


def get_kept_features(speculation: SpeculativeConfig | None, page_size: int) -> int:
    """Last positions of a running request whose features, and outputs, a draft head keeps: a page that is not full, and
    the tokens that a step verifies. 0 without a head."""
    keeps = speculation is not None and speculation.keeps_features
    return page_size + get_verified_tokens(speculation) + 1 if keeps else 0


def get_req_to_token_extra_context_len(speculation: SpeculativeConfig | None, page_size: int) -> int:
    """Tokens by which a request's row of pages is longer than the context.

    With speculation on pages the reserve is rounded up to a whole page, and the row has room for all of it. On pages of
    one token it has room for the verified tokens; a reserve beyond that is cut at the end of the row.
    """
    extra = _ROW_MARGIN + get_verified_tokens(speculation)
    if speculation is not None and page_size > 1:
        extra = max(extra, get_alloc_reserve_per_decode(speculation, page_size) + page_size - 1)
    return extra
