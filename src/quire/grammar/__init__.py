"""Structured output: grammars, what compiles them, and masks of the tokens that they allow."""

from quire.grammar.grammars import choice, ebnf, json_object, json_schema, lark, regex

__all__ = ["choice", "ebnf", "json_object", "json_schema", "lark", "regex"]
