"""Writes a Llama of transformers as a model of OpenVINO, from which OpenVINO GenAI makes its paged pipeline.

Its reader of GGUF does not load this model. Release 2026.4.1 refuses float32 ("Unsupported quantization type"). Of a
float16 file it makes a graph that the plugin refuses ("ReadValue contains dead weak ptr"). So the graph is written
here, of the operators that OpenVINO fuses: norms, rotations, products and attention.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from bench.peers.gguf_file import tensors

Node = Any


class Graph:
    """The layers of one model, made once. `weights` are in float32, as `tensors` reads them."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.weights = dict(tensors(folder / "model.safetensors"))
        self.layers = config["num_hidden_layers"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.dim = config.get("head_dim") or config["hidden_size"] // self.heads
        self.epsilon = config["rms_norm_eps"]
        self.theta = (config.get("rope_parameters") or config)["rope_theta"]

    def model(self) -> Any:
        """The `openvino.Model`: ids, mask, positions and beams in, logits out, keys and values as its state."""
        import openvino as ov
        from openvino import opset13 as ops

        def given(name: str, shape: list[int], dtype: Any) -> Node:
            found = ops.parameter(shape, dtype)
            found.set_friendly_name(name)
            found.output(0).set_names({name})
            return found

        ids = given("input_ids", [-1, -1], np.int64)
        mask = given("attention_mask", [-1, -1], np.int64)
        positions = given("position_ids", [-1, -1], np.int64)
        beams = given("beam_idx", [-1], np.int32)
        batch = ops.gather(ops.shape_of(ids), [0], 0)
        # Paged attention is causal and has no mask: the pipeline replaces this one.
        seen = ops.unsqueeze(ops.convert(ops.equal(mask, np.int64(1)), np.float32), [1, 2])
        table = self.weights["model.embed_tokens.weight"]
        hidden = ops.gather(table, ids, np.int32(0))
        angles = self._angles(positions)
        sinks: list[Node] = []
        for layer in range(self.layers):
            at = f"model.layers.{layer}"
            normed = self._norm(hidden, f"{at}.input_layernorm")
            hidden = ops.add(hidden, self._attention(normed, at, angles, seen, beams, batch, sinks))
            normed = self._norm(hidden, f"{at}.post_attention_layernorm")
            gate = ops.swish(self._linear(normed, f"{at}.mlp.gate_proj"))
            inner = ops.multiply(gate, self._linear(normed, f"{at}.mlp.up_proj"))
            hidden = ops.add(hidden, self._linear(inner, f"{at}.mlp.down_proj"))
        head = self.weights.get("lm_head.weight", table)
        logits = ops.result(ops.matmul(self._norm(hidden, "model.norm"), head, False, True))
        logits.output(0).set_names({"logits"})
        return ov.Model([logits], sinks, [ids, mask, positions, beams], "llama")

    def _linear(self, of: Node, name: str) -> Node:
        from openvino import opset13 as ops

        return ops.matmul(of, self.weights[f"{name}.weight"], False, True)

    def _norm(self, of: Node, name: str) -> Node:
        from openvino import opset13 as ops

        mean = ops.reduce_mean(ops.power(of, np.float32(2)), [-1], True)
        scale = ops.divide(np.float32(1), ops.sqrt(ops.add(mean, np.float32(self.epsilon))))
        return ops.multiply(ops.multiply(of, scale), self.weights[f"{name}.weight"][None, None])

    def _angles(self, positions: Node) -> tuple[Node, Node]:
        """Cosines and sines, `[batch, 1, tokens, dim]`."""
        from openvino import opset13 as ops

        rates = (self.theta ** (-np.arange(0, self.dim, 2, dtype=np.float64) / self.dim)).astype(np.float32)
        at = ops.convert(ops.unsqueeze(positions, [2]), np.float32)
        half = ops.matmul(at, rates[None, None], False, False)
        both = ops.unsqueeze(ops.concat([half, half], -1), [1])
        return ops.cos(both), ops.sin(both)

    def _rotated(self, of: Node, angles: tuple[Node, Node]) -> Node:
        from openvino import opset13 as ops

        half = self.dim // 2
        first, second = (ops.slice(of, [begin], [begin + half], [1], [3]) for begin in (0, half))
        turned = ops.concat([ops.multiply(second, np.float32(-1)), first], -1)
        return ops.add(ops.multiply(of, angles[0]), ops.multiply(turned, angles[1]))

    def _attention(
        self, of: Node, at: str, angles: tuple[Node, Node], mask: Node, beams: Node, batch: Node, sinks: list[Node]
    ) -> Node:
        from openvino import opset13 as ops

        def split(name: str, heads: int) -> Node:
            shaped = ops.reshape(self._linear(of, f"{at}.self_attn.{name}"), [0, 0, heads, self.dim], True)
            return ops.transpose(shaped, [0, 2, 1, 3])

        def stored(new: Node, name: str) -> Node:
            """All tokens so far, one head for each query head."""
            empty = ops.broadcast(np.float32(0), ops.concat([batch, np.array([self.kv_heads, 0, self.dim])], 0))
            shape = [-1, self.kv_heads, -1, self.dim]
            past = ops.gather(ops.read_value(empty, f"{at}.{name}", np.float32, shape), beams, np.int32(0))
            whole = ops.concat([past, new], 2)
            sinks.append(ops.assign(whole, f"{at}.{name}"))
            groups = self.heads // self.kv_heads
            if groups == 1:
                return whole
            shape_of = ops.shape_of(whole)
            parts = [ops.gather(shape_of, [i], 0) for i in range(4)]
            wide = ops.concat([parts[0], parts[1], np.array([groups]), parts[2], parts[3]], 0)
            return ops.reshape(ops.broadcast(ops.unsqueeze(whole, [2]), wide), [0, self.heads, -1, self.dim], True)

        query = self._rotated(split("q_proj", self.heads), angles)
        key = stored(self._rotated(split("k_proj", self.kv_heads), angles), "key")
        value = stored(split("v_proj", self.kv_heads), "value")
        found = ops.transpose(ops.scaled_dot_product_attention(query, key, value, mask), [0, 2, 1, 3])
        return self._linear(ops.reshape(found, [0, 0, self.heads * self.dim], True), f"{at}.self_attn.o_proj")


def write(folder: Path, to: Path) -> None:
    """Write the model of `folder` into the folder `to`, in float32; the plugin makes bfloat16 of it where asked to."""
    import openvino as ov

    to.mkdir()
    ov.save_model(Graph(folder).model(), str(to / "openvino_model.xml"), compress_to_fp16=False)
    for name in ("config.json", "generation_config.json"):
        shutil.copy(folder / name, to)
