"""JSON schemas: which of the official tests' are accepted and enforced, and outputs that violate an accepted one.

    python -m bench.engine.schemas --suite json/tests     the folder in the source archive of `jsonschema`
    python -m bench.engine.schemas --outputs 300          schemas of a generator alone
    python -m bench.engine.schemas --toy                  a few outputs, in seconds

Outputs are those of the bundled model, half of them without drafts, a quarter with chains of n-grams and a quarter with
trees; each that ended by itself is checked with `jsonschema`. Exits with 1 if a schema that is accepted allows a text
that violates it.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

from bench.harness import SEED, machine, new_parser, save
from jsonschema import (
    Draft4Validator,
    Draft6Validator,
    Draft7Validator,
    Draft201909Validator,
    Draft202012Validator,
)
from llguidance import LLMatcher

from quire import LLM, SamplingParams
from quire.errors import InvalidInput
from quire.grammar import json_schema
from quire.grammar.compiler import Compiler
from quire.models.tokenizer import Tokenizer, load_tokenizer
from quire.spec.bundled import BUNDLED_MODELS, DEFAULT_MODEL
from quire.spec.grammar import Grammar

VALIDATORS = {
    "draft2020-12": Draft202012Validator,
    "draft2019-09": Draft201909Validator,
    "draft7": Draft7Validator,
    "draft6": Draft6Validator,
    "draft4": Draft4Validator,
}
CHAIN = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
MODES: dict[str, dict[str, Any] | None] = {
    "without drafts": None,
    "chains": CHAIN,
    "trees": {**CHAIN, "topk": 2, "num_draft_tokens": 7},
}
Accepted = tuple[str, Any, Grammar]
"""Where a schema is from, the schema and its grammar."""
SHARES = {"without drafts": 2, "chains": 1, "trees": 1}
_SCHEMAS, _OUTPUTS = 12, 8  # of a batch, and of each of them
_MOST_TOKENS = 48
_PROMPT = "This is a record of what we saw in Bath: "


def generated(draw: random.Random, depth: int = 3) -> Any:
    """A schema of keywords that are accepted, most of them in a form that a short text can have."""
    kinds = ["string", "integer", "number", "constant", "pattern", "format", "enum"]
    if depth:
        kinds += ["array", "tuple", "object", "object", "map", "anyOf", "allOf", "$ref"]
    inner = lambda: generated(draw, depth - 1)  # noqa: E731
    low, high = sorted(draw.sample(range(6), 2))
    match draw.choice(kinds):
        case "string":
            return {"type": "string", "minLength": low, "maxLength": high + 4}
        case "integer":
            return {"type": "integer", "minimum": low * 7 - 20, "exclusiveMaximum": high * 31}
        case "number":
            return {"type": "number", "exclusiveMinimum": -low - 0.5, "maximum": high * 2.25}
        case "constant":
            return {"const": draw.choice([None, True, 1.5, 'é"\n', [1, {"a": []}], {"b": "c"}])}
        case "pattern":
            return {"type": "string", "pattern": draw.choice(["^[a-f]{2,5}$", "^(red|blue)+$", r"^\d{3}-[A-Z]{0,3}$"])}
        case "format":
            return {"type": "string", "format": draw.choice(["date", "time", "date-time", "ipv4", "uuid", "email"])}
        case "enum":
            return {"enum": draw.sample([1, "1", None, False, "a b", [], {"x": 1}, -2.5], 3)}
        case "array":
            return {"type": "array", "items": inner(), "minItems": low // 2, "maxItems": high // 2 + 1}
        case "tuple":
            return {"type": "array", "prefixItems": [inner(), inner()], "items": False, "minItems": low % 3}
        case "object":
            names = draw.sample(["a", "name", "number of rooms", "é", "a.b/c", "$x"], high % 3 + 1)
            found = {"type": "object", "properties": {name: inner() for name in names}, "additionalProperties": False}
            return found | {"required": names[: low % 3]}
        case "map":
            return {"type": "object", "patternProperties": {"^[a-c]{1,2}$": inner()}, "additionalProperties": False}
        case "anyOf":
            return {"anyOf": [inner(), inner()]}
        case "allOf":
            return {"allOf": [{"type": "integer", "minimum": low}, {"multipleOf": 3, "maximum": 100}]}
        case _:
            tree = {"type": "object", "properties": {"v": {"type": "boolean"}, "next": {"$ref": "#/$defs/n"}}}
            return {"$ref": "#/$defs/n", "$defs": {"n": tree | {"required": ["v"], "additionalProperties": False}}}


def official(folder: Path) -> Iterator[tuple[str, Any, list[dict[str, Any]]]]:
    """Each draft, schema and the tests of it."""
    for draft in VALIDATORS:
        for file in sorted((folder / draft).rglob("*.json")):
            for case in json.loads(file.read_text()):
                yield draft, case["schema"], case["tests"]


class Schemas:
    """Those that are accepted, in the order in which they came, and how many of a suite were not."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int) -> None:
        self.accepted: list[Accepted] = []
        self.counts: dict[str, Counter[str]] = {}
        self._tokenizer = tokenizer
        self._compiler = Compiler(tokenizer.portable, vocabulary, sorted(tokenizer.eos_token_ids))

    def add(self, source: str, schema: Any, tests: list[dict[str, Any]]) -> None:
        """Count a schema; one whose grammar allows what a test calls wrong is unsound, and shown."""
        counts = self.counts.setdefault(source, Counter())
        counts["schemas"] += 1
        try:
            grammar = json_schema(schema)
            matcher = self._compiler.compile(grammar).result()
        except InvalidInput:
            counts["refused"] += 1
            return
        self.accepted.append((source, schema, grammar))
        counts["accepted"] += 1
        wrong = [test for test in tests if not test["valid"] and self._allows(matcher, test["data"])]
        counts["allows what a test rejects"] += bool(wrong)
        wrong = [test for test in wrong if violation(source, schema, json.dumps(test["data"]))]
        counts["unsound"] += bool(wrong)
        counts["rejects a valid text"] += any(
            test["valid"] and not self._allows(matcher, test["data"]) for test in tests
        )
        for test in wrong:
            print(f"unsound: {source}: {json.dumps(schema)[:400]} allows {json.dumps(test['data'])}", file=sys.stderr)

    def close(self) -> None:
        """End the compiler."""
        self._compiler.close()

    def _allows(self, start: LLMatcher, data: Any) -> bool:
        for separators in ((", ", ": "), (",", ":")):
            matcher = start.deep_copy()
            text = json.dumps(data, ensure_ascii=False, separators=separators)
            tokens = self._tokenizer.encode(text, add_special_tokens=False).tolist()
            if matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting():
                return True
        return False


def violation(source: str, schema: Any, text: str) -> str:
    """Why a text is none of a schema's; "" if it is. `jsonschema` divides floats: 1000.3 is a multiple of 0.0001.
    A text with a number beyond floats is not checked."""
    kind = VALIDATORS.get(source, Draft202012Validator)
    try:
        found = json.loads(text)
    except ValueError as error:
        return str(error)
    try:
        errors = list(kind(schema, format_checker=kind.FORMAT_CHECKER).iter_errors(found))
    except OverflowError:
        return ""
    for error in errors:
        divided = error.validator == "multipleOf" and math.isfinite(error.instance)
        if not divided or Fraction(str(error.instance)) % Fraction(str(error.validator_value)):
            return str(error.message)
    return ""


def outputs(mode: str, schemas: list[Accepted], goal: int) -> Counter[str]:
    """Draw until so many outputs have ended by themselves. Violations are shown."""
    counts: Counter[str] = Counter()
    draw = random.Random(f"{SEED} {mode}")
    tokenizer = load_tokenizer(str(BUNDLED_MODELS[DEFAULT_MODEL]))
    with LLM(show_plan=False, max_model_len=512, speculative_config=MODES[mode], kv_memory="64MiB") as llm:
        while counts["ended"] < goal:
            batch = draw.sample(schemas, min(_SCHEMAS, len(schemas)))
            batch = [each for each in batch for _ in range(_OUTPUTS)]
            print(f"{mode}: {dict(counts)}", file=sys.stderr, flush=True)
            params = [
                SamplingParams(
                    temperature=draw.choice([0.5, 1.0, 1.5]), seed=draw.randrange(1 << 30), max_tokens=_MOST_TOKENS,
                    grammar=grammar,
                )
                for _, _, grammar in batch
            ]  # fmt: skip
            for (source, schema, _), result in zip(batch, llm.generate([_PROMPT] * len(batch), params), strict=True):
                counts["outputs"] += 1
                output = result.outputs[0]
                if output.finish_reason != "stop":
                    counts[f"ended by {output.finish_reason}"] += 1
                    continue
                counts["ended"] += 1
                counts["tokens"] += len(output.token_ids)
                reason = violation(source, schema, tokenizer.decode(output.token_ids))
                counts["violations"] += bool(reason)
                if reason:
                    print(f"{mode}: {source}: {json.dumps(schema)}: {output.text!r}: {reason}", file=sys.stderr)
        found = llm.statistics().get("speculation") or {}
        counts["accepted drafts"] = found.get("accepted_tokens", 0)
    return counts


def main() -> int:
    """Count, draw, show and write; 1 for a violation."""
    parser = new_parser("Count outputs that violate their JSON schema.")
    parser.add_argument("--suite", type=Path, metavar="FOLDER", help="the official tests: a folder for each draft")
    parser.add_argument("--generated", type=int, default=200, help="schemas that are generated")
    parser.add_argument("--outputs", type=int, default=10_000)
    options = parser.parse_args()
    if options.toy:
        options.generated, options.outputs = 16, 40
    tokenizer = load_tokenizer(str(BUNDLED_MODELS[DEFAULT_MODEL]))
    schemas = Schemas(tokenizer, json.loads((BUNDLED_MODELS[DEFAULT_MODEL] / "config.json").read_text())["vocab_size"])
    if options.suite is not None:
        for draft, schema, tests in official(options.suite):
            schemas.add(draft, schema, tests)
    draw = random.Random(SEED)
    for _ in range(options.generated):
        schemas.add("generated", generated(draw), [])
    schemas.close()
    for source, counts in schemas.counts.items():
        print(source, dict(counts))
    found = {}
    for mode, share in SHARES.items():
        found[mode] = outputs(mode, schemas.accepted, -(-options.outputs * share // sum(SHARES.values())))
        print(mode, dict(found[mode]), flush=True)
    save(options.json, {**machine(), "schemas": schemas.counts, "outputs": found})
    unsound = sum(counts["unsound"] for counts in schemas.counts.values())
    return int(unsound + sum(counts["violations"] for counts in found.values()) > 0)


if __name__ == "__main__":
    raise SystemExit(main())
