"""What a start loads: a process has nothing that it does not use, and computes the same without it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from quire.engine.config import engine_config
from quire.engine.core import EngineCore
from quire.engine.llm import LLM
from quire.models.hf import load_model
from quire.scheduler.sampling_params import SamplingParams

PROMPT = list(range(40, 90))


def printed(script: str) -> str:
    return subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("names", ["", "LLM", "AsyncEngine, SamplingParams"])
def test_importing_quire_loads_no_torch(names: str) -> None:
    script = f"from quire import {names}" if names else "import quire"
    assert printed(f"{script}\nimport sys; print({{'torch', 'transformers'}} & set(sys.modules))") == "set()\n"


def test_a_server_tokenises_without_torch() -> None:
    script = """
import sys
from quire.engine.lean_imports import without_torch
with without_torch():
    from quire.models.tokenizer import load_tokenizer
    tokenizer = load_tokenizer("quire-bundled")
    print(tokenizer.decode(tokenizer.apply_chat_template([{"role": "user", "content": "Bath"}])))
print([name for name in sys.modules if name.split(".")[0] == "torch"])
import torch
"""
    said, loaded = printed(script).rsplit("\n", 2)[:2]
    assert "Bath" in said and loaded == "[]"


def test_an_engine_process_draws_the_same_without_the_compiler() -> None:
    script = f"""
import sys
from quire.engine.lean_imports import without_compiler
without_compiler("cpu")
from quire import LLM, SamplingParams
llm = LLM(kv_memory="4MiB", show_plan=False)
print(llm.generate({PROMPT}, SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].token_ids)
print([name for name in ("torch._dynamo.convert_frame", "torch.distributed.tensor") if name in sys.modules])
import torch
print(torch.compile(lambda x: x + 1, backend="eager")(torch.zeros(2)).tolist())
"""
    llm = LLM(kv_memory="4MiB", show_plan=False)
    [output] = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=8))
    assert printed(script).splitlines() == [str(output.outputs[0].token_ids), "[]", "[1.0, 1.0]"]


def test_an_engine_on_a_loaded_model_computes_with_as_many_threads_as_asked_for() -> None:
    before = torch.get_num_threads()
    try:
        model = load_model("quire-bundled", check=False)
        EngineCore(engine_config(threads=3, kv_memory="4MiB"), model=model).close()
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
