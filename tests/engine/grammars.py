"""Checks of grammars in an engine of the bundled model. Tests and mutants run them."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

from jsonschema import Draft202012Validator

from quire.engine.core import EngineCore
from quire.engine.messages import EngineRequest, TokenOutput, prompt_bytes
from quire.grammar import choice, json_schema, lark, regex
from quire.models.hf import LoadedModel, load_model
from quire.models.tokenizer import Tokenizer, load_tokenizer
from quire.scheduler.sampling_params import SamplingParams
from quire.spec.bundled import BUNDLED_MODELS, DEFAULT_MODEL
from quire.spec.grammar import Grammar
from tests.engine.running import add, core_for, run

BUNDLED = str(BUNDLED_MODELS[DEFAULT_MODEL])
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
CODE = r"[a-z]{3,8}-[0-9]{4}"
ANSWERS = ["yes", "no", 'may"be\n']
FORMS: tuple[Grammar | None, ...] = (
    json_schema(PERSON),
    None,
    regex(CODE),
    choice(ANSWERS),
    None,
    lark('start: "<" A ("," A)* ">"\nA: /[ab]{1,3}/'),
)
TEXTS = ["Tell me of Bath and of its people.", "Once upon a time there was"]
CHAIN = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
TREE = {**CHAIN, "topk": 2, "num_draft_tokens": 7}
MOST_TOKENS = 70
SETTINGS: dict[str, Any] = {"max_model_len": 256, "max_running_requests": 32, "page_size": 4}


@cache
def bundled() -> tuple[LoadedModel, Tokenizer]:
    """In float32: in half precision products of several rows round as the CPU likes, and tokens would depend on it."""
    return load_model(BUNDLED, dtype="float32"), load_tokenizer(BUNDLED)


def bundled_core(**settings: Any) -> EngineCore:
    model, _ = bundled()
    return core_for(model, **{**SETTINGS, **settings})


def prompts() -> list[list[int]]:
    _, tokenizer = bundled()
    return [tokenizer.encode(text).tolist() for text in TEXTS for _ in FORMS]


def params(most: int = MOST_TOKENS) -> list[SamplingParams]:
    """Half of them are greedy; those with a grammar are the others' neighbours."""
    return [
        SamplingParams(temperature=turn % 2 * 1.0, seed=turn, max_tokens=most, grammar=form)
        for turn, form in enumerate(FORMS * len(TEXTS))
    ]


def accepts(form: Grammar, text: str) -> bool:
    """An independent model of what a form allows."""
    match form:
        case Grammar("json", schema):
            Draft202012Validator(json.loads(schema)).validate(json.loads(text))
            return True
        case Grammar("regex", pattern):
            return re.fullmatch(pattern, text) is not None
    return text in ANSWERS or re.fullmatch(r"<[ab]{1,3}(,[ab]{1,3})*>", text) is not None


def check_outputs(found: list[list[int]]) -> None:
    """Each whole output is one that its grammar allows."""
    _, tokenizer = bundled()
    for tokens, one in zip(found, params(), strict=True):
        if one.grammar is not None:
            whole = tokens[-1] in tokenizer.eos_token_ids
            assert whole or len(tokens) == MOST_TOKENS
            text = tokenizer.decode(tokens)
            assert not whole or accepts(one.grammar, text), text
            assert whole or one.grammar.kind in ("json", "lark"), f"it never ends: {text}"


@cache
def expected() -> list[list[int]]:
    """One step at a time, each request alone."""
    core = bundled_core(overlap=False, max_running_requests=1)
    found = run(core, prompts(), params())
    core.close()
    check_outputs(found)
    return found


def check_same(turns: int = 2, **settings: Any) -> EngineCore:
    """The same tokens, cold and warm."""
    core = bundled_core(**settings)
    for turn in range(turns):
        assert run(core, prompts(), params(), f"t{turn}") == expected()
    assert core.statistics()["grammar"]["running"] == 0
    core.close()
    return core


def outputs_of(core: EngineCore, text: str, given: SamplingParams, name: str = "r") -> list[TokenOutput]:
    """All outputs of a request alone."""
    _, tokenizer = bundled()
    add(core, EngineRequest(request_id=name, prompt=prompt_bytes(tokenizer.encode(text)), params=given))
    found: list[TokenOutput] = []
    while core.has_work():
        found += core.step()
    return found
