"""The options of `quire plan`, by what they are about."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

SWEEPS = ("context", "concurrency", "dtype", "page-size", "tp")


def _about(panel: str, text: str, *names: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel)


def _budget(text: str, *names: str) -> Any:
    return _about("Budget", text, *names)


def _load(text: str, *names: str) -> Any:
    return _about("Load", text, *names)


def _split(text: str, *names: str) -> Any:
    return _about("Split between pools", text, *names)


def _ranks(text: str) -> Any:
    return _about("Parallelism", text)


def _draft(text: str) -> Any:
    return _about("Speculation", text)


def _output(text: str, *names: str) -> Any:
    return _about("Output", text, *names)


_PREFIXES = ("--prefix-caching/--no-prefix-caching",)
_WINDOWS = ("--window-pool/--no-window-pool",)
_COMPARE = "Two models side by side; settings may follow a comma: llama-3.1-8b,kv-dtype=fp8."

Model = Annotated[
    str | None,
    typer.Argument(
        help="A name in the catalogue, a bundled model, a config.json or its folder, or a hub id.", show_default=False
    ),
]
KvMemory = Annotated[str | None, _budget("Exactly the bytes that the pools of a rank may take: 40GiB.")]
Gpu = Annotated[str | None, _budget("A device by name: h100-80gb. The pools get what the rest leaves.")]
DeviceMemory = Annotated[str | None, _budget("The device's memory, where its name is not known: 80GiB.")]
MemFraction = Annotated[float | None, _budget("Share of the device for weights and pools; printed back in bytes.")]
Weights = Annotated[str | None, _budget("Bytes of weights on a rank, instead of the estimate.")]
Measure = Annotated[bool, _budget("Load the model here and measure instead of estimating.", "--measure")]
KvDtype = Annotated[str | None, _budget("auto, fp8_e4m3, fp8_e5m2, mxfp8, nvfp4 or fp4_e2m1. (default: auto)")]
Dtype = Annotated[str | None, _budget("The model's dtype, where its configuration names none.")]
StateDtype = Annotated[str | None, _budget("Element type of recurrent states. (default: float32)")]
PageSize = Annotated[int | None, _budget("Tokens in a page. (default: 16)")]

Context = Annotated[str | None, _load("Longest request, in tokens: 32k. (default: the model's)")]
Concurrency = Annotated[int | None, _load("Requests of that length that must fit at once. (default: 1)")]
InputTokens = Annotated[str | None, _load("Tokens of an expected prompt.")]
OutputTokens = Annotated[str | None, _load("Tokens of an expected answer.")]
Trace = Annotated[Path | None, _load("Expected requests, from a trace: JSON lines or CSV.")]
Chunk = Annotated[int | None, _load("Tokens of one step. (default: 2048)", "--max-num-batched-tokens")]
Shares = Annotated[bool, _load("Keep finished prefixes.", *_PREFIXES)]

SwaRatio = Annotated[float | None, _split("Window tokens per full token. (default: from the load)")]
MambaRatio = Annotated[float | None, _split("Bytes of state per other byte. (default: from the load)")]
MambaSize = Annotated[int | None, _split("State slots. (default: from the load)")]
MaxTokens = Annotated[int | None, _split("At most this many tokens; every pool follows.")]
WindowPool = Annotated[bool, _split("Windows have a pool of their own.", *_WINDOWS)]

Tp = Annotated[int | None, _ranks("Tensor parallelism.")]
Pp = Annotated[int | None, _ranks("Pipeline stages.")]
PpLayers = Annotated[str | None, _ranks("Layers of each stage: 20,20,24.")]
Dp = Annotated[int | None, _ranks("Attention groups among the tp ranks.")]
Dcp = Annotated[int | None, _ranks("Ranks that share a page's tokens.")]

Steps = Annotated[int | None, _draft("Depth of a draft.")]
TopK = Annotated[int | None, _draft("Branches of a draft. (default: 1)")]
DraftTokens = Annotated[int | None, _draft("Tokens verified at once. (default: one more than the depth)")]
DraftLayers = Annotated[int | None, _draft("Draft layers with keys and values. (default: 1)")]

Why = Annotated[bool, _output("Explain each line by its formula.", "--why")]
Sweep = Annotated[str | None, _output(f"Vary one thing: {', '.join(SWEEPS)}.")]
Values = Annotated[str | None, _output("The values to sweep: 4k,8k,16k.")]
Plot = Annotated[Path | None, _output("Draw the sweep into a PNG or SVG file.")]
Compare = Annotated[tuple[str, str] | None, _output(_COMPARE)]
Names = Annotated[bool, _output("Print the catalogue.", "--list")]
