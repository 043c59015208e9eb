"""A live server, asked over HTTP: its audit, and the size of its memory."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from quire.cli.report import Report, plain_table
from quire.errors import AuditFailure, InvalidInput, QuireError
from quire.plan.budget import format_bytes
from quire.serve.config import KeyField
from quire.settings.setting import Bytes, Settings, setting

DEFAULT_URL = "http://127.0.0.1:8000"
_TIMEOUT_S = 60.0


class ServerAddress(KeyField):
    """How to reach a live server."""

    url: str | None = setting(
        None, f"Ask this server: {DEFAULT_URL}.", group="Server", otherwise=f"{DEFAULT_URL}; none to explain"
    )


class Server:
    """One live server, by its address, with or without `/v1` at the end."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        try:
            parts = urllib.parse.urlsplit(url)
        except ValueError:
            parts = urllib.parse.SplitResult("", "", "", "", "")
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise InvalidInput(f"'{url}' is not a server's address.", fix="write it as http://127.0.0.1:8000.")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def ask(self, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float = _TIMEOUT_S) -> Any:
        """The object at `path`, or the answer to a body. Raises the server's own error, or InvalidInput without one."""
        import http.client
        import urllib.request

        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, self._headers)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                found = json.load(response)
        except urllib.error.HTTPError as answer:
            raise _error_of(answer, self.url) from None
        except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise InvalidInput(f"{self.url} does not answer: {reason}.", fix="is `quire serve` running?") from None
        if not isinstance(found, dict) or not found:
            raise _foreign(self.url, 200)
        return found


def _error_of(answer: urllib.error.HTTPError, url: str) -> QuireError:
    try:
        body = json.load(answer)["error"]
        message, _, fix = str(body["message"]).partition(" Fix: ")
        error = QuireError(message, fix=fix)
        error.code = str(body["code"])
    except (ValueError, KeyError, TypeError):
        return _foreign(url, answer.code)
    return error


def _foreign(url: str, status: int) -> QuireError:
    return InvalidInput(f"{url} answered {status}, which is not an answer of Quire.", fix="check --url.")


def answers_in(found: Mapping[str, Any], url: str) -> list[tuple[str, Any]]:
    """What a server said, with its address; or each server behind a router, with its name. Raises InvalidInput if one
    of these did not answer."""
    rows = found.get("processes", [{"name": url, "status": 200, "answer": found}])
    for each in rows:
        if each["status"] != 200:
            why = each["answer"]["error"]["message"]
            raise InvalidInput(f"{each['name']} answered {each['status']}: {why}", fix="ask again when it works.")
    return [(each["name"], each["answer"]) for each in rows]


def audit(where: ServerAddress) -> Report:
    """Audit the cache of a live server, or of each behind a router, beside its steps, and show what its canary has
    found. Exit codes: 0 all is well, 2 bad input, 4 an invariant is broken.

    [dim]Example:[/dim] quire audit --url http://127.0.0.1:8000
    """
    server = Server(where.url or DEFAULT_URL, where.api_key)
    found = server.ask("/v1/cache/audit")
    parts = answers_in(found, server.url)
    wrong = [
        f"{name}: {fault}" if len(parts) > 1 else fault
        for name, each in parts
        for fault in (*each["faults"], *filter(None, [each["violation"]]))
    ]
    if wrong:
        raise AuditFailure("; ".join(wrong) + ".")
    return Report(found, lambda: [Text("\n".join(line for part in parts for line in _audited(*part)))])


def _audited(name: str, found: Mapping[str, Any]) -> Iterator[str]:
    scope = "the whole cache, unchanged meanwhile" if found["whole"] else "beside running requests"
    if not found["ended"]:
        scope = "not to its end: the server is busy"
    yield (
        f"{name}: {found['pages']:,} pages and {found['nodes']:,} edges audited in {found['pieces']:,} pieces, "
        f"the longest {found['longest_s'] * 1e3:.1f} ms: {scope}."
    )
    if (canary := found.get("canary")) is None:
        yield "canary: off."
    else:
        yield (
            f"canary: {canary['stamped_pages']:,} pages stamped, {canary['waiting_pages']:,} wait; "
            f"{canary['sweeps']:,} sweeps, the last in {canary['sweep_seconds']:.1f} s; "
            f"{canary['found_pages']:,} damaged."
        )
    for each in found["findings"]:
        yield (
            f"  page {each['page']} of group '{each['group']}': {each['kind']} after step {each['good_step']}, seen in "
            f"step {each['step']}, written by {each['wrote_request']}; "
            f"computed again: {', '.join(each['readers']) or 'none'}"
        )


# -- the size of its memory

_ROUTES = {"release": "/v1/cache/memory/release", "resume": "/v1/cache/memory/resume", "resize": "/v1/cache/resize"}


class AskedMemory(Settings):
    """What the memory should be."""

    resize: Bytes | None = setting(None, "Bytes of KV memory: 8GiB.", otherwise="as it is")
    resize_host: Bytes | None = setting(None, "Bytes of host memory for pages.", otherwise="as it is")
    release: bool = setting(False, "Give all KV memory back; the weights stay, and requests wait.", option="--release")
    resume: bool = setting(False, "Have the KV memory again.", option="--resume")
    preempt: bool = setting(False, "With --resize: running requests give their memory back and go on later.")
    wait: float = setting(10.0, "Seconds to wait until it is reached.", ge=0, le=600)


def memory(where: ServerAddress, asked: AskedMemory) -> Report:
    """Show the size of a live server's memory, or make it smaller or larger between the sizes of its --kv-memory, such
    as 8GiB..24GiB. Exit codes: 0 done, also if running requests still hold a part; 2 bad input, or it cannot be.

    [dim]Example:[/dim] quire memory --resize 8GiB --wait 30

    [dim]Example:[/dim] quire memory --release --json
    """
    server = Server(where.url or DEFAULT_URL, where.api_key)
    sizes = {"device_bytes": asked.resize, "host_bytes": asked.resize_host}
    given = {name: size for name, size in sizes.items() if size is not None}
    verbs = [verb for verb in _ROUTES if verb != "resize" and getattr(asked, verb)] + ["resize"] * bool(given)
    if len(verbs) > 1:
        raise InvalidInput(f"--{verbs[0]} and --{verbs[1]} were given.", fix="give one of them.")
    if asked.preempt and not given:
        raise InvalidInput("--preempt says how to make the memory smaller.", fix="add --resize 8GiB, or leave it out.")
    if not verbs:
        found = server.ask("/v1/cache/memory")
    else:
        more: dict[str, Any] = {**given, "preempt": asked.preempt} if given else {}
        found = server.ask(_ROUTES[verbs[0]], {"wait_s": asked.wait, **more}, timeout_s=asked.wait + 60)
    parts = answers_in(found, server.url)
    return Report(found, lambda: [part for name, each in parts for part in _shown(name, each)])


def _shown(name: str, found: dict[str, Any]) -> list[RenderableType]:
    return [Text(f"{name}: {_state(found)}"), _sizes(found), *_holders(found)]


def _state(found: dict[str, Any]) -> str:
    state = (
        "the KV memory is released, and requests wait until --resume, which brings the last size"
        if found["released"]
        else "the KV memory is in use"
    )
    left = f"{found['evicted_pages']:,} pages have left the device, {found['moved_frames']:,} frames have moved"
    changed = f"; {left}" if found["evicted_pages"] or found["moved_frames"] else ""
    return f"{state}{changed}" + ("" if found["done"] else "; it goes on as requests and copies to lower tiers end")


def _sizes(found: dict[str, Any]) -> Any:
    heads = ("memory", "asked", "now", "least", "most")
    tiers = [(tier, found[tier]) for tier in ("device", "host") if found[tier] is not None]
    body = [
        (tier, *(format_bytes(each[name]) for name in ("asked", "reached", "least", "most"))) for tier, each in tiers
    ]
    return plain_table(heads, body)


def _holders(found: dict[str, Any]) -> list[Any]:
    sizes = ("num_bytes", "most_bytes")
    body = [(each["name"], *(format_bytes(each[name]) for name in sizes)) for each in found["holders"]]
    return [plain_table(("requests that hold memory", "now", "at their end"), body)] if body else []
