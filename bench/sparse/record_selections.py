"""Writes what the indexer of a model selects while it generates, as a file.

python -m bench.sparse.record_selections TEXT --model FOLDER --out FILE
"""

from __future__ import annotations

from pathlib import Path

import typer
from rich.console import Console

from quire.cli.command import command
from quire.cli.report import Report
from quire.engine.config import EngineConfig
from quire.errors import InvalidInput
from quire.settings.setting import Settings, setting

app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode="rich")


class Recording(Settings):
    """The requests whose selections are recorded."""

    text: Path = setting(..., "A text file, from which prompts are cut at even distances.", argument=True)
    out: Path = setting(..., "The npz file to write.", group="Output")
    requests: int = setting(4, "Prompts, all of which run at once.", ge=1)
    prompt_tokens: int = setting(512, "Tokens of each prompt.", ge=1)
    max_tokens: int = setting(128, "Tokens generated after each.", ge=1)


@command(app)
def record_selections(recording: Recording, engine: EngineConfig) -> Report:
    """Generate, and write which tokens the indexer of a model selects in each step.

    For models with sparse latent attention, or with `"selection": "page_bounds"` in --hisparse. `quire replay
    --hisparse` reads the file. Prints how many of the selected tokens hot buffers of some sizes would have had, and how
    many the best possible buffers would.

    [dim]Example:[/dim] python -m bench.sparse.record_selections README.md --model FOLDER --out selections.npz
    """
    with Console(stderr=True).status(f"Loading {engine.model_name} ..."):
        from bench.sparse.drawn import lru_hits

        from quire.client.llm import LLM
        from quire.scheduler.sampling_params import SamplingParams
        from quire.sim.selections import SelectionRecorder, optimal_hits

        llm = LLM(show_plan=False, **{**engine.model_dump(), "hisparse": engine.hisparse or {}})
    with llm:
        assert llm.tokenizer is not None and llm.engine.latents is not None
        tokens = llm.tokenizer.encode(recording.text.read_text())
        spare = len(tokens) - recording.prompt_tokens
        if spare < 0:
            raise InvalidInput(
                f"{recording.text} has {len(tokens):,} tokens, and a prompt has {recording.prompt_tokens:,}.",
                fix="give a longer text, or fewer --prompt-tokens.",
            )
        starts = [at * spare // recording.requests for at in range(recording.requests)]
        coordinator = llm.engine.latents.coordinator
        coordinator.hot = recorder = SelectionRecorder(coordinator.hot)
        llm.generate(
            [{"prompt_token_ids": tokens[start : start + recording.prompt_tokens]} for start in starts],
            SamplingParams(temperature=0, max_tokens=recording.max_tokens, ignore_eos=True),
        )
    found = recorder.selections()
    found.save(recording.out)
    top_k = found.positions.shape[1]
    rates = [
        {"buffer": size, "lru": lru_hits(found, size).rate, "optimum": optimal_hits(found, size).rate}
        for size in (top_k, 2 * top_k, 4 * top_k)
    ]
    summary = f"{len(found.step):,} selections of {found.num_requests} requests by {found.num_indexes} indexers"

    def shown() -> list[str]:
        lines = [f"buffer of {r['buffer']:,}: {r['lru']:.3f} of {r['optimum']:.3f} possible" for r in rates]
        return [f"{summary}, at most {top_k:,} tokens each: {recording.out}", *lines]

    return Report({"file": str(recording.out), "rows": len(found.step), "top_k": top_k, "hit_rates": rates}, shown)


if __name__ == "__main__":
    app()
