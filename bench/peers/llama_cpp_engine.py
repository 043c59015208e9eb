"""llama.cpp's server, behind the calls of `engines.py`: its scheduler and its cache of prefixes are in the server."""

from __future__ import annotations

import atexit
import http.client
import json
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

from bench.peers.engine import Engine

SERVER = Path(sys.prefix) / "bin" / "llama-server"
KINDS = {"float32": "f32", "bfloat16": "bf16"}
_READY_S = 120.0


class LlamaCpp(Engine):
    """Each request of a batch has a slot of its own, in which the prompt of the request before it is cached.

    By default there are four slots, and keys and values are float16. The slots reserve the memory that they need, which
    may be less than `kv_bytes`. Prompts are sent as ids. CPU time is that of the server and of the client here.
    """

    package = "gguf"

    def __init__(self) -> None:
        self._cached = 0

    def start(
        self, *, folder: str, dtype: str, threads: int, kv_bytes: int, max_model_len: int, max_requests: int
    ) -> None:
        """Write the model beside `folder`, and start the server. Raises RuntimeError if it ends at once."""
        from bench.peers.gguf_file import write

        file = Path(folder).with_name(f"{dtype}.gguf")
        if not file.exists():
            write(Path(folder), dtype, file)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        command = [SERVER, "--model", file, "--host", "127.0.0.1", "--port", self._port]
        command += ["--threads", threads, "--parallel", max_requests, "--ctx-size", max_requests * max_model_len]
        command += ["--cache-type-k", KINDS[dtype], "--cache-type-v", KINDS[dtype]]
        self._process = subprocess.Popen([str(each) for each in command], stdout=sys.stderr)
        atexit.register(self.close)
        self._pool = ThreadPoolExecutor(max_requests)
        until = time.monotonic() + _READY_S
        while not self._healthy():
            if self._process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"llama-server does not serve; status {self._process.poll()}")
            time.sleep(0.2)

    def run(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        """All requests at once, each over a connection of its own."""
        body = {"n_predict": new, "temperature": 0, "ignore_eos": True, "return_tokens": True, "cache_prompt": True}
        answers = list(self._pool.map(lambda prompt: self._ask(body | {"prompt": prompt}), prompts))
        self._cached += sum(answer["timings"]["cache_n"] for answer in answers)
        return [answer["tokens"] for answer in answers]

    def counters(self) -> dict[str, int]:
        """Prompt tokens found in the slots."""
        return {"hit_tokens": self._cached}

    def about(self) -> dict[str, str]:
        """What the server says of its version."""
        said = subprocess.run([SERVER, "--version"], capture_output=True, text=True, check=True)
        return {"llama.cpp": next(line for line in (said.stderr + said.stdout).splitlines() if "version" in line)}

    def close(self) -> None:
        """End the server."""
        self._process.kill()
        self._process.wait()
        self._pool.shutdown()

    def _healthy(self) -> bool:
        with closing(http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)) as connection:
            try:
                connection.request("GET", "/health")
                return connection.getresponse().status == 200
            except (OSError, http.client.HTTPException):
                return False

    def _ask(self, body: dict[str, Any]) -> dict[str, Any]:
        """Raises RuntimeError with what the server says if it refuses."""
        with closing(http.client.HTTPConnection("127.0.0.1", self._port)) as connection:
            connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read()
        if response.status != 200:
            raise RuntimeError(f"llama-server: {response.status}: {text[:300].decode()}")
        answer: dict[str, Any] = json.loads(text)
        return answer
