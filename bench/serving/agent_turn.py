"""An agent's turns: a prompt of 85 KB with 25 tools, then its second turn, against its uncached tokens.

python -m bench.serving.agent_turn                                  a server of the bundled model for agents
python -m bench.serving.agent_turn --url http://127.0.0.1:8000      a server that runs
python -m bench.serving.agent_turn --toy                            a prompt of 20 KB

The prompt is the documentation of this repository: a system prompt, and tools whose descriptions are pieces of it.
The second turn has the first answer too, and a message of 500 characters. Four times are measured: the first turn,
cold by a salt of its own; the second; as many other tokens as that does not find cached, sent as ids behind the same
cached ones; and these alone, which attend to nothing before them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
from bench.harness import ROOT, machine, new_parser, save

TOOLS = 25
MODEL = "quire-bundled-agent"


def documentation() -> str:
    """The pages of the repository, one after the other."""
    pages = [ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs" / "guides").glob("*.md"))]
    return "\n".join(page.read_text(encoding="utf-8") for page in pages)


def first_request(size: int) -> dict[str, Any]:
    """Messages and tools of about `size` bytes of JSON."""
    text = documentation()
    piece = size * 2 // 3 // TOOLS - 400  # without names and schemas
    tools = []
    for at in range(TOOLS):
        schema = {
            "type": "object",
            "properties": {
                "path": {"type": "string", "description": "The absolute path of the file"},
                "limit": {"type": "integer", "description": "The most lines to return"},
            },
            "required": ["path"],
        }
        description = text[at * piece : (at + 1) * piece]
        function = {"name": f"tool_{at}", "description": description, "parameters": schema}
        tools.append({"type": "function", "function": function})
    system = text[TOOLS * piece :][: size - len(json.dumps(tools))]
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "Read /src/main.py with tool_3."}]
    return {"messages": messages, "tools": tools}


@dataclass
class Answer:
    """What a streamed answer said, and when its first token came, in milliseconds after the request."""

    message: dict[str, Any]
    first_ms: float
    prompt: int
    cached: int


def ask(client: httpx.Client, path: str, body: dict[str, Any]) -> Answer:
    """Send a request and read its stream to the end."""
    body = body | {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0}
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    calls: dict[int, dict[str, Any]] = {}
    began, first, usage = time.perf_counter(), 0.0, {}
    with client.stream("POST", path, json=body) as answer:
        if answer.status_code != 200:
            raise RuntimeError(f"{path}: {answer.status_code} {answer.read().decode()[:500]}")
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            first = first or time.perf_counter()
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                delta = choice.get("delta", {})
                message["content"] += delta.get("content") or ""
                for part in delta.get("tool_calls") or []:
                    new = {"id": part.get("id"), "type": "function", "function": {"name": "", "arguments": ""}}
                    call = calls.setdefault(part["index"], new)
                    for key, value in part["function"].items():
                        call["function"][key] += value
    if calls:
        message["tool_calls"] = list(calls.values())
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return Answer(message, (first - began) * 1e3, usage["prompt_tokens"], cached)


def follow_up(answer: Answer) -> list[dict[str, Any]]:
    """The messages of the second turn: the answer, and the results of its calls or another question."""
    more = documentation()[-500:]
    calls = answer.message.get("tool_calls", [])
    results = [{"role": "tool", "tool_call_id": call["id"], "content": more} for call in calls]
    return [answer.message, *(results or [{"role": "user", "content": more}])]


def round_of(client: httpx.Client, model: str, first: dict[str, Any], salt: str) -> dict[str, Any]:
    """One round: the first turn, the second, and the uncached tokens of that behind the cached ones and alone."""
    common = {"model": model, "max_tokens": 32, "cache_salt": salt}
    cold = ask(client, "/v1/chat/completions", first | common)
    turn = first | common | {"messages": [*first["messages"], *follow_up(cold)]}
    warm = ask(client, "/v1/chat/completions", turn)
    others = list(range(100, 100 + warm.prompt - warm.cached))
    ids = client.post("/tokenize", json={key: turn[key] for key in ("model", "messages", "tools")}).json()["tokens"]
    behind = ask(client, "/v1/completions", common | {"prompt": ids[: warm.cached] + others, "max_tokens": 1})
    alone = ask(client, "/v1/completions", common | {"prompt": others, "max_tokens": 1})
    return {
        "prompt_tokens": cold.prompt,
        "first_turn_ms": round(cold.first_ms, 1),
        "second_prompt_tokens": warm.prompt,
        "second_cached_tokens": warm.cached,
        "second_turn_ms": round(warm.first_ms, 1),
        "behind_cached_tokens": behind.cached,
        "uncached_behind_ms": round(behind.first_ms, 1),
        "uncached_alone_ms": round(alone.first_ms, 1),
        "calls": len(cold.message.get("tool_calls", [])),
    }


@contextlib.contextmanager
def server(options: argparse.Namespace) -> Iterator[str]:
    """The URL of the server to measure; one is started if none is named."""
    if options.url:
        yield options.url
        return
    command = [sys.executable, "-m", "quire", "serve", "--port", "0", "--json", "--model", options.model]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()


def main() -> int:
    """Measure, show and write."""
    parser = new_parser("An agent's first and second turn.")
    parser.add_argument("--url", help="a server that runs")
    parser.add_argument("--model", default=MODEL, help="the model's name")
    parser.add_argument("--size", type=int, default=85_000, help="bytes of messages and tools")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if options.toy:
        options.size, options.rounds = 20_000, 1
    first = first_request(options.size)
    with server(options) as url, httpx.Client(base_url=url, timeout=600) as client:
        ask(client, "/v1/completions", {"model": options.model, "prompt": "Hello", "max_tokens": 1})
        salt = str(time.time())
        rounds = [round_of(client, options.model, first, f"{salt}-{at}") for at in range(options.rounds)]
    middle = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
    middle["second_to_behind"] = round(middle["second_turn_ms"] / middle["uncached_behind_ms"], 2)
    middle["second_to_alone"] = round(middle["second_turn_ms"] / middle["uncached_alone_ms"], 2)
    result = {**machine(), "model": options.model, "bytes": len(json.dumps(first)), "median": middle, "rounds": rounds}
    for key, value in {"bytes": result["bytes"], **middle}.items():
        print(f"{key:24} {value:>12,}")
    save(options.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
