"""The rows of `metadata.py`: what is measured, at which sizes, and what is to be reached."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.bookkeeping.workloads import Sizes

PAGES = (1, 16, 64)
FAMILIES = {
    "sglang": ("sglang-rust", "sglang-python"),
    "cpp": ("cpp",),
    "vllm": ("vllm",),
    "nano": ("nano",),
    "vllmcpu": ("vllmcpu",),
}
KINDS = ("full", "full+window", "full+state")

PEERS_OF_REPLAYS = {1: ("sglang", "cpp"), 16: ("sglang", "vllm"), 64: ("sglang", "vllm", "nano")}
"""By page size: vLLM has no block of one token, nano-vllm wants large ones, SGLang 0.5.12 has pages on GPUs only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row. `goals` says by how much Quire is to be faster than the fastest system of a family (`best`: of all).

    `relative` compares with an earlier row instead: Quire may take at most that many times as long as there, and
    `at_most` with a figure. `expect` is what every sample of Quire must have found.
    """

    name: str
    label: str
    operation: str
    arguments: dict[str, Any]
    peers: tuple[str, ...] = ()
    """Families that do the same work."""
    goals: dict[str, float] = field(default_factory=dict)
    relative: tuple[str, float] | None = None
    at_most: float | None = None
    expect: dict[str, Any] = field(default_factory=dict)
    unit: str = "us"
    """What the figure is: CPU microseconds of one operation, or how many of something."""
    repeats: int = 1_000
    """At most so many samples."""

    @property
    def page(self) -> int:
        """Tokens per page."""
        page: int = self.arguments["page"]
        return page


def cases(sizes: Sizes, traces: dict[str, Path], others: dict[str, Path]) -> list[Case]:
    """All rows; those that share a tree are neighbours. `others` are the folder of a `model` for whole engines and the
    file of a `mooncake` trace, where there are any."""
    return [*_steps(sizes, others), *_trees(sizes), *_pools(sizes), *_replays(traces, others)]


def _steps(sizes: Sizes, others: dict[str, Path]) -> Iterator[Case]:
    for page in (16, 64):
        for kind in KINDS:
            for running in sizes.step_running:
                yield _step(kind, page, running, sizes)
    many = sizes.step_running[-2]
    for kind in KINDS:
        yield Case(
            name=f"turnover-{kind}-{many}",
            label=f"whole step of {many}, {kind}, in which one ends and another of {sizes.step_prompt} tokens begins",
            operation="turnover",
            arguments={"page": 16, "kind": kind, "running": many},
            peers=("vllm",),
            goals={"vllm": 5.0} if kind == "full" else {},
            expect={"running": many},
        )
    for kind in KINDS:
        yield Case(
            name=f"calls-{kind}-{many}",
            label=f"Python functions called in that step, {many} running, {kind}",
            operation="step_calls",
            arguments={"page": 16, "kind": kind, "running": many},
            peers=("vllm",),
            at_most=300 if kind == "full" else None,
            expect={"running": many},
            unit="calls",
            repeats=2,
        )
    for kind in KINDS:
        for running in sizes.step_running if kind == "full" else (many,):
            yield Case(
                name=f"engine-step-{kind}-{running}",
                label=f"EngineCore.step of {running} decodes, {kind}: with sampler and outputs",
                operation="engine_step",
                arguments={"page": 16, "kind": kind, "running": running},
                at_most=2_500 if (kind, running) == ("full", 256) else None,
                expect={"running": running},
            )
    yield Case(
        name="followers",
        label=f"schedule() while {sizes.followers} wait for a prompt of {sizes.led:,}, median call",
        operation="followers",
        arguments={"page": 16},
        at_most=500,
        expect={"waiting": sizes.followers},
    )
    if "model" in others:
        yield Case(
            name="llm_step",
            label=f"decode step of a whole LLM, {sizes.running} running, 2 layers",
            operation="llm_step",
            arguments={"page": 16, "folder": str(others["model"])},
            peers=("vllmcpu",),
            at_most=8_000,
            expect={"tokens": sizes.running * (1 + sizes.llm_steps)},
            repeats=7,
        )


def _step(kind: str, page: int, running: int, sizes: Sizes) -> Case:
    many = sizes.step_running[-2]
    relative = (f"step-full-{running}-{page}", 1.3) if kind != "full" and running == many else None
    if kind == "full" and running == sizes.step_running[-1]:
        relative = (f"step-full-{many}-{page}", 4.5)
    return Case(
        name=f"step-{kind}-{running}-{page}",
        label=f"whole step of {running} decodes without the model, {kind}",
        operation="step",
        arguments={"page": page, "kind": kind, "running": running},
        peers=("vllm",),
        goals={"vllm": 5.0} if running == many else {},
        relative=relative,
        at_most=400 if (kind, running, page) == ("full", 256, 16) else None,
        expect={"running": running},
    )


def _trees(sizes: Sizes) -> Iterator[Case]:
    longest = sizes.lengths[-1]
    for page in PAGES:
        for length in sizes.lengths:
            goals = {"best": 2.0} | ({"vllm": 100.0} if page == 16 and length == longest else {})
            yield Case(
                name=f"match-{length}-{page}",
                label=f"match {length:,} tokens over nodes of {sizes.node}, page ids out",
                operation="match",
                arguments={"page": page, "length": length},
                peers=("sglang", "cpp", "vllm") if page > 1 else ("sglang", "cpp"),
                goals=goals,
                expect={"tokens": length},
            )
        yield Case(
            name=f"match-edge-{page}",
            label=f"match {sizes.chain:,} tokens in one edge",
            operation="match_edge",
            arguments={"page": page},
            peers=("sglang", "cpp"),
            goals={"best": 8.0},
            expect={"tokens": sizes.chain},
        )
        yield Case(
            name=f"insert-{page}",
            label=f"insert {sizes.node} tokens under {sizes.under:,}",
            operation="insert",
            arguments={"page": page},
            peers=("sglang", "cpp"),
            goals={"best": 2.0},
            expect={"tokens": sizes.node},
        )
        yield Case(
            name=f"insert-again-{page}",
            label=f"insert {sizes.chain:,} cached tokens again, giving one's own back",
            operation="insert_again",
            arguments={"page": page},
            peers=("sglang", "cpp"),
            goals={"best": 2.0 if page > 1 else 1.2},
            expect={"tokens": sizes.chain},
        )
        for count in sizes.evict:
            yield Case(
                name=f"evict-{count}-{page}",
                label=f"evict {count:,} tokens of a full pool, per token evicted",
                operation="evict",
                arguments={"page": page, "count": count},
                peers=("sglang", "cpp"),
                goals={"best": 4.0},
                expect={"tokens": count},
            )
    yield Case(
        name="evict-pause",
        label=f"longest of {sizes.pauses:,} `extend` by 256 tokens in a full pool, density",
        operation="evict_pause",
        arguments={"page": 16},
        at_most=1_000,
    )


def _pools(sizes: Sizes) -> Iterator[Case]:
    few, pages = sizes.many_nodes // 100, min(128, sizes.many_nodes // 1_000 * 8)
    for nodes in (few, sizes.many_nodes):
        yield Case(
            name=f"evict-nodes-{nodes}",
            label=f"evict {pages} pages of a tree with {nodes:,} nodes, per page",
            operation="evict_many",
            arguments={"page": 16, "nodes": nodes, "pages": min(pages, few // 4)},
            relative=None if nodes == few else (f"evict-nodes-{few}", 1.5),
            expect={"pages": min(pages, few // 4)},
        )
    for verb in ("finish", "allocator"):
        yield Case(
            name=f"free-{verb}",
            label=f"free {sizes.freed} tokens of a pool of {sizes.big_pool:,}"
            + (", the request's end included" if verb == "finish" else ", allocator alone"),
            operation="free",
            arguments={"page": 1, "verb": verb},
            peers=("sglang",),
            goals={"sglang": 200.0},
            expect={"lost": 0},
        )
    count, length = sizes.extended
    yield Case(
        name="extend",
        label=f"extend {count} requests by {length:,}, rows written, slots out",
        operation="extend",
        arguments={"page": 64},
        peers=("sglang", "vllm"),
        goals={"sglang": 15.0},
        expect={"tokens": count * length},
    )
    for page in (16, 64):
        yield Case(
            name=f"decode-{page}",
            label=f"cache calls of a decode step of {sizes.running}, nothing cached, rows written, slots out",
            operation="decode",
            arguments={"page": page, "kind": "full", "commits": False},
            peers=("sglang",),
            goals={"sglang": 4.0},
            expect={"slots": sizes.running},
        )
        for kind in KINDS:
            yield Case(
                name=f"decode-commit-{kind}-{page}",
                label=f"cache calls of a decode step of {sizes.running}, {kind}, full pages cached at once",
                operation="decode",
                arguments={"page": page, "kind": kind, "commits": True},
                peers=("vllm",),
                goals={"vllm": 5.0} if kind == "full" else {},
                relative=None if kind == "full" else (f"decode-commit-full-{page}", 2.0),
                expect={"slots": sizes.running},
            )
    told = {"off": "off", "on": "on, the step's thread", "read": "on, every key made, in any thread"}
    for events, words in told.items():
        yield Case(
            name=f"admit-{events}",
            label=f"admit {sizes.admitted:,} tokens cold, evicting, KV events {words}",
            operation="admit",
            arguments={"page": 16, "events": events},
            peers=() if events == "on" else ("vllm",),  # its own step makes its keys
            goals={"vllm": 60.0} if events == "read" else {},
            relative=("admit-off", 1.1) if events == "on" else None,
            expect={"tokens": sizes.admitted} | ({"hashes": 2 * sizes.admitted // 16} if events != "off" else {}),
        )


def _replays(traces: dict[str, Path], others: dict[str, Path]) -> Iterator[Case]:
    for trace, path in traces.items():
        for page in PAGES:
            yield Case(
                name=f"replay-{trace}-{page}",
                label=f"replay '{trace}', one token a step, per request",
                operation="replay",
                arguments={"page": page, "trace": str(path)},
                peers=PEERS_OF_REPLAYS[page],
                goals={"best": 2.0 if page == 64 and "sessions" in trace else 3.0},
                repeats=3,
            )
    if "mooncake" in others:
        yield Case(
            name="replay-mooncake",
            label="`quire replay` of the Mooncake conversation trace, a process",
            operation="replay_command",
            arguments={"page": 16, "trace": str(others["mooncake"])},
            at_most=30e6,
            expect={"answered": True},
            repeats=1,
        )
