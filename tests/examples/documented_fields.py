"""The fields that OpenAI and Anthropic document, from the types of their own clients, and what this server does with
each, from its bodies."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any, Literal, Required, Union, get_args, get_origin

import typing_extensions
from anthropic.types.beta import message_count_tokens_params, message_create_params
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import input_token_count_params, response_create_params
from pydantic import BaseModel, ValidationError

from quire.errors import QuireError
from quire.serve.messages_protocol import CountBody, MessagesBody
from quire.serve.protocol import NOTHING, ChatBody, CompletionBody, RequestBody
from quire.serve.responses_protocol import ResponsesBody

DOCUMENTED: dict[str, tuple[type, type[RequestBody]]] = {
    "/v1/chat/completions": (chat_create_params.CompletionCreateParamsStreaming, ChatBody),
    "/v1/completions": (completion_create_params.CompletionCreateParamsStreaming, CompletionBody),
    "/v1/responses": (response_create_params.ResponseCreateParamsStreaming, ResponsesBody),
    "/v1/responses/input_tokens": (input_token_count_params.InputTokenCountParams, ResponsesBody),
    "/v1/messages": (message_create_params.MessageCreateParamsStreaming, MessagesBody),
    "/v1/messages/count_tokens": (message_count_tokens_params.MessageCountTokensParams, CountBody),
}
"""The documented type and the body of each route. Those of Anthropic are of its beta, which has all fields."""

GENERATING = ("/v1/chat/completions", "/v1/completions")
"""Routes that also have the fields of vLLM and SGLang."""

_ENDS = [{"role": "user", "content": "x"}]
_TURN = {"messages": _ENDS}
_NAMED: dict[str, Any] = {"name": "x", "parameters": {"type": "object"}}
PLAIN: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": _TURN
    | {"max_tokens": 2, "logprobs": True, "tools": [{"type": "function", "function": _NAMED}]},
    "/v1/completions": {"prompt": "x", "max_tokens": 2},
    "/v1/responses": {"input": "x", "max_output_tokens": 2, "tools": [_NAMED | {"type": "function"}]},
    "/v1/responses/input_tokens": {"input": "x", "tools": [_NAMED | {"type": "function"}]},
    "/v1/messages": _TURN | {"max_tokens": 2, "tools": [{"name": "x", "input_schema": {"type": "object"}}]},
    "/v1/messages/count_tokens": _TURN | {"tools": [{"name": "x", "input_schema": {"type": "object"}}]},
}
"""The body of each route to which a field is added, with what some fields need."""

_SCHEMA = {"type": "object"}
_VALUES: dict[str, Any] = {
    "best_of": 2,
    "budget_tokens": 1024,
    "input_schema": _SCHEMA,
    "logit_bias": {"5": 1},
    "max_output_tokens": 2,
    "max_tokens": 2,
    "parameters": _SCHEMA,
    "schema": _SCHEMA,
    "ToolChoiceAllowedParam.tools": [{"type": "function", "name": "x"}],
}
"""Values of fields whose type does not say which are valid."""


def fields(route: str) -> dict[str, Any]:
    """The documented fields of a body, with their types. Which model is no matter here."""
    return {name: kind for name, kind in _hints(DOCUMENTED[route][0]).items() if name != "model"}


def standing(route: str, name: str) -> str:
    """What a route does with a field of this name."""
    body = DOCUMENTED[route][1]
    if name in body.model_fields:
        return "accepted"
    if name in body.ignored:
        return "no effect"
    unless = ", ".join(
        f"`{value}`" for value in body.refused[name] if value not in NOTHING and not isinstance(value, float)
    )
    return "refused" + (f" unless {unless}" if unless else "")


def values(name: str, kind: Any) -> list[Any]:
    """Valid values of a field: of each of its types, and with each field of their objects."""
    if name in _VALUES:
        return [_VALUES[name]]
    ends = _ENDS if name in ("messages", "input") else []
    return [[*value, *ends] if isinstance(value, list) else value for value in _values(kind)]


def is_accepted(route: str, more: dict[str, Any]) -> bool:
    """Whether a request with these fields is no error of its fields."""
    try:
        read: Any = DOCUMENTED[route][1].model_validate(PLAIN[route] | more)
        read.check()
        for made in ("params", "conversation"):
            getattr(read, made, lambda: None)()
    except (ValidationError, QuireError):
        return False
    return True


def table() -> str:
    """Each documented field, and what each route does with it."""
    openai, anthropic = [*DOCUMENTED][:4], [*DOCUMENTED][4:]
    documented = set().union(*(fields(route) for route in GENERATING), ["model"])
    others = {route: _known(DOCUMENTED[route][1]) - documented for route in GENERATING}
    lines = _rows("field of OpenAI", {route: {*fields(route)} for route in openai})
    lines += _rows("field of Anthropic", {route: {*fields(route)} for route in anthropic})
    lines += _rows("field of vLLM, SGLang or Quire", others)
    lines += ["| route | refused in fields that are accepted: fields, and objects of these types |", "|---|---|"]
    for route in ("/v1/chat/completions", "/v1/responses", "/v1/messages"):
        lines.append(f"| `{route}` | {'; '.join(refused_inside(route))} |")
    return "\n".join(lines)


def _rows(title: str, names: dict[str, set[str]]) -> list[str]:
    lines = [f"| {title} | {' | '.join(f'`{route}`' for route in names)} |", "|---" * (len(names) + 1) + "|"]
    for name in sorted(set().union(*names.values())):
        cells = [standing(route, name) if name in found else "" for route, found in names.items()]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return [*lines, ""]


def _known(body: type[RequestBody]) -> set[str]:
    return {*body.model_fields, *body.ignored, *body.refused}


def refused_inside(route: str) -> list[str]:
    """Fields, and types of objects, with which no body is accepted, in fields that are."""
    body, accepted, refused = DOCUMENTED[route][1], set[str](), set[str]()
    for name, kind in fields(route).items():
        if name in body.model_fields:
            for value in values(name, kind):
                (accepted if is_accepted(route, {name: value}) else refused).update(_places(value, name))
    left = refused - accepted
    kinds: dict[str, list[str]] = {}
    for place in sorted(left):
        if not any(place != other and place.startswith(other) for other in left):
            path, _, kind = place.removesuffix(")").rpartition(" (") if place.endswith(")") else (place, "", "")
            kinds.setdefault(path, []).append(kind)
    return [f"`{path}`" + (f" {', '.join(each)}" if any(each) else "") for path, each in kinds.items()]


def _places(value: Any, path: str) -> Iterator[str]:
    """The names of the objects in a value, with their types."""
    if isinstance(value, list):
        for each in value:
            yield from _places(each, f"{path}[]")
        return
    if isinstance(value, dict):
        if isinstance(value.get("type"), str):
            path += f" ({value['type']})"
        for name, inner in value.items():
            yield from _places(inner, f"{path}.{name}")
    yield path


def _hints(kind: Any) -> dict[str, Any]:
    return typing_extensions.get_type_hints(kind, include_extras=True)


def _values(kind: Any, depth: int = 0) -> Iterator[Any]:
    origin, args = get_origin(kind), get_args(kind)
    if typing_extensions.is_typeddict(kind):
        yield from _objects(kind, depth)
    elif origin in (Union, types.UnionType):
        for each in args:
            if each is not type(None) and not (isinstance(each, type) and issubclass(each, BaseModel)):
                yield from _values(each, depth)
    elif origin is Literal:
        yield from args if depth == 0 else args[:1]
    elif origin is dict:
        yield {"x": next(_values(args[1], depth))}
    elif args and isinstance(origin, type):  # a list of any kind
        for value in _values(args[0], depth):
            yield [value]
    elif args:  # Required, Annotated
        yield from _values(args[0], depth)
    else:
        yield {int: 1, float: 0.5, bool: True, object: {}}.get(kind, "x")


def _objects(kind: Any, depth: int) -> Iterator[dict[str, Any]]:
    """One with its required fields alone, and one with each other value of each field."""
    hints = _hints(kind)
    found = {name: [*_values(hint, depth + 1)] for name, hint in hints.items()} if depth < 8 else {}
    for name in found:
        for key in (name, f"{kind.__name__}.{name}"):
            found[name] = [_VALUES[key]] if key in _VALUES else found[name]
    needed = {name: each for name, each in found.items() if get_origin(hints[name]) is Required}
    plain = {name: each[0] for name, each in needed.items()}
    yield plain
    for name, each in found.items():
        for value in each[1:] if name in needed else each:
            yield plain | {name: value}
