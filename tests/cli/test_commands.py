"""The commands: help, results for people and for machines, and how they fail."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from quire import __version__
from quire.engine.config import EngineConfig
from quire.errors import UnsupportedModel
from quire.settings.setting import default_of
from quire.spec.bundled import BUNDLED_MODELS
from tests.cli.conftest import Run

COMMANDS = ("serve", "up", "generate", "plan", "replay", "explain", "doctor")
NO_TORCH = """
import sys
from quire.cli import main
sys.argv = ["quire", *{arguments!r}]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
heavy = {{"torch", "transformers", "zmq", "fastapi", "numpy"}} & set(sys.modules)
assert not heavy, heavy
"""


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"]] + [[name, "--help"] for name in ("serve", "up", "plan", "replay", "explain")],
)
def test_looking_is_cheap(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", NO_TORCH.format(arguments=arguments)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["serve", "plan", "replay", "fleet"])
def test_a_command_imports_no_other_one(name: str) -> None:
    program = (
        "import sys\nfrom quire.cli.app import app\nimport typer.main\n"
        f"assert typer.main.get_command(app).commands[{name!r}].name == {name!r}\n"
        "print(*({'serve', 'plan', 'replay', 'fleet'} & {each.removeprefix('quire.cli.') for each in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [name]


def test_python_m_quire_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "quire", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"quire {__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_an_example_and_json(run: Run, command: str) -> None:
    text = run(command, "--help", env={"COLUMNS": "200"}).output
    assert f"Example: quire {command}" in text
    assert "--json" in text
    assert "--debug" not in text


def test_generate(run: Run, tiny_model: Path) -> None:
    options = ("--model", tiny_model, "--kv-memory", "1MiB", "--max-tokens", 8)
    plain = run("generate", "Hello", *options)
    assert plain.exit_code == 0, plain.stderr
    found = json.loads(run("generate", "-", *options, "--json", input="Hello").stdout)
    assert found["prompt"] == "Hello"
    assert len(found["outputs"][0]["token_ids"]) == 8
    assert found["outputs"][0].keys().isdisjoint(("prompt", "pooled"))
    assert {"hit_tokens", "reasons"} <= found["outputs"][0]["explanation"].keys()
    assert all("" not in reason.values() for reason in found["outputs"][0]["explanation"]["reasons"])
    assert plain.stdout == found["outputs"][0]["text"] + "\n"
    chat = json.loads(run("generate", "Hello", *options, "--chat", "--json").stdout)
    assert len(chat["prompt_token_ids"]) == len("<user>Hello\n<assistant>")


@pytest.mark.parametrize("name", BUNDLED_MODELS)
def test_bundled_models_go_by_name(run: Run, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planned and run under one name, which wins over a folder called so."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).mkdir()
    planned = json.loads(run("plan", name, "--kv-memory", "4MiB", "--json").stdout)
    assert planned["model"] == name
    assert Path(planned["source"]) == BUNDLED_MODELS[name] / "config.json"
    done = run("generate", "Emma", "--model", name, "--max-tokens", 4, "--kv-memory", "4MiB", "--json")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["outputs"][0]["text"]


BAD = [
    (("--model", "/no/such/folder"), "QUIRE-MODEL-02", 2, "no folder"),
    (("--page-size", 0), "QUIRE-INPUT-01", 2, "--page-size"),
    (("--kv-memory", "0"), "QUIRE-INPUT-01", 2, "above zero"),
    (("--kv-memory", "lots"), "QUIRE-INPUT-01", 2, "8GiB"),
    (("--dtype", "float8"), "QUIRE-INPUT-01", 2, "--dtype"),
    (("--device", "abacus"), "QUIRE-INPUT-01", 2, "abacus"),
    (("--kv-memory", "100B"), "QUIRE-PLAN-01", 2, ""),
    (("--max-tokens", 0), "QUIRE-INPUT-01", 2, "max_tokens"),
    (("--max-tokens", 9999), "QUIRE-CONTEXT-01", 2, "512"),
    (("--temperature", -1), "QUIRE-INPUT-01", 2, "temperature"),
]


@pytest.mark.parametrize(("options", "code", "exit_code", "text"), BAD)
def test_bad_input_says_what_and_how(
    run: Run, tiny_model: Path, options: tuple[object, ...], code: str, exit_code: int, text: str
) -> None:
    model = () if "--model" in options else ("--model", tiny_model)
    shown = run("generate", "Hello", *model, *options)
    assert shown.exit_code == exit_code
    assert code in shown.stderr
    assert "Traceback" not in shown.stderr
    error = json.loads(run("generate", "Hello", *model, *options, "--json").stderr)["error"]
    assert (error["code"], error["exit_code"]) == (code, exit_code)
    assert text in error["message"] + error["fix"]


@pytest.mark.parametrize(("options", "env"), [(("--api-key", ""), {}), ((), {"QUIRE_API_KEY": ""})])
def test_an_empty_key_opens_no_server(
    run: Run, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], env: dict[str, str]
) -> None:
    def serve(*_: object, **__: object) -> None:
        raise AssertionError("the server was started")

    monkeypatch.setattr("quire.serve.server.serve", serve)
    shown = run("serve", *options, env=env)
    assert (shown.exit_code, "API key" in shown.stderr) == (2, True), shown.stderr


def test_the_exit_code_is_the_errors(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise UnsupportedModel("no.", fix="another.")

    monkeypatch.setattr("quire.cli.doctor.examine", refuse)
    assert run("doctor").exit_code == 3


def test_a_defect_is_no_traceback(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr("quire.cli.doctor.examine", fail)
    shown = run("doctor")
    assert shown.exit_code == 1
    assert "ZeroDivisionError: by zero" in shown.stderr
    assert "Traceback" not in shown.stderr
    assert "Traceback" in run("doctor", "--debug").stderr


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_reader_may_close_the_output(form: list[str]) -> None:
    """As `head` does; the report is no defect."""
    command = [sys.executable, "-m", "quire", "plan", "llama-3.1-8b", *form]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    with process.stderr as errors:
        assert (process.wait(), errors.read()) == (0, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="it is Linux's")
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_an_output_without_room_is_no_defect(form: list[str]) -> None:
    command = [sys.executable, "-m", "quire", "plan", "llama-3.1-8b", *form]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert "No space left on device" in done.stderr and "defect" not in done.stderr


def test_doctor(run: Run) -> None:
    found = json.loads(run("doctor", "--json").stdout)
    assert found["packages"]["torch"]
    assert found["cpu"]["usable_cores"] >= 1
    assert found["memory"]["total_bytes"] > 0
    assert found["assumed"]["page_size"] == "16 tokens"
    assert found["assumed"]["threads"].split(", ")[1] == default_of(EngineConfig, "threads")
    shown = run("doctor")
    assert shown.exit_code == 0
    assert "Assumed device" in shown.stdout
