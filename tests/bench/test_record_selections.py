"""`bench/sparse/record_selections.py`: a file of what an indexer selects, and texts that are too short."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from bench.sparse.record_selections import app
from typer.testing import CliRunner

import quire.models
from quire.sim.selections import Selections
from tests.tiny_latents import save_latent

TOKENIZER = Path(quire.models.__file__).parent / "bundled"


def test_selections_are_recorded(tmp_path: Path) -> None:
    """One row for each step after the prompt, request and indexer; a layer that shares an index has none."""
    folder = Path(save_latent("glm_moe_dsa", tmp_path / "model", vocab_size=2048))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder)
    text, out = tmp_path / "text.txt", tmp_path / "selections.npz"
    text.write_text("It is a truth universally acknowledged. " * 20)
    options = ("--model", folder, "--out", out, "--requests", 2, "--prompt-tokens", 20, "--kv-memory", "4MiB", "--json")
    done = CliRunner().invoke(app, [str(text), *map(str, options), "--max-tokens", "6"])
    assert done.exit_code == 0, done.output
    found = Selections.load(out)
    assert (found.num_requests, found.num_indexes) == (2, 2)
    assert found.newest[(found.request == 0) & (found.index == 1)].tolist() == [20, 21, 22, 23, 24]
    assert found.positions.shape == (20, 8)
    assert (found.positions.max(axis=1) <= found.newest).all() and (found.positions >= 0).all()
    rates = json.loads(done.stdout)["hit_rates"]
    assert [rate["buffer"] for rate in rates] == [8, 16, 32]
    assert all(0 < rate["lru"] <= rate["optimum"] for rate in rates)
    text.write_text("Short.")
    assert "fewer --prompt-tokens" in CliRunner().invoke(app, [str(text), *map(str, options)]).stderr
