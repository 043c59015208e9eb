"""What clients of a fleet see when its processes are killed: 32 that stream, and a kill -9 again and again.

python -m bench.fleet.kills            20 kills, in turns of an engine, its server, and the actor that watches it
python -m bench.fleet.kills --toy      three kills, 8 clients

All requests are the same, so each answer has to be that of an undisturbed stream, with its usage. Engines
compute in float32, in which a prompt's tokens are those of its steps. A fleet is whole again when the router has as
many healthy engines as before, none of them the one that was hit.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections import Counter
from typing import Any

import httpx
import psutil
from bench.fleet.overhead import Running
from bench.harness import machine, new_parser, save

_WORDS = ("fleet", "--port", "0", "--replicas", "3", "--drain", "10", "--dtype", "float32")
_PROMPT = "It was a fine autumn evening, and the whole party had walked out."
_SAMPLING = {"max_tokens": 100, "temperature": 0.8, "seed": 3, "ignore_eos": True}
_REQUEST = {"prompt": _PROMPT, "stream": True, "stream_options": {"include_usage": True}} | _SAMPLING


def answer(url: str) -> tuple[str, str, str]:
    """The text of a stream, its usage and its end: [DONE], the error, or nothing."""
    text, usage, end = "", "", "silent"
    try:
        with httpx.stream("POST", f"{url}/v1/completions", json=_REQUEST, timeout=120) as said:
            for line in said.iter_lines():
                event = line.removeprefix("data: ")
                if not event.startswith("{"):
                    end = event or end
                    continue
                found = json.loads(event)
                text += "".join(choice["text"] for choice in found.get("choices", ()))
                counts = found.get("usage") or {}
                usage = str(counts.get("completion_tokens", "")) or usage
                end = str(found["error"]["message"]) if "error" in found else end
    except httpx.TransportError as error:
        end = type(error).__name__
    return text, usage, end


def hit(url: str, what: str) -> str:
    """Kill a process of the first healthy engine. Returns the engine's name."""
    row = next(row for row in health(url) if row["healthy"])
    server = psutil.Process(row["pid"])
    engine = max(server.children(recursive=True), key=lambda process: process.memory_info().rss)
    parent = server.parent()
    assert parent is not None
    {"engine": engine, "server": server, "actor": parent}[what].kill()
    return str(row["name"])


def health(url: str) -> list[dict[str, Any]]:
    """A row for each engine."""
    rows: list[dict[str, Any]] = httpx.get(f"{url}/health").json()["processes"]
    return rows


def main() -> None:
    """Kill, wait until the fleet is whole, and again; then print what clients saw."""
    parser = new_parser(__doc__ or "", toy="three kills")
    options = parser.parse_args()
    kills, clients = (3, 8) if options.toy else (20, 32)
    running = Running(_WORDS)
    expected = answer(running.url)
    seen, stop = Counter[str](), threading.Event()

    def stream() -> None:
        while not stop.is_set():
            found = answer(running.url)
            if found != expected and found[2] == "[DONE]":
                print(found, flush=True)
            seen["same" if found == expected else "other" if found[2] == "[DONE]" else found[2]] += 1

    threads = [threading.Thread(target=stream) for _ in range(clients)]
    for thread in threads:
        thread.start()
    recovery: dict[str, list[float]] = {"engine": [], "server": [], "actor": []}
    for number in range(kills):
        time.sleep(2)
        what = list(recovery)[number % 3]
        name, began = hit(running.url, what), time.monotonic()
        while True:
            rows = health(running.url)
            if len(rows) == 3 and all(row["healthy"] and row["name"] != name for row in rows):
                break
            time.sleep(0.1)
        recovery[what].append(time.monotonic() - began)
        print(f"{what} of {name}: whole after {recovery[what][-1]:.1f} s; streams {dict(seen)}", flush=True)
    stop.set()
    for thread in threads:
        thread.join()
    running.end()
    medians = {what: statistics.median(each) for what, each in recovery.items()}
    print(f"{sum(seen.values())} streams: {dict(seen)}; whole again after {medians} s")
    save(options.json, {"machine": machine(), "streams": seen, "recovery_s": recovery})


if __name__ == "__main__":
    main()
