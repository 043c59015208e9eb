"""A server's answers to `quire explain`, over HTTP."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from quire.errors import InvalidInput, QuireError

_TIMEOUT_S = 30.0


class Server:
    """One live server, by its address, with or without `/v1` at the end."""

    def __init__(self, url: str, api_key: str | None) -> None:
        try:
            parts = urllib.parse.urlsplit(url)
        except ValueError:
            parts = urllib.parse.SplitResult("", "", "", "", "")
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise InvalidInput(f"'{url}' is not a server's address.", fix="write it as http://127.0.0.1:8000.")
        self._url = url.rstrip("/").removesuffix("/v1")
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}

    def explanation(self, request_id: str) -> Any:
        """What it knows of a request. Raises what `get` raises."""
        return self.get(f"/v1/cache/explain/{urllib.parse.quote(request_id, safe='')}")

    def get(self, path: str) -> Any:
        """The JSON at `path`. Raises the server's own error, or InvalidInput where nobody answers as Quire does."""
        request = urllib.request.Request(self._url + path, headers=self._headers)
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
                return json.load(response)
        except urllib.error.HTTPError as answer:
            raise _error_of(answer, self._url) from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise InvalidInput(f"{self._url} does not answer: {reason}.", fix="is `quire serve` running?") from None


def _error_of(answer: urllib.error.HTTPError, url: str) -> QuireError:
    try:
        body = json.load(answer)["error"]
        message, _, fix = str(body["message"]).partition(" Fix: ")
        error = QuireError(message, fix=fix)
        error.code = str(body["code"])
    except (ValueError, KeyError, TypeError):
        return InvalidInput(f"{url} answered {answer.code}, which is not an answer of Quire.", fix="check --url.")
    return error
