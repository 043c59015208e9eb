"""The editions of the bundled model, as they lie in the package: transformers loads them and the planner reads them."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from quire.engine.config import engine_config
from quire.models import hf
from quire.spec.bundled import BUNDLED_MODELS
from quire.spec.model import ModelSpec

MODELS = Path(hf.__file__).parent
TRAINING = Path(__file__).parents[2] / "training"
FOLDERS = {
    "plain": MODELS / "bundled",
    "window": MODELS / "bundled_window",
    "recurrent": MODELS / "bundled_recurrent",
    "agent": MODELS / "bundled_agent",
}
HYBRIDS = ("window", "recurrent")
END = 5  # the id of <|end|>
QUESTIONS = (
    "Tell me about Mr. Darcy.",
    "Tell me about Elizabeth.",
    "Who is Emma?",
    "Tell me about the ball.",
    "Hello!",
)


def read_config(edition):
    return json.loads((FOLDERS[edition] / "config.json").read_text())


def load(edition):
    return AutoModelForCausalLM.from_pretrained(FOLDERS[edition], output_loading_info=True)


def test_names_and_folders_serve_under_the_name():
    assert list(BUNDLED_MODELS.values()) == list(FOLDERS.values())
    for name, folder in BUNDLED_MODELS.items():
        assert {engine_config(model=model).model_name for model in (name, folder, f"{folder}/")} == {name}
    assert engine_config(model="quire-bundled-window", served_model_name="other").model_name == "other"
    assert engine_config().model_name == "quire-bundled"


@pytest.mark.parametrize("edition", FOLDERS)
def test_transformers_finds_every_weight(edition):
    model, report = load(edition)
    assert model.config.model_type == read_config(edition)["model_type"]
    assert not any(report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("edition", HYBRIDS)
def test_answers_end_by_themselves(edition):
    model = AutoModelForCausalLM.from_pretrained(FOLDERS[edition], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(FOLDERS[edition])
    unfinished = []
    for question in QUESTIONS:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        answer = model.generate(**prompt, max_new_tokens=150, do_sample=False)
        new = answer[0, prompt["input_ids"].shape[1] :].tolist()
        if new[-1] != END or len(new) < 5:
            unfinished.append((question, tokenizer.decode(new)))
    assert unfinished == []


@pytest.mark.parametrize("edition", HYBRIDS)
def test_the_words_and_the_chat_format_are_the_plain_editions(edition):
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (FOLDERS[edition] / name).read_bytes() == (FOLDERS["plain"] / name).read_bytes(), name


@pytest.mark.parametrize("edition", HYBRIDS)
def test_hybrids_are_small(edition):
    path = FOLDERS[edition] / "model.safetensors"
    assert path.stat().st_size < 4_000_000
    with safe_open(path, "pt") as weights:
        assert all(weights.get_tensor(name).isfinite().all() for name in weights.keys())  # noqa: SIM118


def test_window_edition_has_a_full_and_a_window_group():
    spec = ModelSpec.from_config(read_config("window"))
    full, window = spec.groups(16)
    assert (full.name, window.name) == ("full", "window")
    assert [field.layers for field in full.layout.fields] == [(3,), (3,)]
    assert [field.layers for field in window.layout.fields] == [(0, 1, 2), (0, 1, 2)]
    assert (window.reach.kind, window.reach.tokens) == ("window", 64)
    assert full.layout.bytes_per_frame == 16 * 2 * 2 * 32 * 2  # tokens, keys and values, heads, width, bytes
    assert window.layout.bytes_per_frame == 3 * full.layout.bytes_per_frame
    assert spec.context_length == 2048


def test_recurrent_edition_has_a_full_and_a_state_group():
    spec = ModelSpec.from_config(read_config("recurrent"))
    full, state = spec.groups(16)
    assert (full.name, state.name) == ("full", "state")
    assert [field.layers for field in full.layout.fields] == [(3,), (3,)]
    assert {field.layers for field in state.layout.fields} == {(0, 1, 2)}
    assert state.reach.kind == "state"
    matrix, inputs = 4 * 32 * 32 * 4, 3 * 4 * 32 * 3 * 2  # float32; bfloat16 queries, keys and values of 3 tokens
    assert state.layout.bytes_per_frame == 3 * (matrix + inputs)
    assert spec.context_length == 2048


def test_the_training_table_gives_the_configurations_that_are_shipped(monkeypatch):
    monkeypatch.syspath_prepend(str(TRAINING))
    editions = importlib.import_module("editions").EDITIONS
    for name in ("editions", "corpus", "blocks"):
        monkeypatch.delitem(sys.modules, name)
    assert {name: edition.folder for name, edition in editions.items()} == FOLDERS
    for name, edition in editions.items():
        shipped = read_config(name)
        made = json.loads(edition.family(**edition.sizes).to_json_string(use_diff=False))
        written_when_saved = ("architectures", "dtype", "transformers_version")
        differing = {key for key in shipped if key not in written_when_saved and made.get(key) != shipped[key]}
        assert differing == set(), name
