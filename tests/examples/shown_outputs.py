"""The outputs of commands that documents show. `python -m tests.examples.shown_outputs` runs them and pastes anew.

A block is marked by a comment before it, `<!-- output: NAME -->`. Only the plans are
compared by a test; the others depend on the machine.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from functools import partial

from tests.examples.generated_sections import ROOT, document_with

ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT / "src"), "COLUMNS": "80"}
QUIRE = (sys.executable, "-m", "quire")
FUZZ = (sys.executable, "-m", "tests.fuzz")
PORT = 8000

PLANS = {
    "plan-gpu": "plan llama-3.1-70b --gpu h100-80gb --tp 4 --context 32k",
    "plan-advice": "plan qwen3-32b --gpu h100-80gb --context 32k --concurrency 16",
    "plan-sweep": "plan gemma-3-27b --kv-memory 40GiB --sweep context",
    "plan-compare": "plan --compare deepseek-v3.2 deepseek-v3.2,kv-dtype=fp8 --kv-memory 60GiB --tp 8",
    "plan-hisparse": "plan deepseek-v3.2 --gpu h200-141gb --tp 8 --context 128k --hisparse {}",
}
"""Outputs that do not depend on the machine: a test compares these."""


GUIDES = ("guide-simulator", "guide-explain", "guide-fuzz")
"""Guides whose blocks show a command and what it prints."""


def output_of(*arguments: str, program: tuple[str, ...] = QUIRE) -> str:
    """What `quire ARGUMENTS`, or another program, prints, on both streams."""
    done = subprocess.run(
        (*program, *arguments), cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return "\n".join(line.rstrip() for line in done.stdout.strip().splitlines())


def fuzz_found() -> str:
    """What fuzzing says of code that loses duplicates."""
    code = "with injected('duplicates-leak'): app(['--level', 'cache', '--seed', '3', '--jobs', '1'])"
    imports = "from tests.fuzz.__main__ import app; from tests.mutants import injected"
    return output_of(program=(sys.executable, "-c", f"{imports}\n{code}"))


def draw(picture: str, *arguments: str) -> None:
    """The picture of a replay or sweep, where documents show it."""
    command = (*QUIRE, *arguments, "--json")
    found = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, check=True).stdout
    subprocess.run((sys.executable, "examples/chart.py", picture), cwd=ROOT, input=found, check=True)


def sweep() -> str:
    """The sweep, with its picture."""
    draw("docs/images/plan-sweep.svg", *PLANS["plan-sweep"].split())
    return output_of(*PLANS["plan-sweep"].split())


def doctor() -> str:
    """Without the rows that say more about the author's machine than about Quire."""
    text = output_of("doctor")
    return text[text.index("\nCPU ") + 1 :]


def kv_error(names: str) -> str:
    """What `bench/engine/kv_error.py` says of these KV dtypes."""
    program = (sys.executable, "bench/engine/kv_error.py", "--kv-dtype", names)
    done = subprocess.run(program, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode in (0, 4), done.returncode  # 4: a format costs too much, which is said
    return "\n".join(line.rstrip() for line in done.stdout.strip().splitlines())


def kv_error_of_all() -> str:
    """What one format after the other costs: the table at the end."""
    text = kv_error("fp8_e4m3,fp8_e5m2,mxfp8,nvfp4,fp4_e2m1")
    return text[text.index("\nKV dtype ") + 1 :]


def replay() -> str:
    """The comparison, with its picture."""
    pools = ("--pool-tokens", "1/16,1/8,1/4", "--max-running", "8")
    command = ("replay", "chat:requests=2000", "--policy", "lru,s3fifo,density", *pools)
    draw("docs/images/replay.svg", *command)
    text = output_of(*command)
    return text[text.index("workload chat") :]


def replay_hisparse() -> str:
    """A load that hot buffers are for."""
    text = output_of(
        *("replay", "over-commit:pool=370000,prompt=32768,output=1024", "-m", "deepseek-v3.2", "--gpu", "h200-141gb"),
        *("--tp", "8", "--policy", "density", "--pool-tokens", "112k", "--hisparse", "{}"),
    )
    return text[text.index("workload over-commit") :]


def serve() -> str:
    """What the server says when it is ready, without what it says at its end."""
    server = subprocess.Popen((*QUIRE, "serve"), cwd=ROOT, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    try:
        _wait_until_healthy()
    finally:
        server.terminate()
    said = server.communicate()[1].strip()
    return said[: said.rindex("╯") + 1]


def example_of_tiers() -> str:
    """What the example prints, without the plan."""
    program = (sys.executable, "examples/07_tiers.py")
    done = subprocess.run(program, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.strip()


def _wait_until_healthy() -> None:
    for _ in range(240):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health").close()
            return
        except OSError:
            time.sleep(0.5)
    raise TimeoutError("the server did not start")


OUTPUTS: dict[str, Callable[[], str]] = {
    "demo": lambda: output_of(program=(sys.executable, "-m", "examples.demo")),
    "doctor": doctor,
    "kv-error": lambda: kv_error("fp8_e4m3,nvfp4"),
    "kv-error-all": kv_error_of_all,
    **{name: partial(output_of, *command.split()) for name, command in PLANS.items()},
    "plan-sweep": sweep,
    "serve": serve,
    "tiers": example_of_tiers,
    "generate": lambda: output_of("generate", "--chat", "Tell me about Emma.", "--max-tokens", "60"),
    "replay": replay,
    "replay-hisparse": replay_hisparse,
    "fuzz": lambda: output_of("--seconds", "10", "--seed", "1", program=FUZZ),
    "fuzz-found": fuzz_found,
    "refusal": lambda: output_of("generate", "It was a fine evening.", "--max-tokens", "100", "--kv-memory", "100KiB"),
}


def paste(name: str) -> None:
    """Replace the block of this name, in the document that has it, by what its command prints now."""
    document = document_with(f"output: {name}")
    block = re.compile(rf"(<!-- output: {name} -->\n```text\n).*?(\n```)", re.DOTALL)
    before, *found = block.split(document.read_text(encoding="utf-8"))
    assert len(found) == 3, f"{document} has no block '{name}'"
    document.write_text(before + found[0] + OUTPUTS[name]() + found[1] + found[2], encoding="utf-8")


def paste_guide(name: str) -> None:
    """Run the commands of a guide that stand above their output in one block, and replace the output."""
    document = ROOT / "docs" / "guides" / f"{name.removeprefix('guide-')}.md"

    def run(block: re.Match[str]) -> str:
        program = QUIRE if block["program"] == "quire" else FUZZ
        return f"{block['opening']}{output_of(*block['arguments'].split(), program=program)}\n```"

    blocks = re.compile(
        r"(?P<opening>^```(?:console)?\n\$ (?P<program>quire(?= (?:replay|explain) (?!--url))|python -m tests.fuzz)"
        r" (?P<arguments>[^\n]*)\n)"
        r"(?!```).*?^```$",
        re.DOTALL | re.MULTILINE,
    )
    document.write_text(blocks.sub(run, document.read_text(encoding="utf-8")), encoding="utf-8")
    if name == "guide-simulator":
        pools = ("--pool-tokens", "1/16,1/8,1/4,1/2")
        draw("docs/images/replay-sessions.svg", "replay", "sessions", "--policy", "lru,density,s3fifo", *pools)


if __name__ == "__main__":
    for chosen in sys.argv[1:] or [*OUTPUTS, *GUIDES]:
        if chosen in GUIDES:
            paste_guide(chosen)
        else:
            paste(chosen)
