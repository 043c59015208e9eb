"""The largest logit difference between the engine and plain `transformers`, per architecture: docs/guides/hybrids.md.

    python -m tests.engine.logit_differences         measures all and writes bench/results/logit-differences.json

Through the whole engine: prompts in mixed, chunked batches, cold and then warm. Every drawn token's logits are compared
with those of transformers' own forward pass, with eager attention and no cache, on the same tokens. Twice: with native
kernels, packed weights and fused layers, which is the default, and with torch's operators on plain weights.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.engine.core import EngineCore
from quire.engine.device.sampler import Drawn, Prepared, Proposal, Sampler
from quire.models.hf import LoadedModel
from quire.scheduler.step import Places
from quire.spec.group import GroupSpec
from quire.spec.model import ModelSpec
from tests.engine.running import core_for, run, shared_prompts
from tests.engine.test_hybrid_tokens import GREEDY, PROMPTS, SERVED, build
from tests.tiny_hybrids import HYBRIDS, build_hybrid
from tests.tiny_latents import LATENTS
from tests.tiny_models import _SIZES, VOCAB_SIZE

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results" / "logit-differences.json"
COMPRESSED = "deepseek_v4"  # its pages hold 128 tokens at least
LONG_PROMPTS = shared_prompts(7, shared=150, tails=(3, 20, 110), vocabulary=VOCAB_SIZE)
MODELS = tuple(sorted((*SERVED, COMPRESSED)))
REUSED = {
    "full": "all pages",
    "window": "pages of the last {tokens} tokens",
    "chunk": "pages of the chunk of {tokens} tokens",
    "state": "the state at a page's end",
}


class _Listener(Sampler):
    """A sampler that remembers the logits each request's tokens were drawn from."""

    def __init__(self, core: EngineCore) -> None:
        super().__init__(core.eos_token_ids, core.config.seed)
        self.heard: dict[str, list[Tensor]] = {}

    def draw(
        self, logits: Tensor, places: Places, proposals: Sequence[Proposal] = (), prepared: Prepared | None = None
    ) -> Drawn:
        for row, request in zip(logits, places.requests, strict=True):
            self.heard.setdefault(request.request_id, []).append(row.clone())
        return super().draw(logits, places, proposals, prepared)


def largest_difference(name: str, *, native: bool = True) -> tuple[float, float]:
    """The largest difference of a logit, and the standard deviation of logits to compare it with."""
    compressed = name == COMPRESSED
    model = LoadedModel(build_hybrid(name, index_n_heads=8) if compressed else build(name), name=name, pack=native)
    prompts = LONG_PROMPTS if compressed else PROMPTS
    core = core_for(
        model,
        page_size=None if compressed else 16,
        max_num_batched_tokens=50,
        overlap=False,
        attention_backend="native" if native else "torch",
    )
    listener = _Listener(core)
    core.runner._sampler = listener
    differences, spread = [], 0.0
    for turn in ("cold", "warm"):
        outputs = run(core, prompts, GREEDY, turn)
        for index, (prompt, tokens) in enumerate(zip(prompts, outputs, strict=True)):
            found = torch.stack(listener.heard[f"{turn}-{index}"])
            plain = model.plain_logits(torch.tensor([*prompt, *tokens[:-1]]))[len(prompt) - 1 :]
            differences.append(float((found - plain).abs().max()))
            spread = float(plain.std())
    assert core.statistics()["hit_tokens"] > 0
    return max(differences), spread


def table() -> str:
    """The table in docs/guides/hybrids.md, from what was measured and what planning says of each model."""
    measured: dict[str, Any] = json.loads(RESULTS.read_text())["models"]
    lines = [
        "| tiny model | pools by group | what a hit reuses | max logit difference | by torch's operators |",
        "|---|---|---|---|---|",
    ]
    for name in MODELS:
        groups = ModelSpec.from_config({**_SIZES, **{**HYBRIDS, **LATENTS}[name]}).groups(256)
        pools = "; ".join(f"{group.name}: {', '.join(_fields(group))}" for group in groups)
        reused = "; ".join(dict.fromkeys(REUSED[g.reach.kind].format(tokens=g.reach.tokens) for g in groups))
        found, plain = (f"{measured[name][key]:.1e}" for key in ("difference", "torch_difference"))
        lines.append(f"| `{name}` | {pools} | {reused} | {found} | {plain} |")
    return "\n".join(lines)


def _fields(group: GroupSpec) -> list[str]:
    return list(dict.fromkeys(field.name for field in group.layout.fields))


def main() -> None:
    """Measure every model."""
    from rich.progress import track

    models = {}
    for name in track(MODELS, description="models"):
        difference, spread = largest_difference(name)
        plain, _ = largest_difference(name, native=False)
        models[name] = {"difference": difference, "torch_difference": plain, "logit_deviation": spread}
    threads = torch.get_num_threads()  # sums depend on them
    found = {"dtype": "float32", "device": "cpu", "torch": torch.__version__, "threads": threads, "models": models}
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    for key in ("difference", "torch_difference"):
        worst = max(models, key=lambda name: models[name][key])
        ratios = [each["difference"] / each["torch_difference"] for each in models.values()]
        print(f"{len(models)} models; the largest {key} is {models[worst][key]:.1e} ({worst})")
    print(f"native beside torch: {statistics.median(ratios):.2f} at the median, {max(ratios):.2f} at most")


if __name__ == "__main__":
    main()
