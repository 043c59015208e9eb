"""Documents that cannot rot: examples run, code blocks run, generated tables are the code's, links lead on."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest
from anthropic import Anthropic
from examples.demo.tiers import server_process
from openai import OpenAI

from tests.changes import in_turns
from tests.covering import each_of
from tests.examples.generated_sections import DOCUMENTS, ROOT, SECTIONS, document_with, generated
from tests.examples.shown_outputs import PLANS, output_of
from tests.programs import run_program

EXAMPLES = sorted((ROOT / "examples").glob("[0-9]*.py"))
EXPECTED = {
    "01_generate.py": ["prompt tokens were not computed again", "prompt tokens, 0 from the cache"],
    "02_prefix_reuse.py": [
        "48 from the cache",
        "tokens 0..47: hit",
        "tokens 48..67: new",
        "evicted: 1 page",
        "QUIRE-FIT-02",
        "audit passed",
    ],
    "03_serve_and_chat.py": ["prompt tokens, 0 from the cache", "HTTP 400, context_length_exceeded"],
    "05_plan.py": ["62 layers, 2 groups", "KV dtype fp8_e4m3 (fits", "2,048 pages for a request"],
    "06_engine_loop.py": ["1440 of 2236 tokens were cached; 44 pages were evicted", "12 answers are those of a model"],
    "07_tiers.py": ["240 from host memory", "240 from storage", "every time: True; damaged records: 0"],
    "08_eviction_policy.py": ["lru      33.6%", "deepest  52.4%"],
    "09_store.py": ["first engine: 0 of 242", "second engine: 240 of 242 from storage"],
    "10_a_part.py": ["engine:    {'anna': '29%', 'ben': '0%'}", "simulator: {'anna': '59%', 'ben': '44%'}"],
    "04_allocator.py": ["[10, 11, 12, 13, 14, 15, 16]", "QUIRE-PAGES-01", "QUIRE-PAGES-02"],
}
"""What each example must print. A new example needs a row."""

MOST_LINES = {"09_store.py": 130, "10_a_part.py": 59}


@pytest.fixture(scope="module")
def at_server() -> Iterator[Callable[[str], str]]:
    """Blocks with the address of a `quire serve` that has the bundled model they name."""
    with ExitStack() as servers:

        @cache
        def address(model: str) -> str:
            return servers.enter_context(server_process("--model", model, "--kv-memory", "16MiB"))[0]["url"]

        def placed(block: str) -> str:
            model = "quire-bundled-agent" if "quire-bundled-agent" in block else "quire-bundled"
            return block.replace("http://127.0.0.1:8000", address(model)) if "http://127.0.0.1:8000" in block else block

        yield placed


@pytest.mark.parametrize("name", PLANS)
def test_plans_shown_are_what_is_printed(name: str) -> None:
    """They depend on no machine."""
    text = document_with(f"output: {name}").read_text(encoding="utf-8")
    shown = text.split(f"<!-- output: {name} -->\n```text\n")[1].split("\n```")[0]
    assert shown == output_of(*PLANS[name].split())


@pytest.mark.parametrize("path", in_turns(EXAMPLES, 3, "examples/"), ids=lambda path: path.name)
def test_example_runs(path: Path) -> None:
    done = run_program(path, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    printed = done.stdout
    for text in EXPECTED[path.name]:
        assert text in printed
    if path.name in ("01_generate.py", "03_serve_and_chat.py"):
        assert re.search(r"[1-9]\d* from the cache", printed), "nothing was reused"


def test_examples_are_short_listed_in_order_and_use_public_names() -> None:
    index = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| \[(\w+\.py)\]", index, re.MULTILINE) == [path.name for path in EXAMPLES]
    for path in EXAMPLES:
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= MOST_LINES.get(path.name, 80), path.name
        assert "quire.testing" not in text


def test_the_readme_is_a_first_page() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len((ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").splitlines()) <= 350
    assert len(text.splitlines()) <= 200 and len(text.encode()) <= 12_000


def _blocks(language: str) -> list[str]:
    """The different blocks of a language, of all documents."""
    texts = (path.read_text(encoding="utf-8") for path in DOCUMENTS)
    pattern = re.compile(rf"^```{language}\n(.*?)^```", re.DOTALL | re.MULTILINE)
    return list(dict.fromkeys(block for text in texts for block in pattern.findall(text)))


@pytest.mark.parametrize("block", _blocks("python"), ids=lambda block: block.splitlines()[0])
def test_python_of_documents_runs(
    block: str,
    at_server: Callable[[str], str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What says how much came from the cache says nothing the first time, and something the last time."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(compile(at_server(block), "document", "exec"), names)
    for each in names.values():
        if isinstance(each, OpenAI | Anthropic):
            each.close()
    printed = capsys.readouterr().out
    assert printed
    if "from the cache" in block:
        reused = [int(number) for number in re.findall(r"(\d+) (?:of \d+ )?prompt tokens from the cache", printed)]
        assert reused[0] == 0 < reused[-1]


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("block", _blocks("bash"), ids=lambda block: block.split()[0])
def test_shell_of_documents_runs(block: str, at_server: Callable[[str], str]) -> None:
    """The first time nothing is in the cache, the second time nearly everything."""
    run = ["bash", "-c", at_server(block)]
    outputs = [subprocess.run(run, capture_output=True, text=True, timeout=60, check=True).stdout for _ in range(2)]
    first, second = (json.loads(output)["usage"] for output in outputs)
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["prompt_tokens_details"]["cached_tokens"] == (second["prompt_tokens"] - 1) // 16 * 16 > 0


@pytest.mark.parametrize("name", SECTIONS)
def test_generated_sections(name: str) -> None:
    """`python -m tests.examples.generated_sections` brings them up to date."""
    text = document_with(f"{name}: generated").read_text(encoding="utf-8")
    assert text == generated(name, text)


@each_of("document", DOCUMENTS)
def test_what_documents_name_exists(document: Path) -> None:
    """Relative links, and paths in code quotes: from the root, from src/quire, or from the document's folder."""
    text = document.read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:)([^)#\s]+)", text)
    assert not [link for link in links if not (document.parent / link).exists()]
    paths = re.findall(r"`([\w.-]+(?:/[\w.-]+)+\.(?:py|md|toml|safetensors)|(?:[\w.-]+/)+)`", text)
    places = (ROOT, ROOT / "src" / "quire", document.parent)
    assert not [path for path in paths if not any((place / path).exists() for place in places)]
