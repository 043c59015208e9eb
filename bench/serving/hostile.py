"""Hostile grammars: how long each waits for an error or a first token, and the gaps between tokens of others beside it.

    python -m bench.serving.hostile                four clients stream; each grammar comes as often as it is answered
    python -m bench.serving.hostile --threads 1    on a machine that does other things
    python -m bench.serving.hostile --toy          one of each, in seconds

The real server runs with the bundled model. Gaps are measured alone, first and last, and beside each grammar. An answer
is an error of the client, or text; anything else ends the program.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
from bench.harness import machine, new_parser, save

CLIENTS = 4
TEXT = "It was a fine evening, and the whole party had walked out. "


def _json(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def _nested(levels: int) -> str:
    """JSON of arrays in each other; Python's own writer would not write it."""
    inner = '{"type":"array","items":' * levels + "{}" + "}" * levels
    return '{"response_format":{"type":"json_schema","json_schema":{"name":"x","schema":' + inner + "}}}"


def _references(count: int) -> dict[str, Any]:
    """Objects that are in each other by references."""
    defs: dict[str, Any] = {"d0": {"type": "string"}}
    for at in range(1, count):
        defs[f"d{at}"] = {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{at - 1}"}}, "required": ["a"]}
    return _json({"$defs": defs, "$ref": f"#/$defs/d{count - 1}"})


def _guided(kind: str, value: str) -> dict[str, Any]:
    return {"structured_outputs": {kind: value}}


def attacks() -> Iterator[tuple[str, dict[str, Any] | str]]:
    """Each with the fields of a chat that it adds."""
    yield "a schema of 1 MB", _json({"enum": ["x" * 1000] * 1000})
    yield "arrays, 10,000 deep", _nested(10_000)
    yield "1,000 references in each other", _references(1000)
    yield "3,000 optional properties", _json({"type": "object", "properties": {f"p{at}": {} for at in range(3000)}})
    yield "400 optional properties", _json({"type": "object", "properties": {f"p{at}": {} for at in range(400)}})
    yield "10,000 values of an enum", _json({"enum": [f"v{at}" for at in range(10_000)]})
    yield "a string of 1,000,000,000 characters", _json({"type": "string", "minLength": 10**9})
    yield "repetitions in repetitions", _guided("regex", "(((a{1,1000}b?){1,1000}){1,1000}){1,1000}")
    yield "5,000 options and 5,000 letters", _guided("regex", "(a?){5000}a{5000}")
    yield "2^24 states", _guided("regex", "(a|b)*a(a|b){24}")
    yield "131,072 letters", _guided("regex", "a" * 131_072)
    yield "20,000 groups", _guided("regex", "(ab?)" * 20_000)
    yield (
        "1,000 expressions at once",
        _guided("grammar", "start: A\nA: " + " & ".join(f"/.*{at}.*/" for at in range(1000))),
    )
    yield (
        "2^60 words",
        _guided("grammar", "start: r0\n" + "\n".join(f"r{at}: r{at + 1} r{at + 1}" for at in range(60)) + '\nr60: "c"'),
    )
    yield "an ambiguous grammar", _guided("grammar", 'start: s\ns: s s s | s s | "a"')
    yield "a grammar that allows no token", _guided("grammar", 'start: start "a"')


async def ask(client: httpx.AsyncClient, fields: dict[str, Any] | str, turn: int) -> dict[str, Any]:
    """The status and the beginning of an answer, and when it came. Each turn is a new prompt."""
    body = fields if isinstance(fields, str) else json.dumps(fields)
    more = {"messages": [{"role": "user", "content": f"{turn}"}], "max_tokens": 20, "stream": True}
    body = body[:-1] + "," + json.dumps(more)[1:]
    headers = {"Content-Type": "application/json"}
    began, text, seconds = time.perf_counter(), "", 0.0
    async with client.stream("POST", "/v1/chat/completions", content=body, headers=headers) as answer:
        async for part in answer.aiter_text():
            if not text:
                text, seconds = part, time.perf_counter() - began
    return {"status": answer.status_code, "seconds": round(seconds, 3), "text": text[:200]}


async def stream(client: httpx.AsyncClient, gaps: list[float], ends: asyncio.Event) -> None:
    """Ask again and again, and note the time between tokens."""
    body = {"prompt": TEXT, "max_tokens": 400, "stream": True, "ignore_eos": True}
    while not ends.is_set():
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            last = 0.0
            async for line in answer.aiter_lines():
                now = time.perf_counter()
                if line.startswith("data: {") and last:
                    gaps.append((now - last) * 1e3)
                last = now if line.startswith("data: {") else last
                if ends.is_set():
                    break


@contextlib.asynccontextmanager
async def _streaming(client: httpx.AsyncClient, gaps: list[float]) -> Any:
    ends = asyncio.Event()
    tasks = [asyncio.create_task(stream(client, gaps, ends)) for _ in range(CLIENTS)]
    yield
    ends.set()
    await asyncio.gather(*tasks)


def _quantiles(gaps: Sequence[float]) -> dict[str, float]:
    ordered = sorted(gaps)
    found = {f"p{share}": ordered[len(ordered) * share // 100] for share in (50, 95, 99)}
    return {name: round(value, 2) for name, value in {**found, "most": ordered[-1]}.items()}


async def measure(url: str, seconds: float) -> dict[str, Any]:
    """Gaps alone, and for each attack its answers and the gaps beside it."""
    rows: dict[str, Any] = {}
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        await ask(client, _guided("regex", "a"), 0)  # the tokenizer is loaded now
        for name, fields in [("", None), *attacks(), ("", None)]:
            gaps: list[float] = []
            answers = []
            async with _streaming(client, gaps):
                until, turn = time.perf_counter() + seconds, 0
                await asyncio.sleep(0.3 if fields else max(seconds, 3))
                while fields and (not turn or time.perf_counter() < until):
                    answers.append(await ask(client, fields, turn))
                    turn += 1
                while len(gaps) < 20:
                    await asyncio.sleep(0.1)
            if not fields:
                rows.setdefault("alone", []).append(_quantiles(gaps))
                continue
            worst = max(answers, key=lambda each: each["seconds"])
            rows[name] = {
                "first_s": answers[0]["seconds"],
                "median_s": round(statistics.median(each["seconds"] for each in answers), 3),
                "most_s": worst["seconds"],
                "answers": len(answers),
                "statuses": sorted({each["status"] for each in answers}),
                "text": answers[0]["text"],
                "gaps": _quantiles(gaps),
            }
            bad = [each for each in answers if each["status"] >= 500 and each["status"] != 503]
            assert not bad, (name, bad[0])
            print(f"{name:40} {rows[name]}", file=sys.stderr, flush=True)
    return rows


def main() -> None:
    """Measure, show and write."""
    parser = new_parser("Send hostile grammars to a server with clients.")
    parser.add_argument("--seconds", type=float, default=4, help="of each attack")
    parser.add_argument("--threads", type=int, help="of the model")
    options = parser.parse_args()
    if options.toy:
        options.seconds = 0.5
    command = [sys.executable, "-m", "quire", "serve", "--port", "0", "--json", "--kv-memory", "64MiB"]
    command += ["--threads", str(options.threads)] if options.threads else []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            assert server.stdout is not None
            found = asyncio.run(measure(json.loads(server.stdout.readline())["url"], options.seconds))
        finally:
            server.terminate()
    for name, row in found.items():
        if name == "alone":
            print(f"alone: {row}")
        else:
            print(
                f"{name:40} {row['statuses']} first {row['first_s']:.2f} s, median {row['median_s']:.2f}, most "
                f"{row['most_s']:.2f}; gaps {row['gaps']}"
            )
    save(options.json, {**machine(), "clients": CLIENTS, "rows": found})


if __name__ == "__main__":
    main()
