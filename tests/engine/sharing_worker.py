"""A process that runs one engine after the other, as it is told: a job of JSON a line in, an answer a line out.

A job has `prompts`, `settings` of the engine, `seed` of the model's weights and `salt`. An answer has the tokens and
the tiers' counters. A job that is `endless` computes new prompts of that number of tokens until the process is killed,
and says after each how many records it has stored.
"""

from __future__ import annotations

import json
import sys
from itertools import count
from typing import Any

import numpy as np

from quire.models.hf import LoadedModel
from tests.engine.running import run
from tests.engine.tiered import GREEDY, closed, settle, small
from tests.tiny_models import VOCAB_SIZE, build_tiny

NAME = "llama_gqa"
COUNTERS = ("archived_frames", "fetched_frames", "loaded_frames", "storage_hit_tokens", "failed_moves", "defects")


def answer(job: dict[str, Any]) -> dict[str, Any]:
    """What one engine says."""
    model = LoadedModel(build_tiny(NAME, head_dim=32, seed=job["seed"]), name=NAME)
    core = small(model, **job["settings"])
    if job["endless"]:
        rng = np.random.default_rng(1)
        for turn in count():
            run(core, [rng.integers(1, VOCAB_SIZE - 1, job["endless"]).tolist()], GREEDY, f"e{turn}", salt=job["salt"])
            if turn % 3 == 0:
                settle(core)
            tiers = core.statistics()["tiers"]
            print(json.dumps({name: tiers[name] for name in COUNTERS}), flush=True)
    tokens = run(core, job["prompts"], GREEDY, salt=job["salt"])
    found = closed(core)
    return {"tokens": tokens, **{name: found[name] for name in COUNTERS}}


def main() -> None:
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
