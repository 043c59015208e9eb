"""Streams that another server continues: at every line of their journal, in every dialect, byte by byte."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.serve.journal import JOURNAL
from tests.routing.live_router import SECRET
from tests.serve.chat_templates import CHAT_TEMPLATES
from tests.serve.live_server import LiveServer

TEXT = "It was a fine autumn evening, and the whole party had walked out to see the new plantation."
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 12}
TEXTS: dict[str, Any] = {"prompt": TEXT, "max_tokens": 12}
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}}, "required": ["name"]}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
SMALL = ("--kv-memory", "32MiB", "--dtype", "float32", "--router-secret", SECRET)
PENALTIES = {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.2}

STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("/v1/completions", TEXTS | {"temperature": 0}),
    "without a seed": ("/v1/completions", TEXTS | {"temperature": 1.5, "stream_options": {"include_usage": True}}),
    "with a seed": ("/v1/completions", TEXTS | {"seed": 7, "return_token_ids": True}),
    "penalties": ("/v1/completions", TEXTS | PENALTIES | {"min_tokens": 12}),
    "several prompts": ("/v1/completions", TEXTS | {"prompt": [TEXT, TEXT[:40]], "n": 2, "temperature": 1.2}),
    "prompts with a seed": ("/v1/completions", TEXTS | {"prompt": [TEXT, TEXT[:40]], "seed": 3}),
    "echo": ("/v1/completions", TEXTS | {"echo": True, "logprobs": 2}),
    "logprobs": ("/v1/completions", TEXTS | {"logprobs": 3, "n": 2}),
    "chat": ("/v1/chat/completions", CHAT | {"temperature": 1.2, "explain": True}),
    "choices": ("/v1/chat/completions", CHAT | {"n": 3, "logprobs": True, "top_logprobs": 2, "temperature": 1.3}),
    "usage": (
        "/v1/chat/completions",
        CHAT | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    "session": ("/v1/chat/completions", CHAT | {"session_id": "of a journal", "temperature": 1.1}),
    "tool": ("/v1/chat/completions", CHAT | {"tools": [TOOL], "tool_choice": "required", "max_tokens": 60}),
    "schema": ("/v1/chat/completions", CHAT | {"guided_json": SCHEMA, "max_tokens": 40}),
    "messages": ("/v1/messages", CHAT | {"temperature": 1.0}),
    "responses": ("/v1/responses", {"input": TEXT, "max_output_tokens": 12, "temperature": 1.2}),
    "scored response": (
        "/v1/responses",
        {"input": TEXT, "max_output_tokens": 12, "top_logprobs": 2, "include": ["message.output_text.logprobs"]},
    ),
    "generate": ("/generate", {"text": TEXT, "sampling_params": {"max_new_tokens": 12}, "return_logprob": True}),
}


@pytest.fixture(scope="module")
def journals(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    path: Path = tmp_path_factory.mktemp("templates") / "hermes.jinja"
    path.write_text(CHAT_TEMPLATES["hermes"].replace("think>", "thought>"))  # a model that does not reason
    with LiveServer.quire("--chat-template", str(path), *SMALL) as live:
        yield live
        live.terminate()
        assert live.wait() == 0, live.log()
        assert "Traceback" not in live.log()


def stream(
    live: LiveServer, path: str, body: dict[str, Any], lines: bytes = b""
) -> tuple[bytes, list[tuple[bytes, bytes]]]:
    """The events of an answer up to each line of its journal, with these; and those behind the last line."""
    connection = http.client.HTTPConnection("127.0.0.1", live.port, timeout=60)
    payload = lines + json.dumps(body | {"stream": True}).encode()
    connection.request("POST", path, payload, {"Content-Type": "application/json", JOURNAL: f"{len(lines)} {SECRET}"})
    response = connection.getresponse()
    text = response.read()
    connection.close()
    assert response.status == 200, text
    parts = re.split(rb"(?m)^: (.*)\n\n", text)
    return parts[-1], list(zip(parts[:-1:2], parts[1::2], strict=True))


def steady(events: bytes) -> tuple[bytes, list[float], dict[bytes, bytes]]:
    """Choice by choice; the floats, and the counts of the last usage, apart. Without what no server can know: when
    another one completes the answer, what its session has, ids of calls that nobody has seen, and how many tokens have
    arrived when an event is written."""
    counts = re.compile(rb'"(completion|total|output)_tokens":(\d+)')
    found = re.sub(rb'"completed_at":\d+|"session":\{[^}]*\}|"call_[0-9a-f]+"', b"", events)
    choice = re.compile(rb'"choices":\[\{"index":(\d+)')
    in_order = sorted(counts.sub(b"", found).split(b"\n\n"), key=lambda each: choice.findall(each) or [b"9"])
    texts = re.split(rb"(-?\d+\.\d+(?:e-?\d+)?)", b"|".join(in_order))
    return b"".join(texts[::2]), [float(number) for number in texts[1::2]], dict(counts.findall(found))


@pytest.mark.parametrize("name", STREAMS)
def test_another_server_goes_on(journals: LiveServer, name: str) -> None:
    path, body = STREAMS[name]
    stream(journals, path, body)  # from now on the same tokens are cached
    rest, parts = stream(journals, path, body)
    assert rest == b"" and parts[-1][1] == b'{"end":true}' and parts[0][1].startswith(b'{"start":')
    whole, numbers, counted = steady(b"".join(events for events, _ in parts))
    places = {1, 2, 3, len(parts) // 2, len(parts) - 2, len(parts) - 1}
    for cut in places & set(range(1, len(parts))):  # an answer may be short
        lines = b"".join(line + b"\n" for _, line in parts[:cut])
        rest, later = stream(journals, path, body, lines)
        shown = b"".join(events for events, _ in parts[:cut]) + b"".join(events for events, _ in later)
        text, floats, counts = steady(shown)
        assert (text, counts) == (whole, counted), cut
        assert floats == pytest.approx(numbers, abs=1e-3)
        assert rest == b""


def test_prompts_of_one_request_are_drawn_apart(journals: LiveServer) -> None:
    body = TEXTS | {"prompt": [TEXT] * 3, "temperature": 1.5, "return_token_ids": True}
    _, parts = stream(journals, "/v1/completions", body)
    drawn: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for each in b"".join(events for events, _ in parts).split(b"\n\n"):
        if each.startswith(b"data: {"):
            [choice] = json.loads(each[6:])["choices"]
            drawn[choice["index"]] += choice["token_ids"]
    assert len({tuple(tokens) for tokens in drawn.values()}) == 3
