#!/usr/bin/env python
"""Train a small model with sparse latent attention (DeepSeek-V3.2's), so that what its indexer selects means something.

    python -m bench.sparse.dsa_model FOLDER --minutes 10

The text is that of this repository's documents and source, the tokenizer the bundled model's. First all layers attend
to everything, then to what their indexers select. An indexer learns from the attention of its own layer: its scores
become the logarithms of the mean attention of all heads, as in DeepSeek-V3.2's training.
"""

from __future__ import annotations

import argparse
import math
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from bench.harness import ROOT
from tokenizers import Tokenizer
from torch import Tensor
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM
from transformers.models.deepseek_v32.modeling_deepseek_v32 import apply_rotary_pos_emb

import quire.models

BUNDLED = Path(quire.models.__file__).parent / "bundled"


def text() -> str:
    """The documents and the source of this repository."""
    files = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("src/quire/**/*.py"))]
    return "\n\n".join(file.read_text() for file in files)


def build(vocab_size: int, context: int, top_k: int, *, latent: int = 64) -> Any:
    """A random model of about 0.8 million parameters. `latent` is the width of a latent without its rotary part."""
    config = DeepseekV32Config(
        vocab_size=vocab_size, hidden_size=128, intermediate_size=384, num_hidden_layers=2, first_k_dense_replace=2,
        num_attention_heads=4, num_key_value_heads=4, q_lora_rank=64, kv_lora_rank=latent, qk_rope_head_dim=16,
        qk_nope_head_dim=32, v_head_dim=32, index_n_heads=8, index_head_dim=32, index_topk=top_k,
        max_position_embeddings=2 * context, tie_word_embeddings=True,
    )  # fmt: skip
    config.mlp_layer_types = ["dense"] * config.num_hidden_layers
    config._attn_implementation = "eager"
    return DeepseekV32ForCausalLM(config)


class IndexerTraining:
    """Lets the indexers of a model learn while it is trained. `loss` is that of all layers of the last forward pass."""

    def __init__(self, model: Any, *, top_k: int) -> None:
        self.loss: Tensor = torch.zeros(())
        self.top_k = top_k
        for layer in model.model.layers:
            indexer = layer.self_attn.indexer
            indexer.forward = lambda *inputs, indexer=indexer, **_: self._select(indexer, *inputs)
            layer.self_attn.register_forward_hook(self._learn)

    def _select(
        self, indexer: Any, hidden: Tensor, query: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor, *_: Any
    ) -> Tensor:
        hidden, query = hidden.detach(), query.detach()
        heads, width, turned = indexer.n_heads, indexer.head_dim, indexer.qk_rope_head_dim
        q = indexer.wq_b(query).unflatten(-1, (heads, width))
        k = indexer.k_norm(indexer.wk(hidden)).unsqueeze(2)
        q_turned, k_turned = apply_rotary_pos_emb(q[..., :turned], k[..., :turned], *rotary, unsqueeze_dim=2)
        q, k = torch.cat([q_turned, q[..., turned:]], -1), torch.cat([k_turned, k[..., turned:]], -1)
        each = torch.einsum("bshd,btd->bsht", q, k.squeeze(2)).relu() * width**-0.5
        indexer.scores = torch.einsum("bsht,bsh->bst", each, indexer.weights_proj(hidden)) * heads**-0.5 + mask
        top_k = min(self.top_k, hidden.shape[1])
        found: Tensor = indexer.scores.detach().topk(top_k, dim=-1).indices.int()
        return found

    def _learn(self, attention: Any, _: Any, output: tuple[Tensor, Tensor]) -> None:
        target = output[1].detach().mean(1)
        scores = attention.indexer.scores.log_softmax(-1)
        lost = target * (target.clamp_min(1e-9).log() - scores.clamp_min(-1e9))
        self.loss = self.loss + lost.sum(-1).mean()


def train(folder: Path, *, minutes: float, context: int, top_k: int, batch: int) -> None:
    """Train for that long, and save the model in transformers' format."""
    torch.manual_seed(0)
    tokens = torch.tensor(Tokenizer.from_file(str(BUNDLED / "tokenizer.json")).encode(text()).ids)
    vocab_size = 2 ** math.ceil(math.log2(int(tokens.max()) + 1))
    model = build(vocab_size, context, top_k)
    training = IndexerTraining(model, top_k=context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.5e-3, betas=(0.9, 0.95), weight_decay=0.05)
    began, step, passed = time.monotonic(), 0, 0.0
    print(f"{len(tokens):,} tokens, {sum(each.numel() for each in model.parameters()):,} parameters", flush=True)
    while passed < 1:
        rate = min(1.0, step / 50) * (0.05 + 0.95 * (1 + math.cos(math.pi * passed)) / 2)
        for group in optimizer.param_groups:
            group["lr"] = 1.5e-3 * rate
        training.top_k = context if passed < 0.6 else top_k
        training.loss = torch.zeros(())
        starts = torch.randint(len(tokens) - context, (batch,)).tolist()
        rows = torch.stack([tokens[start : start + context] for start in starts])
        loss = model(input_ids=rows, labels=rows, use_cache=False).loss
        (loss + training.loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            print(f"{step:5d} {passed:5.0%} loss {loss.item():.3f} indexers {training.loss.item():.3f}", flush=True)
        step, passed = step + 1, (time.monotonic() - began) / 60 / minutes
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED / name, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--top-k", type=int, default=64)
    parser.add_argument("--batch", type=int, default=2)
    given = parser.parse_args()
    train(given.folder, minutes=given.minutes, context=given.context, top_k=given.top_k, batch=given.batch)


if __name__ == "__main__":
    main()
