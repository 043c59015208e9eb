"""The servers behind the router, and which of them a request should go to."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import xxhash

_KEY_BYTES = 1024
_SHARE, _SPARE = 1.25, 2  # a server may have so much of the mean load, and so many requests more


@dataclass(slots=True, eq=False, kw_only=True)
class Upstream:
    """One server behind the router. Its `role` is prefill, decode, or engine for one without a role. With a `key` it is
    sent that in place of the client's. `listens` is where one that computes prompts for others is asked."""

    name: str
    role: str
    url: str
    key: str | None = field(default=None, repr=False)
    secret: str | None = field(default=None, repr=False)  # tells it that its router asks
    listens: str | None = None
    events: tuple[str, str] | None = None  # where it publishes what is cached, and answers who missed some
    pid: int | None = None
    failing_since_s: float | None = field(default_factory=time.monotonic)  # None while it is healthy
    reason: str = "has not started"
    is_broken: bool = False  # its server answers that it is unhealthy
    in_flight: int = 0
    num_waiting: float = 0.0  # tokens to compute before the first ones of its requests, as far as the router knows
    num_requests: int = 0
    num_failures: int = 0

    def works(self) -> None:
        """The engine answers."""
        self.failing_since_s, self.reason, self.is_broken = None, "", False

    def fails(self, reason: str, *, is_broken: bool = False) -> None:
        """The engine gets no requests until it works again."""
        self.failing_since_s = self.failing_since_s or time.monotonic()
        self.reason, self.is_broken = reason, is_broken

    @property
    def is_healthy(self) -> bool:
        """Whether requests may be sent to it."""
        return self.failing_since_s is None

    def to_dict(self) -> dict[str, Any]:
        """For clients."""
        why = {} if self.is_healthy else {"reason": f"{self.name} {self.reason}"}
        return {
            "role": self.role,
            "name": self.name,
            "pid": self.pid,
            "url": self.url,
            "healthy": self.is_healthy,
        } | why


class _MessageStart(msgspec.Struct):
    role: msgspec.Raw = msgspec.Raw()
    content: msgspec.Raw = msgspec.Raw()


class _BodyStart(msgspec.Struct):
    prompt: msgspec.Raw = msgspec.Raw()
    prompt_token_ids: msgspec.Raw = msgspec.Raw()
    messages: list[_MessageStart] = []
    instructions: msgspec.Raw = msgspec.Raw()
    input: list[_MessageStart | str] | str = []
    cache_salt: msgspec.Raw = msgspec.Raw()
    session_id: msgspec.Raw = msgspec.Raw()


_BODY = msgspec.json.Decoder(_BodyStart)


def _beginning(found: _BodyStart) -> bytes:
    """What requests with the same beginning have in common: the first bytes of the prompt, or of each message up to the
    first of the user, so that all turns of a conversation have the same; and the salt."""
    parts = [found.cache_salt, found.prompt or found.prompt_token_ids, found.instructions]
    given = [found.input] if isinstance(found.input, str) else found.input
    for message in found.messages or given:
        if isinstance(message, str):
            parts.append(msgspec.Raw(message.encode(errors="replace")))
            continue
        parts.append(message.content)
        if bytes(message.role) == b'"user"':
            break
    return b"\0".join(bytes(part)[:_KEY_BYTES] for part in parts)


def preferred(upstreams: Iterable[Upstream], key: bytes) -> list[Upstream]:
    """The healthy ones, best first: by the highest hash of key and name, and those above their share last."""
    healthy = [upstream for upstream in upstreams if upstream.is_healthy]
    if not healthy:
        return []
    most = _SPARE + _SHARE * (sum(upstream.in_flight for upstream in healthy) + 1) / len(healthy)
    healthy.sort(key=lambda upstream: _rank(upstream, key), reverse=True)
    return sorted(healthy, key=lambda upstream: upstream.in_flight + 1 > most)


def _rank(upstream: Upstream, key: bytes) -> int:
    return xxhash.xxh3_64_intdigest(upstream.name.encode() + b"\0" + key)


@dataclass(frozen=True, slots=True)
class Preference:
    """Which servers a request should go to: those of requests that begin with `key`. A turn of a session `stays` with
    the others."""

    key: bytes
    stays: bool = False

    def order(self, upstreams: Iterable[Upstream]) -> list[Upstream]:
        """The healthy ones, best first."""
        return preferred(upstreams, self.key)

    def cost(self, upstream: Upstream) -> float:
        """How many tokens of the prompt the server has to compute, as far as it is known."""
        return 0.0

    def why(self, upstream: Upstream, upstreams: Iterable[Upstream]) -> dict[str, Any]:
        """Why it was the first of these: others that begin the same went there, or where they went is too busy."""
        first = max((each for each in upstreams if each.is_healthy), key=lambda each: _rank(each, self.key))
        return {"why": "share" if upstream is not first else "session" if self.stays else "beginning"}


def preference_of(body: bytes, header: str = "") -> Preference:
    """That of a request with this body, by its beginning. Turns of a session, which the body or this header names,
    have its name in common instead."""
    try:
        found = _BODY.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return Preference(b"")  # any server refuses it
    if named := _session(found, header):
        return Preference(bytes(found.cache_salt)[:_KEY_BYTES] + b"\0" + named[:_KEY_BYTES], stays=True)
    return Preference(_beginning(found))


def _session(found: _BodyStart, header: str) -> bytes:
    """The session that a body or a header names, as JSON has it; or nothing."""
    named, name = bytes(found.session_id), header.partition(";")[0].strip()
    return named if named.startswith(b'"') else json.dumps(name).encode() if name else b""
