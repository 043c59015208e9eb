"""Engines that are installed apart: the models written for them, what is asked of them, and their tokens."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench.peers import gguf_file, llama_cpp_engine
from bench.peers.engine import token_bytes
from safetensors.torch import load_file

from quire.spec.bundled import BUNDLED_MODELS
from tests.changes import slow_unless_changed
from tests.connectors.peer import python_of
from tests.programs import run_program

BENCH = Path(__file__).parents[2] / "bench" / "engine" / "compare.py"
BUNDLED = Path(BUNDLED_MODELS["quire-bundled"])
_SERVER = """#!{python}
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    def answer(self, what):
        text = json.dumps(what).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
    def do_GET(self):
        self.answer(dict(status="ok"))
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if asked["prompt"] == [0]:
            return self.send_error(400)
        assert asked["ignore_eos"] and asked["temperature"] == 0 and asked["return_tokens"]
        prompt = asked["prompt"]
        self.answer(dict(tokens=prompt[:1] * asked["n_predict"], timings=dict(cache_n=len(prompt) - 1)))
    def log_message(self, *args):
        pass

if "--version" in sys.argv:
    print("version: 7", file=sys.stderr)
else:
    open("asked.json", "w").write(json.dumps(sys.argv))
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def test_turned_neighbours_of_written_rows_are_turned_halves_of_the_model() -> None:
    """llama.cpp turns rows 2i and 2i + 1 by angle i, transformers rows i and i + half; scores must be the same."""
    heads, dim, hidden = 3, 8, 5
    draw = np.random.default_rng(1)
    query, key = (draw.standard_normal((heads * dim, hidden)).astype(np.float32) for _ in range(2))
    there, here = draw.standard_normal((2, hidden)).astype(np.float32)

    def angles(position: int) -> np.ndarray[Any, Any]:
        return position * 100.0 ** (-np.arange(dim // 2) / (dim // 2))

    def halves(rows: np.ndarray[Any, Any], position: int) -> np.ndarray[Any, Any]:
        first, second = rows[:, : dim // 2], rows[:, dim // 2 :]
        cos, sin = np.cos(angles(position)), np.sin(angles(position))
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], 1)

    def neighbours(rows: np.ndarray[Any, Any], position: int) -> np.ndarray[Any, Any]:
        turned = np.empty_like(rows, np.float64)
        cos, sin = np.cos(angles(position)), np.sin(angles(position))
        turned[:, 0::2] = rows[:, 0::2] * cos - rows[:, 1::2] * sin
        turned[:, 1::2] = rows[:, 1::2] * cos + rows[:, 0::2] * sin
        return turned

    expected = (halves((query @ here).reshape(heads, dim), 7) * halves((key @ there).reshape(heads, dim), 3)).sum(1)
    written = [gguf_file.interleaved(each, heads) for each in (query, key)]
    found = neighbours((written[0] @ here).reshape(heads, dim), 7) * neighbours(
        (written[1] @ there).reshape(heads, dim), 3
    )
    np.testing.assert_allclose(found.sum(1), expected, rtol=1e-5)


def test_weights_of_the_bundled_model_are_read_as_they_are() -> None:
    expected = load_file(BUNDLED / "model.safetensors")
    found = dict(gguf_file.tensors(BUNDLED / "model.safetensors"))
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(torch.from_numpy(found[name].copy()), weight.float()), name
    names = [gguf_file.named(name) for name in found]
    assert len(set(names)) == len(names)
    with pytest.raises(KeyError):
        gguf_file.named("model.layers.0.self_attn.q_norm.weight")


def test_the_vocabulary_is_that_of_the_tokenizer(tmp_path: Path) -> None:
    texts, types, merges = gguf_file.vocabulary(BUNDLED, 2048)
    assert (len(texts), len(set(texts)), types.count(3)) == (2048, 2048, 6)
    assert texts[1] == "<|bos|>" and types[1] == 3
    assert all(each.count(" ") == 1 and each.replace(" ", "") in texts for each in merges)
    assert gguf_file.vocabulary(tmp_path, 3)[0] == ["t0", "t1", "t2"]


def test_keys_and_values_of_a_token_are_counted() -> None:
    assert token_bytes(BUNDLED, "float32") == 2 * 4 * 4 * 32 * 4
    assert token_bytes(BUNDLED, "bfloat16") == 2 * 4 * 4 * 32 * 2


def test_the_server_of_llama_cpp_is_asked_for_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of a few lines stands for it: what it is started with, the answers in order, and what is counted."""
    program = tmp_path / "llama-server"
    program.write_text(_SERVER.format(python=sys.executable))
    program.chmod(0o700)
    monkeypatch.setattr(llama_cpp_engine, "SERVER", program)
    monkeypatch.setattr(gguf_file, "write", lambda folder, dtype, to: to.write_text(dtype))
    monkeypatch.chdir(tmp_path)
    engine = llama_cpp_engine.LlamaCpp()
    folder = str(tmp_path / "model")
    settings = {"threads": 1, "kv_bytes": 1 << 20, "max_model_len": 256, "max_requests": 4}
    engine.start(folder=folder, dtype="bfloat16", **settings)
    try:
        asked = json.loads((tmp_path / "asked.json").read_text())
        at = {name: asked[i + 1] for i, name in enumerate(asked) if name.startswith("--")}
        assert (at["--parallel"], at["--ctx-size"], at["--cache-type-k"], at["--threads"]) == ("4", "1024", "bf16", "1")
        assert engine.run([[5, 6], [7, 8, 9]], 3) == [[5] * 3, [7] * 3]
        assert engine.counters() == {"hit_tokens": 3}
        assert engine.about() == {"llama.cpp": "version: 7"}
        with pytest.raises(RuntimeError, match="llama-server: 400"):
            engine.run([[0]], 1)
    finally:
        engine.close()


@slow_unless_changed("bench/engine/", "bench/peers/engine", "bench/harness.py")
def test_peers_that_are_not_installed_are_absent(tmp_path: Path) -> None:
    done = run_program(BENCH, "--toy", "--engines", "quire,generate,llama.cpp,openvino", "--peers", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("llama.cpp's server", "OpenVINO GenAI"):
        assert f"{name} is absent: not installed" in done.stdout


@slow_unless_changed("bench/engine/", "bench/peers/")
@pytest.mark.parametrize(("engine", "home"), [("llama.cpp", "llama-cpp"), ("openvino", "openvino-genai")])
def test_tokens_of_a_peer_are_those_of_generate(engine: str, home: str, tmp_path: Path) -> None:
    """In float32: so the model that was written for it is the same. llama.cpp's sums take another order where a prompt
    is cached, and one token of 32 is another one then."""
    peers = Path(python_of(home)).parents[2]
    if engine == "llama.cpp" and not (peers / home / "bin" / "llama-server").exists():
        pytest.skip("llama-server is not built: bench/peers/install.py does it")
    written = tmp_path / "result.json"
    done = run_program(BENCH, "--toy", "--engines", f"generate,{engine}", "--peers", peers, "--json", written)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(written.read_text())["measured"]["float32"]
    assert not found["absent"]
    for mode, row in found["summary"][engine].items():
        least = 0.9 if engine == "llama.cpp" else 1
        assert row["equal_tokens"] >= least * row["compared_tokens"], mode
