"""nano-vllm's `BlockManager` and `Sequence`, untouched, from its port `nano-vllm-npu`; nano-vllm itself has no release.

Their modules run without their package, which would import the port's device. Tokens enter as lists.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from bench.bookkeeping.workloads import Arrival, Sizes
from bench.peers.metadata_worker import Operation, replay, trace_of


def _without_its_init(name: str) -> None:
    spec = importlib.util.find_spec(name)
    assert spec is not None
    module = ModuleType(name)
    module.__path__ = list(spec.submodule_search_locations or ())
    sys.modules[name] = module


_without_its_init("nanovllmnpu")

from nanovllmnpu.engine.block_manager import BlockManager  # noqa: E402
from nanovllmnpu.engine.sequence import Sequence as NanoSequence  # noqa: E402


class System:
    """Generators as `metadata_worker` describes them."""

    OPERATIONS = frozenset(("replay",))

    def replay(self, sizes: Sizes, page: int, trace: str) -> Operation:
        """A whole trace, from an empty cache."""
        requests = trace_of(trace)
        NanoSequence.block_size = page
        yield {}
        while True:
            manager = BlockManager(sizes.replay_pool // page, page)
            yield replay(requests, Serving(requests, manager, page), sizes.replay_running)


class Serving:
    """nano-vllm in the loop of a replay. A block is cached, by a 64-bit hash, when it is allocated or filled."""

    def __init__(self, trace: list[Arrival], manager: BlockManager, page: int) -> None:
        self._manager = manager
        self._page = page
        self._prompts = [request.prompt.tolist() for request in trace]
        self._outputs = [request.output.tolist() for request in trace]
        self._sequences: dict[int, Any] = {}

    def admit(self, index: int) -> int:
        """`Sequence`, `can_allocate`, which asks for room as if nothing were cached, and `allocate`, which hashes."""
        sequence = NanoSequence(self._prompts[index])
        if not self._manager.can_allocate(sequence):
            return -1
        self._manager.allocate(sequence)
        self._sequences[index] = sequence
        most = (sequence.num_prompt_tokens - 1) // self._page * self._page
        return min(sequence.num_cached_tokens, most)

    def step(self, running: Sequence[int]) -> None:
        """`append_token`, `can_append` and `may_append`, one by one."""
        manager = self._manager
        for index in running:
            sequence = self._sequences[index]
            sequence.append_token(self._outputs[index][sequence.num_completion_tokens])
            if not manager.can_append(sequence):
                raise RuntimeError("the pool is too small for what runs at once")
            manager.may_append(sequence)

    def finish(self, indices: Sequence[int]) -> None:
        """`deallocate`."""
        for index in indices:
            self._manager.deallocate(self._sequences.pop(index))
