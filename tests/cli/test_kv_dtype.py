"""`--kv-dtype`: the engine's cache in another format, and what `bench/engine/kv_error.py` says that it costs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.engine.kv_error import app
from typer.testing import CliRunner, Result

from quire.kernels.fields import PagedField
from tests.cli.conftest import Run
from tests.tiny_models import build_tiny

BROKEN = 1  # layer


@pytest.fixture(scope="module")
def outlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without a tokenizer whose layer 1 has two channels of keys at 1,500."""
    folder = tmp_path_factory.mktemp("outlier")
    built = build_tiny("qwen2", num_attention_heads=2, num_key_value_heads=2)
    with torch.no_grad():
        built.model.layers[BROKEN].self_attn.k_proj.bias[30:32] += 1500.0
    built.save_pretrained(folder)
    return folder


@pytest.fixture
def script() -> Run:
    """Runs `bench/engine/kv_error.py` with arguments, in this process."""

    def run_script(*arguments: object, **options: object) -> Result:
        return CliRunner().invoke(app, [str(argument) for argument in arguments], **options)  # type: ignore[arg-type]

    return run_script


def measured(script: Run, *arguments: object) -> tuple[int, dict[str, Any]]:
    shown = script(*arguments, "--json")
    return shown.exit_code, json.loads(shown.stdout)


def test_generate_with_an_encoded_cache(run: Run, tiny_model: Path) -> None:
    options = ("--model", tiny_model, "--kv-memory", "1MiB", "--max-tokens", 8, "--json")
    plain, encoded = (
        json.loads(run("generate", "Hello", *options, *more).stdout) for more in ((), ("--kv-dtype", "fp8"))
    )
    assert len(plain["outputs"][0]["token_ids"]) == len(encoded["outputs"][0]["token_ids"]) == 8


def test_a_format_that_does_not_fit_is_refused(run: Run, script: Run, tiny_model: Path) -> None:
    """Heads of the tiny model have 8 numbers."""
    for measure, command in ((run, ("generate", "Hello")), (script, ())):
        shown = measure(*command, "--model", tiny_model, "--kv-dtype", "mxfp8")
        assert (shown.exit_code, "QUIRE-INPUT-01" in shown.stderr) == (2, True)
        assert "vector of 8 numbers" in " ".join(shown.stderr.replace("│", " ").split())


def test_the_bundled_model_takes_every_format_but_plain_fp4(script: Run) -> None:
    names = ["fp8_e4m3", "fp8_e5m2", "mxfp8", "nvfp4", "fp4_e2m1"]
    code, found = measured(script, "--kv-dtype", ",".join(names[:3]), "--kv-dtype", names[3], "--kv-dtype", names[4])
    assert (code, found["passed"], found["max_error"]) == (4, False, 0.25)
    assert (found["model"], found["dtype"], found["prompt"]) == ("quire-bundled", "bfloat16", "the sample")
    assert found["prompt_tokens"] > 300
    by_name = {one["kv_dtype"]: one for one in found["kv_dtypes"]}
    assert list(by_name) == names
    for name, one in by_name.items():
        assert one["layers_above"] == ([2] if name == "fp4_e2m1" else [])
        assert [call["layer"] for call in one["calls"]] == [0, 1, 2, 3]
        assert [field["name"] for call in one["calls"] for field in call["fields"]] == ["k", "v"] * 4
        assert 0 < one["logits_error"] < 0.15
        assert 0.7 < one["kept_share"] < 1
        assert one["plain_bytes_per_token"] == 2048
    worst = {name: max(call["attention_error"] for call in one["calls"]) for name, one in by_name.items()}
    assert worst["fp8_e4m3"] < worst["fp8_e5m2"] < worst["nvfp4"] < worst["fp4_e2m1"]
    assert [by_name[name]["bytes_per_token"] for name in names] == [1024, 1024, 1056, 576, 576]


def test_a_bad_layer_is_named_for_people(script: Run, outlier: Path) -> None:
    shown = script("--model", outlier, "--kv-dtype", "fp8_e5m2,fp8_e4m3", env={"COLUMNS": "100"})
    assert shown.exit_code == 4
    assert "random tokens, because the model has no tokenizer" in " ".join(shown.stdout.split())
    assert "fp8_e5m2: layer 1 above 25%" in shown.stdout
    assert "512 saturated" in shown.stdout  # of 256 tokens, in e4m3 alone
    assert shown.stdout.count("Refused:") == 2
    assert "positions keep their most likely token" in " ".join(shown.stdout.replace("│", " ").split())
    rows = [line for line in shown.stdout.splitlines() if line.startswith("│")]
    assert [" ".join(row.strip("│ ").split()[:1]) for row in rows].count("1") == 2


def test_a_bad_layer_is_named_for_machines(script: Run, outlier: Path) -> None:
    code, found = measured(script, "--model", outlier, "--kv-dtype", "fp8_e5m2")
    assert (code, found["passed"], found["kv_dtypes"][0]["layers_above"]) == (4, False, [BROKEN])
    code, found = measured(script, "--model", outlier, "--kv-dtype", "fp8_e5m2", "--max-error", "0.6")
    assert (code, found["passed"], found["kv_dtypes"][0]["layers_above"]) == (0, True, [])
    code, found = measured(script, "--model", outlier, "--kv-dtype", "fp8_e5m2", "--max-error", "0.01")
    assert (code, found["kv_dtypes"][0]["layers_above"]) == (4, [0, 1, 2])


def test_what_is_not_a_number_is_valid_json(
    script: Run, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = PagedField.write

    def write(stored: PagedField, slots: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return real(stored, slots, rows * math.nan if stored._kv_format is not None else rows)

    monkeypatch.setattr(PagedField, "write", write)
    (tmp_path / "prompt.txt").write_text("Hello")
    options = ("--model", tiny_model, "--kv-dtype", "fp8", "--prompt-file", tmp_path / "prompt.txt")
    shown = script(*options, "--json")
    found = json.loads(shown.stdout, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert (shown.exit_code, found["kv_dtypes"][0]["layers_above"]) == (4, [0, 1])
    assert found["kv_dtypes"][0]["calls"][0]["attention_error"] is None
    assert found["kv_dtypes"][0]["calls"][0]["fields"][0]["nan"] == 5 * 2 * 8
    assert "160 NaN" in script(*options).stdout


def test_a_prompt_of_ones_own(script: Run, tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text("A prompt of one's own.")
    code, found = measured(script, "--model", tiny_model, "--kv-dtype", "fp8", "--prompt-file", path)
    assert (code, found["prompt"], found["prompt_tokens"]) == (0, str(path), len(path.read_text()))
    code, found = measured(script, "--model", tiny_model, "--kv-dtype", "fp8")
    assert (code, found["prompt_tokens"]) == (0, 512)  # the sample, as much as the model's context holds


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--kv-dtype", "int3"), "'int3' is not a KV dtype"),
        (("--kv-dtype", "fp8,"), "'' is not a KV dtype"),
        (("--kv-dtype", "fp8", "--max-error", "0"), "--max-error: 0.0 is no share"),
        (("--kv-dtype", "fp8", "--max-error", "nan"), "--max-error: Input should be a finite number"),
        (("--kv-dtype", "fp8", "--prompt-file", "/no/such/file"), "cannot be read"),
        (("--kv-dtype", "fp8", "--prompt-file", "LONG"), "1 to 512"),
        (("--kv-dtype", "fp8", "--prompt-file", "EMPTY"), "has 0 tokens"),
    ],
)
def test_bad_input(script: Run, tiny_model: Path, tmp_path: Path, options: tuple[str, ...], said: str) -> None:
    texts = {"LONG": "a" * 513, "EMPTY": ""}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    given = [tmp_path / option if option in texts else option for option in options]
    shown = script(*given, "--model", tiny_model, "--json")
    assert shown.exit_code == 2
    error = json.loads(shown.stderr)["error"]
    assert said in error["message"] + error["fix"]
