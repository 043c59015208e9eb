"""A model small enough for tests: random weights, one token for each byte, a chat template."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CONTEXT = 512
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] == 'assistant' and loop.first %}{{ raise_exception('an answer before a question') }}{% endif %}"
    "<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}<assistant>"
)


def byte_tokenizer() -> Tokenizer:
    """Ids 0 to 255 are the bytes of the byte-level alphabet; 256 ends a sequence."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return tokenizer


def make_tiny_model(folder: Path) -> Path:
    """Write the model to `folder`."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.4,  # wide, so that greedy tokens vary
        bos_token_id=None,
        eos_token_id=256,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).to(torch.float32)
    with torch.no_grad():
        model.lm_head.weight[256] = 0.0  # sequences end at their limit, not by chance
    model.save_pretrained(folder)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), eos_token="<|end|>")
    wrapped.chat_template = TEMPLATE
    wrapped.save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
    return folder
