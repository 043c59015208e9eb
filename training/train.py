"""Train one of the tiny chat models that the package ships, on one CPU thread.

    python training/train.py --minutes 40
    python training/train.py --edition window --minutes 25

Fetches the corpus (see corpus.py), trains a byte-level BPE tokenizer and then a
small model on it, and writes both, ready for ``from_pretrained``. The editions
other than the plain one (see editions.py) take the plain one's tokenizer.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from agents import MARKS, AgentMaker, Library, tokenizer_texts
from corpus import (
    IGNORE,
    SPECIAL_TOKENS,
    CorpusError,
    Lexicon,
    SampleMaker,
    load_novels,
    split_sentences,
)
from editions import CHAT_TEMPLATE, EDITIONS, Edition
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from quire.models.response_template import FOLDER as RESPONSE_TEMPLATES

# --------------------------------------------------------------------------- data


def held_out_split(novels: list[list[str]], share: float = 0.03) -> tuple[list[str], list[str]]:
    """Sentences for training, and those of the last paragraphs of each novel for validation."""
    train: list[str] = []
    held_out: list[str] = []
    for novel in novels:
        cut = round(len(novel) * (1 - share))
        train += [s for paragraph in novel[:cut] for s in split_sentences(paragraph)]
        held_out += [s for paragraph in novel[cut:] for s in split_sentences(paragraph)]
    return train, held_out


def train_tokenizer(texts: Iterable[str], vocab_size: int, marks: Sequence[str] = ()) -> Tokenizer:
    """A byte-level BPE tokenizer: any UTF-8 text encodes, and decodes to itself. `marks` are its last tokens, which are
    text: decoding keeps them where it skips special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(marks),
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in marks])
    return tokenizer


@torch.no_grad()
def take_blocks(model: PreTrainedModel, tokenizer: Tokenizer, trained: Edition) -> None:
    """Begin with the blocks of a trained edition of the same sizes. A token's embedding is the mean over those that
    the trained edition has for its text."""
    older = AutoModelForCausalLM.from_pretrained(trained.folder, dtype=torch.float32)
    words = Tokenizer.from_file(str(trained.folder / "tokenizer.json"))
    embeddings = older.get_input_embeddings().weight
    model.model.layers.load_state_dict(older.model.layers.state_dict())
    model.model.norm.load_state_dict(older.model.norm.state_dict())
    for token, at in tokenizer.get_vocab().items():
        found = words.token_to_id(token)
        ids = [found] if found is not None else [part.id for part in words.model.tokenize(token)]
        model.get_input_embeddings().weight[at] = embeddings[ids].mean(0)


def makers(edition: Edition, args: argparse.Namespace) -> tuple[Tokenizer, SampleMaker, SampleMaker]:
    """The tokenizer, and the makers of rows for training and of rows held out. Raises CorpusError."""
    sentences, held_out = held_out_split(load_novels(args.cache, args.deb))
    lexicon = Lexicon.of(" ".join(sentences))
    if edition is EDITIONS["agent"]:
        library, library_held_out = Library.split()
        texts = tokenizer_texts(sentences, library)
        tokenizer = train_tokenizer(texts, edition.sizes["vocab_size"], MARKS)
        maker = AgentMaker(sentences, lexicon, tokenizer, random.Random(args.seed), library, edition.template)
        checker = AgentMaker(held_out, lexicon, tokenizer, random.Random(1), library_held_out, edition.template)
        return tokenizer, maker, checker
    if edition is EDITIONS["plain"]:
        tokenizer = train_tokenizer((" " + sentence for sentence in sentences), edition.sizes["vocab_size"])
    else:
        tokenizer = Tokenizer.from_file(str(EDITIONS["plain"].folder / "tokenizer.json"))
    maker = SampleMaker(sentences, lexicon, tokenizer, random.Random(args.seed))
    return tokenizer, maker, SampleMaker(held_out, lexicon, tokenizer, random.Random(args.seed))


def batch(
    maker: SampleMaker, rows: int, length: int, shares: Mapping[str, float] | None = None
) -> tuple[Tensor, Tensor]:
    """Token ids and labels, each of shape [rows, length]."""
    made = [maker.row(length, shares) for _ in range(rows)]
    return torch.tensor([r.ids for r in made]), torch.tensor([r.labels for r in made])


# --------------------------------------------------------------------------- optimisers


def orthogonalised(update: Tensor, steps: int = 5) -> Tensor:
    """The nearest matrix to `update` with all singular values near one (Newton-Schulz)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    wide = update.size(0) <= update.size(1)
    x: Tensor = update if wide else update.T
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = x if wide else x.T
    return result


class Muon(torch.optim.Optimizer):
    """Momentum whose updates are orthogonalised; for the weight matrices of the blocks.

    torch.optim.Muon is the same method, but computes in bfloat16, which is slow on CPUs
    without instructions for it.
    """

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": 0.02})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter once."""
        for group in self.param_groups:
            for weight in group["params"]:
                momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                momentum.lerp_(weight.grad, 1 - group["momentum"])
                update = orthogonalised(weight.grad.lerp(momentum, group["momentum"]))
                scale = max(1.0, weight.size(0) / weight.size(1)) ** 0.5
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(update, alpha=-group["lr"] * scale)


def optimizers(model: PreTrainedModel) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks, AdamW for the embedding and the norms."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    adam = torch.optim.AdamW(others, lr=4e-3, betas=(0.9, 0.95), weight_decay=0.0)
    return [Muon(matrices, lr=0.02), adam]


def rate(done: float) -> float:
    """The learning rate, relative to its peak, when this share of the run is done."""
    return min(1.0, done / 0.02, max(0.0, (1.0 - done) / 0.6))


# --------------------------------------------------------------------------- training


def next_token_loss(model: PreTrainedModel, ids: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of the next token over the labelled positions; skips other logits."""
    hidden: Tensor = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    targets = labels[:, 1:]
    chosen = targets != IGNORE
    logits: Tensor = model.lm_head(hidden[chosen])
    return torch.nn.functional.cross_entropy(logits, targets[chosen])


def repeats(tokens: list[int], size: int = 5) -> list[bool]:
    """For each token, whether it completes an n-gram that has occurred before."""
    seen: set[tuple[int, ...]] = set()
    flags = []
    for at in range(len(tokens)):
        gram = tuple(tokens[max(0, at + 1 - size) : at + 1])
        flags.append(len(gram) == size and gram in seen)
        seen.add(gram)
    return flags


def repetition_loss(model: PreTrainedModel, maker: SampleMaker) -> Tensor:
    """The unlikelihood of what the model repeats when it answers greedily.

    A small model falls into loops at temperature zero. Here it answers a few questions,
    and the tokens that complete a repeated n-gram are made less likely (Welleck et al.,
    "Neural Text Generation with Unlikelihood Training", 2019).
    """
    prompts = torch.tensor(maker.questions(8))
    with torch.no_grad():
        ids = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=64,
            do_sample=False,
        )
    answers = ids[:, prompts.size(1) :]
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits[:, prompts.size(1) - 1 :]
    chosen = logits.softmax(-1).gather(-1, answers[..., None])[..., 0]
    penalty = -torch.log1p(-chosen.clamp(max=0.999))
    flags = torch.tensor([repeats(row) for row in answers.tolist()])
    flags &= answers != SPECIAL_TOKENS.index("<|pad|>")
    return penalty[flags].sum() / flags.numel()


@torch.no_grad()
def evaluate(model: PreTrainedModel, batches: list[tuple[Tensor, Tensor]]) -> float:
    """The mean loss over fixed batches."""
    model.eval()
    losses = [next_token_loss(model, ids, labels).item() for ids, labels in batches]
    model.train()
    return sum(losses) / len(losses)


def train(
    model: PreTrainedModel,
    maker: SampleMaker,
    validation: dict[str, list[tuple[Tensor, Tensor]]],
    checkpoint: Callable[[], None],
    args: argparse.Namespace,
) -> dict[str, float]:
    """Train until the budget is spent, with a checkpoint after each validation.

    Returns what the run measured.
    """
    rows = EDITIONS[args.edition].rows
    optims = optimizers(model)
    peaks = [[g["lr"] for g in o.param_groups] for o in optims]
    start = time.monotonic()
    step = tokens = 0
    average = math.nan
    looping = torch.zeros(())
    while True:
        minutes = (time.monotonic() - start) / 60
        done = step / args.steps if args.steps else minutes / args.minutes
        if done >= 1:
            break
        done = args.resume_at + (1 - args.resume_at) * done
        for optim, lrs in zip(optims, peaks, strict=True):
            for group, lr in zip(optim.param_groups, lrs, strict=True):
                group["lr"] = lr * rate(done)
        (length,) = maker.rng.choices(list(rows), list(rows.values()))
        ids, labels = batch(maker, max(1, args.batch_tokens // length), length)
        loss = next_token_loss(model, ids, labels)
        torch.autograd.backward(loss)
        if done > 0.6 and step % 4 == 0:
            looping = repetition_loss(model, maker)
            torch.autograd.backward(3.0 * looping)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optim in optims:
            optim.step()
            optim.zero_grad()
        step += 1
        tokens += ids.numel()
        average = loss.item() if math.isnan(average) else 0.98 * average + 0.02 * loss.item()
        if step % 20 == 0:
            speed = tokens / (time.monotonic() - start)
            print(
                f"step {step:5d}  {100 * done:5.1f}%  loss {loss.item():.3f}  "
                f"average {average:.3f}  loops {looping.item():.3f}  {speed:.0f} tok/s",
                flush=True,
            )
        if step % args.eval_every == 0:
            report(model, validation)
            checkpoint()
    return {"steps": step, "tokens": tokens, "minutes": minutes, "train_loss": average}


def report(model: PreTrainedModel, validation: dict[str, list[tuple[Tensor, Tensor]]]) -> dict[str, float]:
    """Print and return the validation losses."""
    losses = {f"val_{name}": evaluate(model, batches) for name, batches in validation.items()}
    print("  ".join(f"{name} {loss:.3f}" for name, loss in losses.items()), flush=True)
    return losses


@torch.no_grad()
def by_position(model: PreTrainedModel, maker: SampleMaker, kind: str, length: int) -> dict[str, float]:
    """The mean loss of one row of `length` tokens, by ranges of positions."""
    ids, labels = batch(maker, 1, length, {kind: 1})
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    ends = [1024 * 4**power for power in range(8) if 1024 * 4**power < length] + [length]
    found = {}
    for start, end in zip([0, *ends], ends, strict=False):
        chosen = labels[0, start + 1 : end] != IGNORE
        logits = model.lm_head(hidden[0, start : end - 1][chosen])
        loss = torch.nn.functional.cross_entropy(logits, labels[0, start + 1 : end][chosen])
        found[f"{start} to {end - 1}"] = round(loss.item(), 3)
    return found


# --------------------------------------------------------------------------- saving


def save(model: PreTrainedModel, tokenizer: Tokenizer, edition: Edition, out: Path) -> None:
    """Write the model (in bfloat16) and the tokenizer into a folder."""
    out.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.pad_token_id,
    )
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|end|>",
        "pad_token": "<|pad|>",
        "additional_special_tokens": ["<|system|>", "<|user|>", "<|assistant|>"],
        "model_max_length": edition.sizes["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
    }
    if edition.template == CHAT_TEMPLATE:
        settings["chat_template"] = CHAT_TEMPLATE
    else:
        hermes = json.loads((RESPONSE_TEMPLATES / "hermes.json").read_text(encoding="utf-8"))["template"]
        settings["response_template"] = hermes | {"start_anchor": "<|assistant|>"}
        (out / "chat_template.jinja").write_text(edition.template, encoding="utf-8")
    text = json.dumps(settings, indent=2, ensure_ascii=False)
    (out / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def show_samples(model: PreTrainedModel, out: Path) -> None:
    """Print greedy answers of the saved model to a few questions."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(out)
    for question in ["Tell me about Mr. Darcy.", "What happened at the ball?", "Hello!"]:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        answer = model.generate(**prompt, max_new_tokens=150, do_sample=False)
        text = tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
        print(f"> {question}\n{text}\n", flush=True)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cache = Path(tempfile.gettempdir()) / "quire-corpus"
    parser.add_argument("--edition", choices=EDITIONS, default="plain", help="which model to train")
    parser.add_argument("--out", type=Path, help="folder for the model, in place of the edition's own")
    parser.add_argument("--cache", type=Path, default=cache, help="folder for the corpus package")
    parser.add_argument("--deb", type=Path, help="the corpus package, if already downloaded")
    parser.add_argument("--minutes", type=float, default=40.0, help="time to train for")
    parser.add_argument("--steps", type=int, help="train for this many steps instead")
    parser.add_argument(
        "--resume-at",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="go on from the weights in the folder, this share (0 to 1) into the schedule",
    )
    parser.add_argument("--batch-tokens", type=int, default=4096, help="tokens in a step")
    parser.add_argument("--eval-every", type=int, default=200, help="steps between validations")
    parser.add_argument("--seed", type=int, default=1813, help="seed of all randomness")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads to use")
    return parser.parse_args()


def main() -> int:
    """Fetch, train, measure, save."""
    args = arguments()
    edition = EDITIONS[args.edition]
    out: Path = args.out or edition.folder
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    try:
        tokenizer, maker, checker = makers(edition, args)
    except CorpusError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    validation = {kind: [batch(checker, 4, 512, {kind: 1}) for _ in range(6)] for kind in checker.SHARES}
    if args.resume_at:
        model = AutoModelForCausalLM.from_pretrained(
            out, dtype=torch.float32, attn_implementation=edition.attention
        ).train()
    else:
        model = edition.new_model()
        if edition.begins_as:
            take_blocks(model, tokenizer, EDITIONS[edition.begins_as])
    print(f"{sum(p.numel() for p in model.parameters())} parameters", flush=True)
    measured = train(model, maker, validation, lambda: save(model, tokenizer, edition, out), args)
    save(model, tokenizer, edition, out)
    saved = AutoModelForCausalLM.from_pretrained(  # rounded to bfloat16
        out, dtype=torch.float32, attn_implementation=edition.attention
    )
    measured |= report(saved, validation)
    print(json.dumps(measured, indent=2))
    if edition is EDITIONS["agent"]:
        longest = max(edition.rows)
        ranges = {kind: by_position(saved, checker, kind, longest) for kind in checker.SHARES}
        print(json.dumps(ranges, indent=2), flush=True)
    show_samples(saved, out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
