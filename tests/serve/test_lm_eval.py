"""lm-evaluation-harness against a server: loglikelihoods are those of transformers, cold and warm."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from quire.models.tokenizer import load_tokenizer
from tests.serve.live_server import LiveServer
from tests.serve.run_lm_eval import QUESTIONS, write_tasks

HARNESS = os.environ.get("QUIRE_LM_EVAL_PYTHON", sys.executable)
"""An interpreter that has it."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.executable == HARNESS and importlib.util.find_spec("lm_eval") is None,
        reason="lm_eval is not installed; QUIRE_LM_EVAL_PYTHON names an interpreter that has it",
    ),
]
DIFFERENCE = 2e-3  # of sums of log-probabilities in float32


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    write_tasks(folder)
    return folder


def evaluate(kind: str, url: str, tasks: Path, task: str) -> Any:
    command = (HARNESS, "-m", "tests.serve.run_lm_eval", kind, url, str(tasks), task)
    more = {"OPENAI_API_KEY": "none", "HF_HUB_OFFLINE": "1", "HF_HOME": str(tasks / "hub")}
    run = subprocess.run(command, env=os.environ | more, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


def test_loglikelihoods_are_those_of_transformers(server: LiveServer, tiny_model: Path, tasks: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_model), load_tokenizer(str(tiny_model))
    url = f"{server.summary['url']}/v1/completions"
    cold, warm = (evaluate("local-completions", url, tasks, "choice") for _ in range(2))
    num_asked = 0
    for arguments, answers in (*cold["samples"], *warm["samples"]):
        for (context, continuation), answer in zip(arguments, answers, strict=True):
            begun = len(tokenizer.encode(context))
            ids = torch.tensor(tokenizer.encode(context + continuation).tolist())
            with torch.inference_mode():
                found = torch.log_softmax(model(ids[None]).logits[0].float(), dim=-1)[begun - 1 : -1]
            chosen = found.gather(1, ids[begun:, None])[:, 0]
            logprob, greedy = answer[0] if isinstance(answer[0], list) else answer
            assert float(logprob) == pytest.approx(float(chosen.sum()), abs=DIFFERENCE)
            assert str(greedy) == str(bool((found.argmax(-1) == ids[begun:]).all()))
            num_asked += 1
    assert num_asked == 2 * sum(len(choices) for _, choices, _ in QUESTIONS)


def test_it_chats(server: LiveServer, tasks: Path) -> None:
    url = f"{server.summary['url']}/v1/chat/completions"
    found = evaluate("local-chat-completions", url, tasks, "generate")
    assert len(found["samples"]) == len(QUESTIONS)
    assert all(isinstance(answers[0][0], str) for _, answers in found["samples"])
