"""A process in a control group: an engine over tiers that is asked for too much, for what fits, or runs under load.

    python -m tests.engine.soaking refuse FOLDER
    python -m tests.engine.soaking soak FOLDER STORAGE SECONDS

`FOLDER` is the control group to join, or `-` for none. Prints what happened as one line of JSON.
"""

from __future__ import annotations

import json
import os
import random
import re
import sys
import time
from typing import Any

import numpy as np
import psutil

from quire.engine.config import engine_config
from quire.engine.core import EngineCore
from quire.engine.messages import EngineRequest
from quire.errors import HostMemoryError
from quire.models.hf import LoadedModel
from quire.scheduler.sampling_params import SamplingParams
from tests.tiny_models import VOCAB_SIZE, build_tiny

SESSIONS = 40
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def engine(**settings: Any) -> EngineCore:
    model = LoadedModel(build_tiny("llama_gqa", head_dim=32), name="llama_gqa")
    return EngineCore(engine_config(model="llama_gqa", page_size=16, **settings), model=model)


def refuse() -> dict[str, Any]:
    """What 8 GiB are answered with, and whether what the answer names starts and runs."""
    try:
        engine(kv_memory="16MiB", host_memory="8GiB").close()
    except HostMemoryError as error:
        said = str(error)
    else:
        return {"said": ""}
    core = engine(kv_memory="16MiB", host_memory=re.findall(r"--host-memory (\w+)", said)[0])
    tokens = complete(core, list(range(1, 100)))
    assert core.tiers is not None
    num_bytes = core.tiers.host.num_bytes
    core.close()
    return {"said": said, "tokens": tokens, "num_bytes": num_bytes}


def soak(storage: str, seconds: float) -> dict[str, Any]:
    """Sessions that come back after others, for so long. Resident bytes now and then, of the second half: the least,
    the most, and by how much they grow in a second, as a line through them has it."""
    core = engine(kv_memory="2MiB", storage=storage, storage_size="256MiB", load="always", max_model_len=512)
    drawn = random.Random(0)
    sessions: list[list[int]] = [[] for _ in range(SESSIONS)]
    seen: list[tuple[float, int]] = []
    process, begin, turns = psutil.Process(), time.monotonic(), 0
    while (now := time.monotonic() - begin) < seconds:
        at = drawn.randrange(SESSIONS)
        if len(sessions[at]) > 400:
            sessions[at] = []
        sessions[at] += [drawn.randrange(1, VOCAB_SIZE - 1) for _ in range(drawn.randrange(10, 60))]
        sessions[at] += complete(core, sessions[at], name=f"t{turns}")
        turns += 1
        if now > seconds / 2 and (not seen or now - seen[-1][0] > min(0.5, seconds / 40)):
            seen.append((now, process.memory_info().rss))
    core.audit()
    found = core.statistics()
    core.close()
    times, sizes = np.array(seen).T
    slope = float(np.polyfit(times, sizes, 1)[0])
    counters = {name: found["tiers"][name] for name in ("saved_bytes", "loaded_bytes", "archived_bytes")}
    sizes_of = {"least": int(sizes.min()), "most": int(sizes.max()), "slope": slope, "samples": len(seen)}
    return {"turns": turns, **sizes_of, **counters, "failed": found["failed_requests"]}


def complete(core: EngineCore, prompt: list[int], name: str = "r") -> list[int]:
    """Greedy tokens of one prompt."""
    core.add(EngineRequest(request_id=name, prompt=np.array(prompt, dtype=np.int32).tobytes(), params=GREEDY))
    tokens: list[int] = []
    while core.has_work():
        for output in core.step():
            tokens += output.token_ids
    return tokens


if __name__ == "__main__":
    if sys.argv[2] != "-":
        with open(f"{sys.argv[2]}/cgroup.procs", "w") as group:
            group.write(str(os.getpid()))
    print(json.dumps(refuse() if sys.argv[1] == "refuse" else soak(sys.argv[3], float(sys.argv[4]))))
