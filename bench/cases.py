"""The rows of `metadata.py`: what is measured, at which sizes, and what is to be reached."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workloads import Sizes

PAGES = (1, 16, 64)
FAMILIES = {"sglang": ("sglang-rust", "sglang-python"), "cpp": ("cpp",), "vllm": ("vllm",), "nano": ("nano",)}

PEERS_OF_REPLAYS = {1: ("sglang", "cpp"), 16: ("sglang", "vllm"), 64: ("sglang", "vllm", "nano")}
"""By page size: vLLM has no block of one token, nano-vllm wants large ones, SGLang 0.5.12 has pages on GPUs only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row. `goals` says by how much Quire is to be faster than the fastest system of a family (`best`: of all).

    `relative` compares with an earlier row instead: Quire may take at most that many times as long as there. `expect`
    is what every sample of Quire must have found.
    """

    name: str
    label: str
    operation: str
    arguments: dict[str, Any]
    peers: tuple[str, ...] = ()
    """Families that do the same work."""
    goals: dict[str, float] = field(default_factory=dict)
    relative: tuple[str, float] | None = None
    expect: dict[str, Any] = field(default_factory=dict)
    per: str = "us"
    """What one operation is: the figure is microseconds of it."""

    @property
    def page(self) -> int:
        """Tokens per page."""
        page: int = self.arguments["page"]
        return page


def cases(sizes: Sizes, traces: dict[str, Path]) -> list[Case]:
    """All rows; those that share a tree are neighbours."""
    return [*_trees(sizes), *_pools(sizes), *_replays(traces)]


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
            goals={"best": 2.0},
            expect={"tokens": sizes.chain},
        )
        for count in sizes.evict:
            yield Case(
                name=f"evict-{count}-{page}",
                label=f"evict {count:,} tokens of a full pool",
                operation="evict",
                arguments={"page": page, "count": count},
                peers=("sglang", "cpp"),
                goals={"best": 4.0},
                expect={"tokens": count},
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
        for kind in ("full", "full+window", "full+state"):
            yield Case(
                name=f"decode-{kind}-{page}",
                label=f"decode step of {sizes.running} requests, {kind}, rows written, slots out",
                operation="decode",
                arguments={"page": page, "kind": kind},
                peers=("sglang", "vllm") if kind == "full" else ("vllm",),
                goals={"sglang": 4.0, "vllm": 60.0} if kind == "full" else {},
                relative=None if kind == "full" else (f"decode-full-{page}", 2.0),
                expect={"slots": sizes.running},
            )
    for events in ("off", "on", "read"):
        yield Case(
            name=f"admit-{events}",
            label=f"admit {sizes.admitted:,} tokens cold, evicting, KV events {events}",
            operation="admit",
            arguments={"page": 16, "events": events},
            peers=("vllm",) if events != "read" else (),
            goals={"vllm": 60.0} if events == "on" else {},
            relative=("admit-off", 1.1) if events == "on" else None,
            expect={"tokens": sizes.admitted} | ({"hashes": 2 * sizes.admitted // 16} if events == "read" else {}),
        )


def _replays(traces: dict[str, Path]) -> Iterator[Case]:
    for trace, path in traces.items():
        for page in PAGES:
            yield Case(
                name=f"replay-{trace}-{page}",
                label=f"replay '{trace}', one token a step, per request",
                operation="replay",
                arguments={"page": page, "trace": str(path)},
                peers=PEERS_OF_REPLAYS[page],
                goals={"best": 3.0},
            )
