"""A server as `quire explain` and the demo ask it, over HTTP."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any

from quire.errors import InvalidInput, QuireError

_TIMEOUT_S = 60.0


class Server:
    """One live server, by its address, with or without `/v1` at the end."""

    def __init__(self, url: str, api_key: str | None) -> None:
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

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The JSON at `path`, or the answer to a body. Raises the server's own error, or InvalidInput without one."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, self._headers)
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
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
