"""What a start loads: a process has nothing that it does not use, and computes the same without it."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch

from quire.client.llm import LLM
from quire.engine.config import engine_config
from quire.engine.core import EngineCore
from quire.models.hf import load_model
from quire.scheduler.sampling_params import SamplingParams
from tests.changes import slow_unless_changed
from tests.routing.live_router import wait_until

PROMPT = list(range(40, 90))


def printed(script: str) -> str:
    return subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("names", ["", "LLM", "AsyncEngine, SamplingParams"])
def test_importing_quire_loads_no_torch(names: str) -> None:
    script = f"from quire import {names}" if names else "import quire"
    assert printed(f"{script}\nimport sys; print({{'torch', 'transformers'}} & set(sys.modules))") == "set()\n"


@pytest.mark.skipif(sys.platform != "linux", reason="another OpenMP")
@pytest.mark.parametrize(
    ("given", "spins"), [({}, "5000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "passive"}, "0")]
)
def test_threads_of_an_engine_soon_sleep(given: dict[str, str], spins: str) -> None:
    """libgomp says what it has read. What the user has set stays."""
    script = "from quire.engine.lean_imports import with_short_spins; with_short_spins(); import torch"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GOMP", "OMP"))}
    environment = kept | given | {"OMP_DISPLAY_ENV": "verbose"}
    said = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, env=environment)
    assert f"GOMP_SPINCOUNT = '{spins}'" in said.stderr


def test_settings_that_are_handed_over_need_no_validators() -> None:
    script = """
import pickle, sys
config = pickle.loads(bytes.fromhex(sys.argv[1]))
print(config.model_name, type(config).__pydantic_complete__)
"""
    command = [sys.executable, "-c", script, pickle.dumps(engine_config()).hex()]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "quire-bundled False\n"


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


@slow_unless_changed("src/quire/engine/lean_imports.py", "src/quire/client/", "src/quire/serve/", "constraints.txt")
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


_SITE = """
import gc, os, signal, sys
def dump(*_):
    full = gc.get_stats()[2]["collections"]
    collector = f"collector:{gc.isenabled()}:{gc.get_freeze_count() > 100_000}:{full <= 3}"
    with open(f"{os.environ['FOUND']}/{os.getpid()}", "w") as file:
        file.write(" ".join([collector, *(name for name, module in sys.modules.items() if module is not None)]))
signal.signal(signal.SIGUSR1, dump)
"""


def _loaded_when_ready(folder: Path) -> tuple[set[str], set[str]]:
    """The modules that the server's and the engine's process of `quire serve` have when /health answers."""
    (folder / "sitecustomize.py").write_text(_SITE)
    path = os.pathsep.join((str(folder), os.environ.get("PYTHONPATH", "")))
    command = [sys.executable, "-m", "quire", "serve", "--port", "0", "--kv-memory", "4MiB", "--json"]
    environment = os.environ | {"PYTHONPATH": path, "FOUND": str(folder)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None and json.loads(server.stdout.readline())["url"]
            children = psutil.Process(server.pid).children(recursive=True)
            [engine] = [child.pid for child in children if "--multiprocessing-fork" in child.cmdline()]
            found = []
            for pid in (server.pid, engine):
                os.kill(pid, signal.SIGUSR1)
                file = folder / str(pid)
                wait_until(partial(_has_text, file))
                found.append(set(file.read_text().split()))
        finally:
            server.terminate()
    return found[0], found[1]


def _has_text(file: Path) -> bool:
    return file.exists() and bool(file.read_text())


@slow_unless_changed("src/quire/engine/lean_imports.py", "src/quire/client/", "src/quire/serve/", "constraints.txt")
def test_processes_of_a_server_have_what_they_use(tmp_path: Path) -> None:
    server, engine = _loaded_when_ready(tmp_path)
    assert {"fastapi", "tokenizers", "transformers"} <= server and {"torch", "transformers"} <= engine
    assert not {name for name in server if name.split(".")[0] in ("torch", "sympy")}
    assert not engine & {"sympy", "torch.distributed.tensor", "fastapi", "typer", "quire.cli.app", "quire.serve.app"}
    for modules in (server, engine):
        # Garbage is collected, but was not while modules were imported, and what they made is not looked at again.
        assert "collector:True:True:True" in modules
        assert not {name for name in modules if name.startswith("transformers.models.bert")}


def test_names_of_models_are_found_when_they_are_used() -> None:
    script = """
from quire.engine.lean_imports import without_torch
with without_torch():
    from quire.models.tokenizer import load_tokenizer
    import transformers, transformers.models
    before = [len(module.__all__) for module in (transformers, transformers.models)]
    print(transformers.BertConfig().model_type, transformers.models.GPT2Config().model_type)
    print([len(module.__all__) > count for module, count in zip((transformers, transformers.models), before)])
    print(hasattr(transformers, "NoSuchModel"), hasattr(transformers, "AutoTokenizer"))
"""
    assert printed(script).splitlines() == ["bert gpt2", "[True, True]", "False True"]


def test_an_engine_on_a_loaded_model_computes_with_as_many_threads_as_asked_for() -> None:
    before = torch.get_num_threads()
    try:
        model = load_model("quire-bundled", check=False)
        EngineCore(engine_config(threads=3, kv_memory="4MiB"), model=model).close()
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@slow_unless_changed("src/quire/engine/lean_imports.py", "src/quire/client/", "src/quire/serve/", "constraints.txt")
def test_a_transformers_of_another_shape_is_imported_as_it_is() -> None:
    script = """
import sys
from importlib import metadata
from quire.engine import lean_imports
def fails(spec):
    sys.modules["transformers"] = object()
    raise AttributeError("_LazyModule")
lean_imports._import_listed = fails
with lean_imports.without_torch():
    import transformers
    print(transformers.BertConfig().model_type, transformers.__version__ == metadata.version("transformers"))
"""
    assert printed(script) == "bert True\n"
