"""Train the EAGLE head of the plain bundled model, on one CPU thread.

    python training/train_head.py --minutes 25

The head learns to predict the target's features and its distribution of the token after the next, on the corpus of
train.py. It is unrolled over its own features, as it is when it drafts, and attends to the target's features of earlier
positions (Li et al., "EAGLE-3", 2025, "training-time test").
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from corpus import IGNORE, SPECIAL_TOKENS, CorpusError, Lexicon, SampleMaker, load_novels
from editions import CONTEXT, EDITIONS
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional
from train import Muon, batch, held_out_split, rate
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import repeat_kv

from quire.models.draft_head import EagleHead, HeadShape, head_config

ATTENTION = "unrolled"
DEPTHS = 2  # drafts one after the other that a step trains
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle"],
    "attention_bias": False,
    "bias": False,
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 256,
    "intermediate_size": 192,
    "max_position_embeddings": CONTEXT,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 8,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "torch_dtype": "bfloat16",
    "vocab_size": 2048,
}


@dataclass
class Unrolled:
    """Keys and values `[rows, heads, length, dim]` of the depths so far. Depth d at position n was computed from
    features of depth d - 1 at n - 1, so it sees the target's up to n - d and its own predecessors after them."""

    kept: list[tuple[Tensor, Tensor]]


UNROLLED = Unrolled([])


def unrolled_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **others: Any
) -> tuple[Tensor, None]:
    """Attention of the next depth over all depths so far."""
    key, value = (repeat_kv(tensor, int(module.num_key_value_groups)) for tensor in (key, value))
    UNROLLED.kept.append((key, value))
    depth, length = len(UNROLLED.kept) - 1, query.shape[2]
    keys, values = UNROLLED.kept[0]
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1 - depth)
    scores = [(query @ keys.transpose(2, 3) * float(module.scaling)).masked_fill(hidden, -math.inf)]
    behind = [(k.roll(depth - d, 2), v.roll(depth - d, 2)) for d, (k, v) in enumerate(UNROLLED.kept[1:], start=1)]
    scores += [(query * k).sum(-1, keepdim=True) * float(module.scaling) for k, _ in behind]
    shares = torch.cat(scores, -1).softmax(-1)
    out = shares[..., :length] @ values
    for i, (_, v) in enumerate(behind):
        out = out + shares[..., length + i : length + i + 1] * v
    return out.transpose(1, 2), None


AttentionInterface.register(ATTENTION, unrolled_attention)


def new_head() -> EagleHead:
    """A head whose layer begins as the identity."""
    head = EagleHead(head_config(CONFIG, ATTENTION), HeadShape(target_hidden=CONFIG["hidden_size"]))
    with torch.no_grad():
        for name, weight in head.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.zero_()
    return head


@dataclass
class Losses:
    """Of each depth: cross entropy and distance of features, and how often the likeliest token is the target's."""

    entropies: list[Tensor]
    distances: list[Tensor]
    matches: list[float]


def unroll(head: EagleHead, target: PreTrainedModel, ids: Tensor, chosen: Tensor) -> Losses:
    """The losses of a batch `[rows, length]`, at the positions whose next token is `chosen`."""
    with torch.no_grad():
        states: Tensor = target.model(input_ids=ids, use_cache=False).last_hidden_state
        embeddings: Tensor = target.model.embed_tokens(ids)
        wanted = target.lm_head(states).softmax(-1)
    length = ids.shape[1]
    positions = torch.arange(length - 1).unsqueeze(0)
    following, features = embeddings[:, 1:], states[:, :-1]
    UNROLLED.kept.clear()
    losses = Losses([], [], [])
    for depth in range(DEPTHS):
        out = head(following, features, positions)
        # Row n predicts the features of n + 1. A row before `depth` has no past to come from.
        at = chosen[:, 1:].clone()
        at[:, : depth + 1] = False
        logits = head.logits(out[at], target.lm_head)
        aim, aim_states = wanted[:, 1:][at], states[:, 1:][at]
        losses.entropies.append(functional.cross_entropy(logits, aim))
        losses.distances.append(functional.smooth_l1_loss(out[at], aim_states))
        losses.matches.append((logits.argmax(-1) == aim.argmax(-1)).float().mean().item())
        features = out.roll(1, 1)
    return losses


def answers(ids: Tensor, labels: Tensor) -> Tensor:
    """The positions after which a token of an answer or of prose comes, bool."""
    chosen = torch.zeros_like(ids, dtype=torch.bool)
    chosen[:, :-1] = labels[:, 1:] != IGNORE
    return chosen


class Answers:
    """Answers of the target to questions about the corpus: what the head will see when it drafts.

    Each batch is used about twice, since it takes longer to make than to learn from.
    """

    def __init__(self, target: PreTrainedModel, maker: SampleMaker) -> None:
        self._target, self._maker = target, maker
        self._kept: list[tuple[Tensor, Tensor]] = []

    def batch(self, rows: int = 24, longest: int = 80) -> tuple[Tensor, Tensor]:
        """Token ids and labels, each of shape [rows, length]."""
        rng = self._maker.rng
        if self._kept and rng.random() < 0.5:
            return rng.choice(self._kept)
        prompts = torch.tensor(self._maker.questions(rows))
        sampled = {"do_sample": True, "temperature": 0.7} if rng.random() < 0.5 else {"do_sample": False}
        with torch.no_grad():
            ids = self._target.generate(
                prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=longest, **sampled
            )
        labels = ids.masked_fill(ids == SPECIAL_TOKENS.index("<|pad|>"), IGNORE)
        labels[:, : prompts.size(1)] = IGNORE
        self._kept.append((ids, labels))
        return ids, labels


def train(head: EagleHead, target: PreTrainedModel, maker: SampleMaker, args: argparse.Namespace, out: Path) -> int:
    """Train until the time is over; returns the steps."""
    matrices = [p for p in head.parameters() if p.ndim == 2]
    others = [p for p in head.parameters() if p.ndim != 2]
    optims: list[torch.optim.Optimizer] = [Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=4e-3, weight_decay=0)]
    own = Answers(target, maker)
    peaks = [optim.param_groups[0]["lr"] for optim in optims]
    start = time.monotonic()
    step = tokens = 0
    while (done := step / args.steps if args.steps else (time.monotonic() - start) / 60 / args.minutes) < 1:
        done = args.resume_at + (1 - args.resume_at) * done
        for optim, peak in zip(optims, peaks, strict=True):
            optim.param_groups[0]["lr"] = peak * rate(done)
        ids, labels = (
            own.batch() if step % 2 else batch(maker, args.batch_tokens // 256, 256, {"chat": 0.9, "prose": 0.1})
        )
        losses = unroll(head, target, ids, answers(ids, labels))
        weights = [0.8**depth for depth in range(DEPTHS)]
        loss = sum(
            w * (entropy + distance)
            for w, entropy, distance in zip(weights, losses.entropies, losses.distances, strict=True)
        )
        assert isinstance(loss, Tensor)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        for optim in optims:
            optim.step()
            optim.zero_grad()
        step += 1
        tokens += ids.numel()
        if step % 10 < 2:
            print(f"step {step:5d}  {100 * done:5.1f}%  {shown(losses)}  {tokens} tokens", flush=True)
        if step % 50 == 0:
            save(head, out)
    print(f"{tokens} tokens")
    return step


def shown(losses: Losses) -> str:
    """One line for a log."""
    parts = (losses.entropies, losses.distances, losses.matches)
    return "  ".join("/".join(f"{float(value):.3f}" for value in values) for values in parts)


def save(head: EagleHead, out: Path) -> None:
    """Write the head, in bfloat16, in the public layout of EAGLE."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {
        name.replace("midlayer.", "layers.0."): weight.detach().to(torch.bfloat16).contiguous()
        for name, weight in head.named_parameters()
    }
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    (out / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n", encoding="utf-8")


@torch.no_grad()
def evaluate(head: EagleHead, target: PreTrainedModel, batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """Mean losses and matches of each depth."""
    found = [unroll(head, target, ids, answers(ids, labels)) for ids, labels in batches]

    def mean(name: str) -> list[float]:
        rows = [[float(value) for value in getattr(losses, name)] for losses in found]
        return [round(sum(column) / len(rows), 4) for column in zip(*rows, strict=True)]

    return {name: mean(name) for name in ("entropies", "distances", "matches")}


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    folder = EDITIONS["plain"].folder.with_name("bundled_eagle")
    parser.add_argument("--out", type=Path, default=folder, help="folder for the head")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "quire-corpus")
    parser.add_argument("--deb", type=Path, help="the corpus package, if already downloaded")
    parser.add_argument("--minutes", type=float, default=25.0, help="time to train for")
    parser.add_argument("--steps", type=int, help="train for this many steps instead")
    parser.add_argument("--resume-at", type=float, default=0.0, metavar="SHARE", help="go on from the folder's weights")
    parser.add_argument("--batch-tokens", type=int, default=4096, help="tokens in a step")
    parser.add_argument("--seed", type=int, default=1813, help="seed of all randomness")
    return parser.parse_args()


def main() -> int:
    """Fetch, train, measure, save."""
    args = arguments()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    try:
        sentences, held_out = held_out_split(load_novels(args.cache, args.deb))
    except CorpusError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    folder = EDITIONS["plain"].folder
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    lexicon = Lexicon.of(" ".join(sentences))
    maker = SampleMaker(sentences, lexicon, tokenizer, random.Random(args.seed))
    checker = SampleMaker(held_out, lexicon, tokenizer, random.Random(1))
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)
    head = new_head()
    if args.resume_at:
        head.load_state_dict(read(args.out))
    own = Answers(target, checker)
    checks = {
        "own answers": [own.batch() for _ in range(4)],
        "seen": [batch(maker, 8, 256, {"chat": 1}) for _ in range(4)],
        "held out": [batch(checker, 8, 256, {"chat": 1}) for _ in range(4)],
    }
    print(f"{sum(p.numel() for p in head.parameters())} parameters", flush=True)
    steps = train(head, target, maker, args, args.out)
    save(head, args.out)
    head.load_state_dict(read(args.out))  # rounded to bfloat16
    print(json.dumps({"steps": steps, **{n: evaluate(head, target, b) for n, b in checks.items()}}, indent=2))
    return 0


def read(folder: Path) -> dict[str, Tensor]:
    """The stored weights, by this script's names."""
    from safetensors.torch import load_file

    weights = load_file(folder / "model.safetensors")
    return {name.replace("layers.0.", "midlayer."): weight.float() for name, weight in weights.items()}


if __name__ == "__main__":
    sys.exit(main())
