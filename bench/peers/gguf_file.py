"""Writes a Llama of transformers as one GGUF file, which llama.cpp and OpenVINO GenAI load.

    python gguf_file.py FOLDER DTYPE FILE       with an interpreter that has `gguf`; DTYPE is float32 or bfloat16

llama.cpp rotates neighbouring numbers of a head, transformers rotates number i with number i + half. So rows of the
products of queries and keys change places. Norms stay in float32, as in the converter of llama.cpp.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_NORMAL, _CONTROL = 1, 3  # types of tokens in GGUF


def named(name: str) -> str:
    """The name of a tensor in GGUF. Raises KeyError for one that a plain Llama does not have."""
    stem = name.removesuffix(".weight")
    if stem in WHOLE:
        return f"{WHOLE[stem]}.weight"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{LAYER[part]}.weight"


def interleaved(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """`[heads * dim, hidden]` with the rows of each head in the order 0, dim/2, 1, dim/2 + 1, ..."""
    halves = weight.reshape(heads, 2, -1, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def tensors(file: Path) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Names and numbers of a file of safetensors, in float32. Raises ValueError for types that are not floats."""
    whole = np.memmap(file, np.uint8, "r")
    length = int(whole[:8].view("<u8")[0])
    for name, about in json.loads(whole[8 : 8 + length].tobytes()).items():
        if name == "__metadata__":
            continue
        begin, end = (8 + length + at for at in about["data_offsets"])
        data = whole[begin:end].tobytes()
        if about["dtype"] == "BF16":
            found = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
        elif about["dtype"] == "F32":
            found = np.frombuffer(data, "<f4")
        else:
            raise ValueError(f"{name} is {about['dtype']}; F32 and BF16 are read")
        yield name, found.reshape(about["shape"])


def vocabulary(folder: Path, size: int) -> tuple[list[str], list[int], list[str]]:
    """Tokens, their types, and merges: of the folder's tokenizer, or names that stand for tokens without text."""
    file = folder / "tokenizer.json"
    if not file.exists():
        return [f"t{i}" for i in range(size)], [_NORMAL] * size, ["t 1"]
    whole = json.loads(file.read_text())
    control = {each["id"] for each in whole["added_tokens"] if each["special"]}
    texts = {i: text for text, i in whole["model"]["vocab"].items()} | {
        each["id"]: each["content"] for each in whole["added_tokens"]
    }
    types = [_CONTROL if i in control else _NORMAL for i in range(size)]
    merges = [each if isinstance(each, str) else " ".join(each) for each in whole["model"]["merges"]]
    return [texts.get(i, f"t{i}") for i in range(size)], types, merges


def write(folder: Path, dtype: str, to: Path) -> None:
    """Write the model of `folder` to the file `to`, its matrices in `dtype`."""
    import gguf

    config = json.loads((folder / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10000.0)}
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"positions of kind {rope['rope_type']} are not written")
    matrix = {"float32": gguf.GGMLQuantizationType.F32, "bfloat16": gguf.GGMLQuantizationType.BF16}[dtype]
    writer = gguf.GGUFWriter(to, "llama")
    writer.add_name(folder.name)
    writer.add_file_type(
        {"float32": gguf.LlamaFileType.ALL_F32, "bfloat16": gguf.LlamaFileType.MOSTLY_BF16}[dtype].value
    )
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_rope_dimension_count(dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    texts, types, merges = vocabulary(folder, config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(texts)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(config["bos_token_id"] or 0)
    ends = config["eos_token_id"] or 0
    writer.add_eos_token_id(ends[0] if isinstance(ends, list) else ends)
    writer.add_add_bos_token(False)
    template = folder / "tokenizer_config.json"
    said = json.loads(template.read_text()).get("chat_template") if template.exists() else None
    if said:
        writer.add_chat_template(said)
    for name, weight in tensors(folder / "model.safetensors"):
        if "q_proj" in name or "k_proj" in name:
            weight = interleaved(weight, heads if "q_proj" in name else kv_heads)
        kind = matrix if weight.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(named(name), gguf.quants.quantize(np.ascontiguousarray(weight), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    write(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
