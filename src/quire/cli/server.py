"""A server, asked over HTTP, and its audit."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
from collections.abc import Mapping
from typing import Any

from rich.text import Text

from quire.cli.report import Report
from quire.errors import AuditFailure, InvalidInput, QuireError
from quire.serve.config import KeyField
from quire.settings.setting import setting

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
        """The JSON at `path`, or the answer to a body. Raises the server's own error, or InvalidInput without one."""
        import urllib.request

        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, self._headers)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                return json.load(response)
        except urllib.error.HTTPError as answer:
            raise _error_of(answer, self.url) from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise InvalidInput(f"{self.url} does not answer: {reason}.", fix="is `quire serve` running?") from None


def _error_of(answer: urllib.error.HTTPError, url: str) -> QuireError:
    try:
        body = json.load(answer)["error"]
        message, _, fix = str(body["message"]).partition(" Fix: ")
        error = QuireError(message, fix=fix)
        error.code = str(body["code"])
    except (ValueError, KeyError, TypeError):
        return InvalidInput(f"{url} answered {answer.code}, which is not an answer of Quire.", fix="check --url.")
    return error


def audit(where: ServerAddress) -> Report:
    """Audit the cache of a live server, beside its steps, and show what its canary has found. Exit codes: 0 all is
    well, 2 bad input, 4 an invariant is broken.

    [dim]Example:[/dim] quire audit --url http://127.0.0.1:8000
    """
    server = Server(where.url or DEFAULT_URL, where.api_key)
    found = server.ask("/v1/cache/audit")
    if faults := [*found["faults"], *([found["violation"]] if found["violation"] else [])]:
        raise AuditFailure("; ".join(faults) + ".")
    scope = "the whole cache, unchanged meanwhile" if found["whole"] else "beside running requests"
    if not found["ended"]:
        scope = "not to its end: the server is busy"
    lines = [
        f"{server.url}: {found['pages']:,} pages and {found['nodes']:,} edges audited in {found['pieces']:,} pieces, "
        f"the longest {found['longest_s'] * 1e3:.1f} ms: {scope}."
    ]
    if (canary := found["canary"]) is None:
        lines.append("canary: off.")
    else:
        lines.append(
            f"canary: {canary['stamped_pages']:,} pages stamped, {canary['waiting_pages']:,} wait; "
            f"{canary['sweeps']:,} sweeps, the last in {canary['sweep_seconds']:.1f} s; "
            f"{canary['found_pages']:,} damaged."
        )
    lines += [
        f"  page {each['page']} of group '{each['group']}': {each['kind']} after step {each['good_step']}, seen in "
        f"step {each['step']}, written by {each['wrote_request']}; "
        f"computed again: {', '.join(each['readers']) or 'none'}"
        for each in found["findings"]
    ]
    return Report(found, lambda: [Text("\n".join(lines))])
