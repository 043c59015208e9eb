"""The work that `metadata.py` compares systems by, defined once: sizes, tokens, trees and request traces.

Needs numpy and nothing else, because it also runs in the interpreters of peers.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]
VOCABULARY = 128_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much of everything. The defaults are the sizes that goals are set for."""

    chains: int = 39
    """Prompts in the tree; each is cut into nodes, so that a tree of the defaults has 9,945 nodes."""
    chain: int = 65_536
    node: int = 512
    slack: int = 131_072
    """Tokens of the pool that the tree leaves free."""
    lengths: tuple[int, ...] = (1_024, 8_192, 65_536)
    under: int = 8_192
    evict: tuple[int, ...] = (256, 8_192)
    many_nodes: int = 1_000_000
    big_pool: int = 2_097_152
    freed: int = 256
    extended: tuple[int, int] = (32, 1_024)
    running: int = 256
    steps: int = 64
    """Decode steps in one sample, so that requests reach new pages as often as they do on average."""
    step_running: tuple[int, ...] = (1, 16, 64, 256, 1_024)
    """Requests that decode in the rows of whole steps."""
    step_prompt: int = 512
    followers: int = 200
    led: int = 16_384
    planned: int = 8_192
    """Tokens of each sequence whose attention is planned."""
    llm_steps: int = 64
    llm_prompt: int = 8
    pauses: int = 500
    """Steps of one sample of the row that looks for the longest one."""
    admitted: int = 65_536
    admit_pool: int = 1_048_576
    replay_pool: int = 262_144
    replay_running: int = 32
    replay_requests: int = 2_000


TOY = Sizes(
    chains=3,
    chain=2_048,
    node=128,
    slack=4_096,
    lengths=(256, 2_048),
    under=1_024,
    evict=(128, 1_024),
    many_nodes=2_000,
    big_pool=16_384,
    freed=256,
    extended=(4, 128),
    running=16,
    steps=16,
    step_running=(1, 8, 16),
    step_prompt=32,
    followers=8,
    led=5_000,
    planned=256,
    llm_steps=4,
    llm_prompt=8,
    pauses=40,
    admitted=2_048,
    admit_pool=8_192,
    replay_pool=32_768,
    replay_running=8,
    replay_requests=60,
)


def tokens(count: int, *name: object) -> Tokens:
    """`count` token ids that depend on `name` alone."""
    seed = [20, *(sum(ord(c) * 131**i for i, c in enumerate(str(part))) % 2**32 for part in name)]
    return np.random.default_rng(seed).integers(10, VOCABULARY, count, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Tree:
    """A radix tree as the prompts that make it, to be cached in this order.

    Each chain comes first, as one edge; then, for each of its node boundaries, the tokens up to there with another
    node behind them, which cuts the chain there:

        chain    |--node--|--node--|--node--| ...
        branches          \\-node   \\-node
    """

    sizes: Sizes

    @property
    def num_tokens(self) -> int:
        """Tokens that the tree caches."""
        return self.sizes.chains * (self.sizes.chain + (self.sizes.chain // self.sizes.node - 1) * self.sizes.node)

    @property
    def num_nodes(self) -> int:
        """Edges of the tree."""
        return self.sizes.chains * (2 * (self.sizes.chain // self.sizes.node) - 1)

    def chain(self, index: int) -> Tokens:
        """The tokens of a chain."""
        return tokens(self.sizes.chain, "chain", index)

    def prompts(self) -> Iterator[tuple[Tokens, int]]:
        """Every prompt, with how many of its tokens earlier ones have cached."""
        node = self.sizes.node
        for index in range(self.sizes.chains):
            chain = self.chain(index)
            yield chain, 0
            for start in range(node, self.sizes.chain, node):
                yield np.concatenate((chain[:start], tokens(node, "branch", index, start))), start


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace: it arrives at step `at`, or `after` steps behind the end of request `previous`."""

    prompt: Tokens
    output: Tokens
    previous: int
    at: int
    after: int


def read_trace(path: Path, count: int, steps_apart: int = 4) -> list[Arrival]:
    """The first `count` requests of a generator: a Python file whose `make_trace()` lists requests in order.

    Requests have `prompt` and `output`, a conversation (`conv` or `session`) and maybe `arrive` and `think`, in steps.
    Those without `arrive` come one every `steps_apart` steps, and never before the turn before them has ended.
    """
    return arrivals(list(module_of(path).make_trace())[:count], steps_apart)


def arrivals(requests: list[Any], steps_apart: int = 4) -> list[Arrival]:
    """Requests as `read_trace` describes them, with the turn before each looked up."""
    last: dict[int, int] = {}
    found = []
    for index, request in enumerate(requests):
        conversation = getattr(request, "conv", None)
        conversation = request.session if conversation is None else conversation
        at = getattr(request, "arrive", index * steps_apart)
        found.append(
            Arrival(
                np.asarray(request.prompt, dtype=np.int32),
                np.asarray(request.output, dtype=np.int32),
                last.get(conversation, -1),
                max(at, 0),
                getattr(request, "think", 0),
            )
        )
        last[conversation] = index
    return found


def made_up_trace(count: int) -> list[Arrival]:
    """A small trace of our own, for `--toy`: a few system prompts, conversations of three turns."""
    found: list[Arrival] = []
    for conversation in range(count // 3):
        history = tokens(300, "system", conversation % 4)
        for turn in range(3):
            prompt = np.concatenate((history, tokens(40 + 7 * (conversation % 5), "user", conversation, turn)))
            output = tokens(20 + conversation % 11, "answer", conversation, turn)
            found.append(Arrival(prompt, output, len(found) - 1 if turn else -1, 3 * conversation, 5))
            history = np.concatenate((prompt, output))
    return found


def save_trace(path: Path, trace: list[Arrival]) -> None:
    """Write a trace where workers read it."""
    np.savez(
        path,
        prompts=np.concatenate([request.prompt for request in trace]),
        outputs=np.concatenate([request.output for request in trace]),
        rows=np.array([(len(r.prompt), len(r.output), r.previous, r.at, r.after) for r in trace], dtype=np.int64),
    )


def load_trace(path: Path) -> list[Arrival]:
    """What `save_trace` wrote."""
    with np.load(path) as file:
        prompts, outputs, rows = file["prompts"], file["outputs"], file["rows"]
    ends = np.cumsum(rows[:, :2], axis=0)
    return [
        Arrival(prompts[end - length : end], outputs[last - new : last], previous, at, after)
        for (end, last), (length, new, previous, at, after) in zip(ends.tolist(), rows.tolist(), strict=True)
    ]


def ideal_hits(trace: list[Arrival], page: int) -> int:
    """Prompt tokens that a cache without limits finds, in whole pages and at most all but one of a prompt."""
    seen: set[bytes] = set()
    found = 0
    for request in trace:
        data = np.concatenate((request.prompt, request.output)).tobytes()
        name, names = 0, []
        for at in range(0, len(data) - 4 * page + 1, 4 * page):
            name = hash((name, data[at : at + 4 * page]))
            names.append(name)
        hits = 0
        for name in names[: (len(request.prompt) - 1) // page]:
            if name not in seen:
                break
            hits += page
        found += hits
        seen.update(names)  # type: ignore[arg-type]
    return found


def module_of(path: Path) -> ModuleType:
    """A Python file as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is not a Python file")
    import sys

    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
