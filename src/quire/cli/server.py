"""A server, asked over HTTP, and one in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import urllib.error
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from quire.errors import InvalidInput, QuireError, start_error
from quire.serve.config import KeyField
from quire.settings.setting import setting

DEFAULT_URL = "http://127.0.0.1:8000"
_TIMEOUT_S, _STOP_S = 60.0, 20.0


class ServerAddress(KeyField):
    """How to reach a live server."""

    url: str | None = setting(
        None, f"Ask this server: {DEFAULT_URL}.", group="Server", otherwise=f"{DEFAULT_URL} to audit, none to explain"
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

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The JSON at `path`, or the answer to a body. Raises the server's own error, or InvalidInput without one."""
        import urllib.request

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


@contextmanager
def server_process(*options: str) -> Iterator[tuple[dict[str, Any], subprocess.Popen[str]]]:
    """`quire serve` on a free port, without variables `QUIRE_NAME`: its summary and its process, stopped at the end."""
    command = [sys.executable, "-m", "quire", "serve", "--port", "0", "--json", "--drain", "2", *options]
    env = {name: value for name, value in os.environ.items() if not name.startswith("QUIRE_")}
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "text": True}
    with tempfile.TemporaryFile("w+") as log, subprocess.Popen(command, env=env, stderr=log, **pipes) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if not line:
                process.wait(_STOP_S)
                log.seek(0)
                raise start_error(log.read(), process.returncode)
            yield json.loads(line), process
        finally:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
