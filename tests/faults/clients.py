"""Clients with deadlines. Each of them knows its answer, and says what it got instead."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

DEADLINE_S = 30.0
"""Of a request whose client is patient."""

SLACK_S = 8.0
"""After its deadline a client must have been told; machines under test are busy."""

_SHARED = "A page is a fixed number of tokens, and a frame is the memory of a page. The table says which is where. "
MAX_TOKENS = 24
NUM_PROMPTS = 24


def body(number: int) -> dict[str, Any]:
    """The request of this number: prompts that share beginnings, some greedy and some drawn with a seed."""
    prompt = _SHARED * (1 + number % 3) + f"Chapter {number}. " + _SHARED * (number % 2)
    sampling = {"temperature": 0} if number % 2 else {"temperature": 0.8, "seed": number}
    return {"prompt": prompt, "max_tokens": MAX_TOKENS, "ignore_eos": True, "return_token_ids": True, **sampling}


@dataclass(slots=True)
class Told:
    """What a client got: `kind` is answered, refused, failed (a stream that ended with an error), left, closed (without
    an answer), or silent."""

    kind: str = "silent"
    status: int = 0
    tokens: list[int] = field(default_factory=list)
    error: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


class Client(threading.Thread):
    """One request. Use `told` after `join`."""

    def __init__(
        self,
        port: int,
        number: int,
        *,
        streams: bool,
        deadline_s: float,
        leaves_after_s: float | None,
        sent: threading.Event,
        token: threading.Event,
    ) -> None:
        super().__init__(daemon=True)
        self.number = number
        self.deadline_s = deadline_s
        self.told = Told()
        self._port = port
        self._streams = streams
        self._leaves_after_s = leaves_after_s
        self._sent = sent
        self._token = token

    def run(self) -> None:
        began = time.monotonic()
        try:
            self._ask()
        except TimeoutError:
            self.told.kind = "silent" if self._leaves_after_s is None else "left"
        except OSError:
            self.told.kind = "closed"
        self.told.seconds = time.monotonic() - began
        self._sent.set()
        self._token.set()

    def _ask(self) -> None:
        payload = json.dumps(body(self.number) | {"stream": self._streams, "timeout_s": self.deadline_s}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(payload)}\r\n"
        waits_s = self._leaves_after_s or self.deadline_s + SLACK_S + 5
        with socket.create_connection(("127.0.0.1", self._port), timeout=waits_s) as connection:
            connection.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + payload)
            self._sent.set()
            received, until = b"", time.monotonic() + waits_s
            while part := connection.recv(65536):
                received += part
                if b"token_ids" in part:
                    self._token.set()
                connection.settimeout(max(0.001, until - time.monotonic()))
        self._read(received)

    def _read(self, received: bytes) -> None:
        told = self.told
        top, _, rest = received.partition(b"\r\n\r\n")
        told.status = int(top.split()[1]) if top else 0
        told.kind = "closed"
        if told.status == 200 and self._streams:
            for line in rest.split(b"\n"):
                if line.strip() == b"data: [DONE]":
                    told.kind = "failed" if told.error else "answered"
                elif line.startswith(b"data: ") and line.strip().endswith(b"}"):
                    event = json.loads(line[6:])
                    told.error = event.get("error", told.error)
                    for choice in event.get("choices", ()):
                        told.tokens += choice.get("token_ids") or ()
            return
        length = next(
            (int(each[15:]) for each in top.lower().split(b"\r\n") if each.startswith(b"content-length:")), -1
        )
        if len(rest) < length or not rest:
            return
        answer = json.loads(rest)
        if told.status == 200:
            told.kind, told.tokens = "answered", answer["choices"][0]["token_ids"]
        else:
            told.kind, told.error = "refused", answer["error"]


class Load:
    """The clients of a run. `sent` is set when one has sent its request, `token` when one has a token or has ended."""

    def __init__(self, port: int, kind: str, draw: random.Random) -> None:
        self.sent, self.token = threading.Event(), threading.Event()
        self.clients = []
        for index in range(1 if kind == "one" else 6):
            leaves = kind == "leaving" and index % 2
            hurries = kind == "impatient" and index % 2
            self.clients.append(
                Client(
                    port,
                    draw.randrange(NUM_PROMPTS),
                    streams=draw.random() < 0.6,
                    deadline_s=draw.uniform(0.05, 1.0) if hurries else DEADLINE_S,
                    leaves_after_s=draw.uniform(0.01, 0.4) if leaves else None,
                    sent=self.sent,
                    token=self.token,
                )
            )

    def start(self) -> None:
        for client in self.clients:
            client.start()

    def join(self) -> None:
        for client in self.clients:
            client.join(client.deadline_s + 2 * SLACK_S)


def wrong(client: Client, expected: Sequence[int], *, may_close: bool, behind_router: bool = False) -> str | None:
    """What a client may not have been told. `may_close`: the process that it was connected to has ended.
    `behind_router`: a router may say that no server of a role can answer."""
    told = client.told
    shown = f"client of prompt {client.number}: {told}"
    if client.is_alive() or told.kind == "silent":
        return f"no answer and no error by its deadline of {client.deadline_s:.2f} s; {shown}"
    if told.kind == "left":
        return None
    if told.kind == "answered" and list(told.tokens) != list(expected):
        return f"wrong tokens, not {list(expected)}; {shown}"
    if list(told.tokens) != list(expected[: len(told.tokens)]):
        return f"wrong tokens before an error, not {list(expected)}; {shown}"
    if told.kind == "closed":
        return None if may_close else f"its connection was closed without an answer; {shown}"
    if told.kind in ("refused", "failed"):
        code = told.error.get("code", "")
        allowed = {"QUIRE-ENGINE-01", "QUIRE-SERVE-04"} | ({"QUIRE-SERVE-02"} if behind_router else set())
        if code not in allowed or (told.kind == "refused" and told.status not in (408, 503)):
            return f"an error that is not one of {sorted(allowed)}; {shown}"
    if told.seconds > client.deadline_s + SLACK_S:
        return f"it was told {told.seconds:.1f} s after it asked, with a deadline of {client.deadline_s:.2f} s; {shown}"
    return None
