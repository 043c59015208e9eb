"""The demo's server: the real `quire serve`, as a child process on a free port."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quire.errors import QuireError

STOP_S = 20.0


@contextmanager
def running_server(*options: str) -> Iterator[dict[str, Any]]:
    """The server's start-up summary (`quire serve --json`); it is stopped at the end. Raises what it could not do."""
    with server_process(*options) as (summary, _):
        yield summary


@contextmanager
def server_process(*options: str) -> Iterator[tuple[dict[str, Any], subprocess.Popen[str]]]:
    """The same, with its process, for whoever wants to end it otherwise."""
    with tempfile.TemporaryFile("w+") as log:
        command = [sys.executable, "-m", "quire", "serve", "--port", "0", "--json", "--drain", "2", *options]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, stdin=subprocess.DEVNULL)
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                process.wait(STOP_S)
                log.seek(0)
                raise start_error(log.read(), process.returncode)
            yield json.loads(line), process
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()


def start_error(log: str, exit_code: int) -> QuireError:
    """What the server said before it ended."""
    lines = log.strip().splitlines() or [f"the server ended with code {exit_code} and no message."]
    try:
        said = json.loads(lines[-1])["error"]
    except (ValueError, KeyError, TypeError):
        said = {"message": lines[-1]}
    error = QuireError(said["message"], fix=said.get("fix", ""))
    error.code, error.exit_code = said.get("code", error.code), max(exit_code, 1)
    return error


def pool_bytes(model: Path, *, num_tokens: int, page_size: int) -> int:
    """KV memory in float32 for `num_tokens` tokens of `model`, by arithmetic on its config.json."""
    from dataclasses import replace

    from quire.spec.layout import DType
    from quire.spec.model import ModelSpec

    spec = replace(ModelSpec.from_config(read_config(model)), dtype=DType.FLOAT32)
    num_pages = num_tokens // page_size + 1  # one more: the padding frame
    return num_pages * sum(group.layout.bytes_per_frame for group in spec.groups(page_size))


def read_config(model: Path) -> dict[str, Any]:
    """The model's config.json. Raises QuireError when it is not there."""
    try:
        config: dict[str, Any] = json.loads((model / "config.json").read_text())
    except OSError:
        raise QuireError(
            f"there is no model in {model}.", fix="install the package again, or train it (training/README.md)."
        ) from None
    return config
