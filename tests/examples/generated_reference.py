"""Reference pages from the code: names of `quire`, options of commands, routes of a server, metrics."""

from __future__ import annotations

import inspect
import re
import tempfile
from collections.abc import Iterable, Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import click
import typer.main

import quire
from quire.cli.app import app
from quire.counters import Metric, metrics_of
from quire.serve import answers

NAMES = {
    "An engine": "LLM SamplingParams RequestOutput CompletionOutput AsyncEngine EngineConfig engine_config",
    "The cache": "KVCache PrefixHit RequestKV RunningBatch CacheStatistics FrameCounts Namespace Pool",
    "Models and groups": "ModelSpec read_model_config GroupSpec ReachSpec PageLayout Field DType",
    "Plans": "make_plan PlanSettings Plan MemoryPlan options_to_fit find_device Parallelism parse_bytes format_bytes",
    "Events and explanations": "EventLog PagesStored PagesRemoved AllCleared Explanation Reason Cause",
    "Policies and stores of your own": "Part EvictionPolicy Node register_eviction "
    "Store StoreKey Answer Entry Record RecordViews RecordFormat open_store register_store",
    "Errors": "QuireError InvalidInput ContextTooLong RequestTooLarge PlanError OutOfPages InvalidFree MissingFrame "
    "LeaseError UnsupportedModel ModelLoadError StepFailed EngineDead AuditFailure StoreError HostMemoryError",
}


def names() -> str:
    """The public names by what they are for, with the first sentence of their docstrings."""
    listed = [name for group in NAMES.values() for name in group.split()]
    assert sorted([*listed, "__version__"]) == sorted(quire.__all__), set(quire.__all__) ^ set(listed)
    lines: list[str] = []
    for group, members in NAMES.items():
        lines += [f"### {group}", "", "| name | what it is |", "|---|---|"]
        lines += [f"| `{name}` | {_first_sentence(getattr(quire, name))} |" for name in members.split()] + [""]
    return "\n".join(lines).rstrip()


def options() -> str:
    """Every command of `quire`, with its arguments and options."""
    lines: list[str] = []
    for name, command in _commands(cast(click.Group, typer.main.get_command(app)), "quire"):
        lines += [f"### `{name}`", "", _one_line((command.help or "").split("\n\n")[0]), ""]
        rows = [_option(parameter) for parameter in command.params if not getattr(parameter, "hidden", False)]
        lines += ["| option | meaning |", "|---|---|", *rows, ""] if rows else []
    return "\n".join(lines).rstrip()


def _commands(group: click.Group, path: str) -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        if command.hidden:
            continue
        if hasattr(command, "commands"):
            yield from _commands(cast(click.Group, command), f"{path} {name}")
        else:
            yield f"{path} {name}", command


def _option(parameter: click.Parameter) -> str:
    shown = "/".join((parameter.opts[0], *parameter.secondary_opts[:1]))
    if parameter.param_type_name == "argument":
        shown = (getattr(parameter, "metavar", None) or parameter.name or "").upper()
    default = parameter.default
    said = default not in (None, False, True, (), []) and not callable(default)
    ends = f" Default: {getattr(default, 'value', default)}." if said else ""
    return f"| `{shown}` | {_one_line(getattr(parameter, 'help', None) or '')}{ends} |"


def routes() -> str:
    """The routes of a server, from its OpenAPI document."""
    lines = ["| route | body | what it does |", "|---|---|---|"]
    for path, methods in _openapi()["paths"].items():
        for method, route in methods.items():
            content = route.get("requestBody", {}).get("content", {}).get("application/json", {})
            body = _type(content["schema"]) if content else "-"
            text = route.get("description") or ROUTES[path]
            lines.append(f"| `{method.upper()} {path}` | {body} | {_one_line(text)} |")
    return "\n".join(lines)


ROUTES = {
    "/v1/completions": "Continues prompts, as OpenAI's.",
    "/v1/chat/completions": "Answers messages, as OpenAI's.",
    "/v1/models": "The model that is served, with its `max_model_len`.",
    "/v1/models/{name}": "The same model; 404 for any other name.",
}
"""Routes that say nothing of themselves."""


def bodies() -> str:
    """The fields of request bodies, from the same document."""
    lines: list[str] = []
    for name, schema in _openapi()["components"]["schemas"].items():
        if name in ANSWERS or not schema.get("properties"):
            continue
        lines += [
            f"### {name}",
            "",
            _one_line(schema.get("description", "")),
            "",
            "| field | type | meaning |",
            "|---|---|---|",
        ]
        needed = schema.get("required", ())
        for field, found in schema["properties"].items():
            about = _one_line(found.get("description", ""))
            lines.append(f"| `{field}`{', required' if field in needed else ''} | {_type(found)} | {about} |")
        lines.append("")
    return "\n".join(lines).rstrip()


ANSWERS = {name for name, found in vars(answers).items() if isinstance(found, type)}
"""Schemas of what is sent, not of bodies that are read."""


def _openapi() -> dict[str, Any]:
    from quire.serve.app import create_app

    engine = SimpleNamespace(
        context_length=2048, last_statistics={"pooling": {"gives": "embeddings", "size": 8}}, metrics=[], health=None
    )
    return create_app(cast(Any, engine), model_name="quire-bundled").openapi()


def _type(schema: dict[str, Any]) -> str:
    """A JSON schema in words."""
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[-1]
        return f"[{name}](#{name.lower()})"
    if kinds := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(_type(each) for each in kinds if each.get("type") != "null"))
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"list of {_type(schema['items'])}"
    if schema.get("type") == "object":
        return (
            f"object of {_type(inner)}" if isinstance(inner := schema.get("additionalProperties"), dict) else "object"
        )
    return str(schema.get("type", "any"))


@cache
def declared_metrics() -> tuple[Metric, ...]:
    """What a server with all tiers, speculation, hot buffers, peers, tenants and events exposes, and a router; each
    family once."""
    from quire import LLM
    from quire.loop.tenants import AllTenants
    from quire.observe.kv_publisher import PublisherCounters
    from quire.observe.metrics import ServerCounters
    from quire.routing.router import RouterCounters
    from quire.sparse.coordinator import HiSparseCounters
    from quire.transfer.node import TransferCounters

    with tempfile.TemporaryDirectory() as folder:
        settings = {"kv_memory": "1MiB", "host_memory": "2MiB", "storage": folder, "storage_size": "64MiB"}
        drafts = {"method": "ngram", "num_speculative_tokens": 4}
        with LLM(max_model_len=64, show_plan=False, speculative_config=drafts, **settings) as llm:
            declared = llm.engine.ready().metrics
    more = (HiSparseCounters, TransferCounters, PublisherCounters, ServerCounters, AllTenants, RouterCounters)
    declared += [found for each in more for found in metrics_of(each)]
    return tuple({each.name: each for each in declared}.values())


def exposed_names(metric: Metric) -> list[str]:
    """The names of its family in Prometheus' text format, its own first."""
    return [name + ("_total" if metric.kind == "counter" else "") for name in metric.exposed]


def metrics() -> str:
    """A row for each family of metrics."""
    lines = ["| metric | type | labels | what it is |", "|---|---|---|---|"]
    for metric in declared_metrics():
        shown = ", ".join(f"`{label}`" for label in sorted((*metric.labels, *metric.constant))) or "-"
        lines.append(f"| `{exposed_names(metric)[0]}` | {metric.kind} | {shown} | {_one_line(metric.text)} |")
    return "\n".join(lines)


def vllm_metrics() -> str:
    """A row for each name of vLLM that is exposed too."""
    lines = ["| vLLM | Quire | what it is |", "|---|---|---|"]
    for metric in declared_metrics():
        own, *theirs = exposed_names(metric)
        lines += [f"| `{name}` | `{own}` | {_one_line(metric.text)} |" for name in theirs]
    return "\n".join(lines)


def _first_sentence(found: object) -> str:
    text = _one_line((inspect.getdoc(found) or "").split("\n\n")[0])
    return re.split(r"(?<=\w[.)`])\s(?=[A-Z`])|:$", text)[0].rstrip(".:") + "."


def _one_line(text: str | Iterable[str]) -> str:
    """As a cell of a table."""
    return " ".join(str(text).replace("|", "\\|").split())
