"""`quire fleet` in a child process, for tests."""

from __future__ import annotations

import json
import os
import signal
import time
import uuid
from typing import Any

import httpx
import psutil

from tests.serve.live_server import LiveServer

SMALL = ("--kv-memory", "32MiB", "--dtype", "float32", "--max-model-len", "1024")
TEXT = "It was a fine autumn evening, and the whole party had walked out to see the new plantation. "
MARK = "QUIRE_TESTS_FLEET"


class LiveFleet(LiveServer):
    """On a free port, with a Ray of its own; ready when constructed. `rows` are those of its processes."""

    def __init__(self, *options: str) -> None:
        self.mark = os.environ[MARK] = uuid.uuid4().hex
        try:
            super().__init__("quire", "fleet", "--port", "0", "--json", "--drain", "5", *SMALL, *options)
        finally:
            del os.environ[MARK]  # else the fork server of tests would have it
        assert self.process.stdout is not None
        self.rows = [self.summary]
        while self.rows[-1]["role"] != "router":
            self.rows.append(json.loads(self.process.stdout.readline()))
        self.summary = self.rows[-1]
        self.url = self.summary["url"]
        self.port = int(self.url.rpartition(":")[2])

    def processes(self) -> list[psutil.Process]:
        """All that it has started and that run, Ray's included."""
        return marked(self.mark)

    def replicas(self, deployment: str) -> list[psutil.Process]:
        """Ray's processes of a deployment."""
        return [each for each in self.processes() if each.name().startswith("ray::Serve") and _of(each, deployment)]

    def health(self) -> dict[str, dict[str, Any]]:
        """Of each engine."""
        return {row["name"]: row for row in self.request("/health")[1]["processes"]}

    def end(self) -> list[psutil.Process]:
        """By a signal. Returns what is left of it."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(90) == 0, self.log()
        return left(self.mark)

    def close(self) -> None:
        super().close()
        for process in left(self.mark):
            process.kill()


def _of(process: psutil.Process, deployment: str) -> bool:
    return deployment in " ".join(process.cmdline())


def marked(mark: str) -> list[psutil.Process]:
    """The processes whose environment has the mark, but for this one."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                found.append(process)
        except psutil.Error:
            continue
    return [process for process in found if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def left(mark: str, seconds: float = 15.0) -> list[psutil.Process]:
    """Those that have not ended so many seconds later."""
    until = time.monotonic() + seconds
    while (found := marked(mark)) and time.monotonic() < until:
        time.sleep(0.2)
    return found


def body(number: int, **more: Any) -> dict[str, Any]:
    """A request whose answer is always the same."""
    prompt = f"Chapter {number}. " + TEXT * (6 + number % 3)
    return {"prompt": prompt, "max_tokens": 24, "temperature": 0, "return_token_ids": True} | more


def streamed(url: str, given: dict[str, Any]) -> tuple[list[int], str]:
    """The tokens of a stream, and how it ended: with [DONE], an error event, or silently."""
    found, end = list[int](), "silently"
    with httpx.stream("POST", f"{url}/v1/completions", json=given | {"stream": True}, timeout=120) as answer:
        for line in answer.iter_lines():
            said = line.removeprefix("data: ")
            if not said.startswith("{"):
                end = said or end
            elif "error" in (event := json.loads(said)):
                end = str(event["error"])
            elif event["choices"]:
                found += event["choices"][0].get("token_ids") or []
    return found, end
