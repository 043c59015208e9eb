"""The form that a request wants its answer to have, under the names of OpenAI, vLLM and SGLang."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from quire.errors import InvalidInput
from quire.grammar import choice, ebnf, json_object, json_schema, regex
from quire.grammar.grammars import MOST_CHARACTERS, MOST_CHOICES
from quire.serve.closed_object import ClosedObject
from quire.serve.errors import BadField, naming
from quire.spec.grammar import Grammar

JsonSchema = dict[str, Any] | bool
GrammarText = Annotated[str, Field(min_length=1, max_length=MOST_CHARACTERS)]
Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MOST_CHOICES)]


def _one(about: str, **rules: Any) -> Any:
    return Field(None, description=about, **rules)


class NamedSchema(ClosedObject):
    """The schema of an answer. Its name and description change nothing. It is enforced also if it is not `strict`."""

    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: JsonSchema | None = _one("By default that of any object.", alias="schema")


class ResponseFormat(ClosedObject):
    """Text, any JSON object, or JSON by a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = _one("With the type json_schema.")

    def grammars(self) -> list[Grammar]:
        """One, or none for any text."""
        if self.type == "text":
            return []
        if self.type == "json_schema" and self.json_schema is None:
            raise InvalidInput("response_format of the type json_schema has no json_schema.", fix="add it.")
        schema = self.json_schema.schema_ if self.json_schema is not None else None
        return [json_object() if schema is None else json_schema(schema)]


class StructuredOutputs(ClosedObject):
    """The form of an answer, by one of these."""

    json_: JsonSchema | GrammarText | None = _one("A JSON schema, or its text.", alias="json")
    json_object: bool | None = _one("Any JSON object.")
    regex: GrammarText | None = _one("A regular expression of the whole answer.")
    choice: Choices | None = _one("One of these texts.")
    grammar: GrammarText | None = _one("A grammar in Lark's syntax, or llama.cpp's.")

    def grammars(self) -> list[Grammar]:
        """One for each that is given."""
        found = [json_schema(self.json_)] if self.json_ is not None else []
        found += [json_object()] if self.json_object else []
        found += [regex(self.regex)] if self.regex is not None else []
        found += [choice(self.choice)] if self.choice is not None else []
        return found + ([ebnf(self.grammar)] if self.grammar is not None else [])


class FormFields(BaseModel):
    """Fields that say the same in several ways: one of them may."""

    response_format: ResponseFormat | None = _one("The answer is JSON: any object, or by a schema.")
    structured_outputs: StructuredOutputs | None = _one("The form of the answer, as vLLM says it.")
    guided_json: JsonSchema | GrammarText | None = _one("`structured_outputs.json`.")
    guided_regex: GrammarText | None = _one("`structured_outputs.regex`.")
    guided_choice: Choices | None = _one("`structured_outputs.choice`.")
    guided_grammar: GrammarText | None = _one("`structured_outputs.grammar`.")
    json_schema: JsonSchema | GrammarText | None = _one("`structured_outputs.json`, as SGLang says it.")
    regex: GrammarText | None = _one("`structured_outputs.regex`, as SGLang says it.")
    ebnf: GrammarText | None = _one("`structured_outputs.grammar`, as SGLang says it.")

    def grammar(self) -> Grammar | None:
        """What the answer may be; None for any text. Raises BadField for a form that is not supported, and for two."""
        found: list[tuple[str, Grammar]] = []
        for name, grammars in _MADE.items():
            if (given := getattr(self, name)) is None:
                continue
            with naming(name):
                found += [(name, each) for each in grammars(given)]
            if len(found) > 1:
                both = f"{name} says twice" if found[0][0] == name else f"{found[0][0]} and {name} both say"
                raise BadField(f"{both} what the form of the answer is.", param=name, fix="say it once.")
        return found[0][1] if found else None


_MADE: dict[str, Callable[[Any], list[Grammar]]] = {
    "response_format": ResponseFormat.grammars,
    "structured_outputs": StructuredOutputs.grammars,
    "guided_json": lambda given: [json_schema(given)],
    "guided_regex": lambda given: [regex(given)],
    "guided_choice": lambda given: [choice(given)],
    "guided_grammar": lambda given: [ebnf(given)],
    "json_schema": lambda given: [json_schema(given)],
    "regex": lambda given: [regex(given)],
    "ebnf": lambda given: [ebnf(given)],
}
