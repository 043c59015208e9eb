"""Recorded operations on another engine's radix trees, replayed on Quire's: the same matches, locks and room.

Two differences are on purpose. Quire evicts what is asked for and not whole leaves (002); `Replay` asks for the rest.
Quire counts uses otherwise (020, `Uses`); so each log is replayed twice. In the recorded engine's order every length,
every amount evicted and every count of free, evictable and protected tokens agrees. In the order of Quire's own
policies what is evicted agrees in amount only, and the operations that find another length are counted. The
experimental tree (512:cpp) counts LRU uses as Quire does, and agrees throughout.
"""

from __future__ import annotations

import importlib.util
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from quire.prefix.evict import eviction_policy
from quire.prefix.node import Lease
from quire.spec.ids import Ids
from tests.golden.recorded import GOLDEN, Replay, Uses, load, needs_golden, recorded_order, result_of

pytestmark = needs_golden

_SLOTS = {"indices", "new"}  # which slots: docs/decisions/010


def differing(op: dict[str, Any], found: dict[str, Any], entry: dict[str, Any]) -> list[str]:
    """What differs between a result and the recorded one, except slots."""
    return [name for name in (found.keys() | entry.keys()) - _SLOTS if found.get(name) != entry.get(name)]


# 512:unified-py always evicts in the order of LRU.
@pytest.mark.parametrize(
    ("name", "impl", "order", "num_beyond"),
    [
        ("full_p1", "523:radix", "lru", 59),
        ("full_p16", "523:radix", "lru", 36),
        ("full_p16", "523:unified-rust", "lru", 36),
        ("full_p16", "512:radix", "lru", 36),
        ("full_p16", "512:unified-py", "lru", 36),
        ("full_p1_lfu", "523:radix", "lfu", 49),
        ("full_p1_lfu", "512:unified-py", "lru", 47),
        ("full_p1_slru", "523:radix", "slru", 49),
        ("full_p1_slru", "512:unified-py", "lru", 47),
        ("full_p1_priority", "523:radix", "priority", 47),
        ("full_p1_priority", "512:unified-py", "lru", 38),
    ],
)
def test_in_the_recorded_order_every_result_agrees(name: str, impl: str, order: str, num_beyond: int) -> None:
    recorded = load(f"radix_ops_{name}")
    case, uses = recorded["case"], Uses()
    replay = Replay(case["page"], case["pool"], recorded_order(order, uses), uses)
    for number, (op, entry) in enumerate(zip(recorded["ops"], result_of(recorded, impl), strict=True)):
        assert differing(op, replay.run(op, entry), entry) == [], f"operation {number}, {op['op']}"
    assert replay.num_beyond == num_beyond


@pytest.mark.parametrize(
    ("name", "impl", "num_differing"),
    [
        ("full_p1", "512:cpp", 0),
        ("full_p16", "512:cpp", 0),
        ("full_p1", "523:radix", 16),
        ("full_p16", "523:radix", 11),
        ("full_p1_lfu", "523:radix", 16),
        ("full_p1_slru", "523:radix", 24),
        ("full_p1_priority", "523:radix", 12),
    ],
)
def test_in_quires_order_some_lengths_differ(name: str, impl: str, num_differing: int) -> None:
    recorded = load(f"radix_ops_{name}")
    case, lengths = recorded["case"], []
    replay = Replay(case["page"], case["pool"], eviction_policy(case["policy"]))
    for op, entry in zip(recorded["ops"], result_of(recorded, impl), strict=True):
        found = replay.run(op, entry)
        other = differing(op, found, entry)
        lengths.append("len" in other or "matched" in other)
        if not num_differing:
            assert other == []
        assert found.get("oom") == entry.get("oom")
    assert sum(lengths) == num_differing


def sessions(digest: str) -> Iterator[tuple[Ids, Ids]]:
    """Prompt and output of each request of the recorded trace."""
    spec = importlib.util.spec_from_file_location("trace_sessions", GOLDEN.parent / "bench" / "trace_sessions.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    requests = module.make_trace()
    assert module.digest(requests) == digest
    for request in requests:
        yield np.array(request.prompt, dtype=np.int32), np.array(request.output, dtype=np.int32)


@pytest.mark.parametrize(("impl", "num_beyond", "num_differing"), [("523:radix", 982, 1), ("512:cpp", 969, 0)])
def test_a_recorded_trace_of_sessions(impl: str, num_beyond: int, num_differing: int) -> None:
    """64 requests are in flight. Each takes its slots when it is admitted, and is cached when it ends."""
    recorded = load("replay_tree_p16")
    group = next(group["result"] for group in recorded["groups"] if impl in group["impls"])
    requests = list(sessions(recorded["trace"]["sha256"]))

    def run(replay: Replay) -> tuple[list[int], list[int], int, int]:
        running: deque[tuple[Lease, Lease, Ids, Ids]] = deque()

        def finish() -> None:
            lease, other, tokens, slots = running.popleft()
            partial = len(tokens) % 16
            replay.slots.free(slots[len(slots) - partial :])
            replay.grow(lease, tokens[: len(tokens) - partial], slots[: len(slots) - partial])
            for each in (lease, other):
                replay.tree.release(each)

        hits, evicted = [], []
        for (prompt, output), theirs in zip(requests, group["evicted"], strict=True):
            if len(running) == recorded["window"]:
                finish()
            hits.append(replay.match(prompt[: len(prompt) // 16 * 16]))
            lease = replay.pin(prompt, hits[-1] // 16)
            tokens = np.concatenate((prompt, output))
            wanted = -(-(len(tokens) - hits[-1]) // 16) * 16
            missing = wanted - replay.slots.available_size()
            evicted.append(replay.evict(missing, theirs) if missing > 0 else 0)
            slots = replay.slots.alloc(wanted)[: len(tokens) - hits[-1]]
            running.append((lease, replay.tree.pin(lease.node), tokens, slots))
        while running:
            finish()
        return hits, evicted, replay.slots.available_size(), replay.tree.num_evictable * 16

    expected = tuple(group[name] for name in ("hits", "evicted", "final_free", "final_evictable"))
    uses = None if impl == "512:cpp" else Uses()
    replay = Replay(
        16, recorded["pool_tokens"], eviction_policy("lru") if uses is None else recorded_order("lru", uses), uses
    )
    assert run(replay) == expected
    assert replay.num_beyond == num_beyond
    ours = run(Replay(16, recorded["pool_tokens"], eviction_policy("lru")))
    assert sum(mine != theirs for mine, theirs in zip(ours[0], group["hits"], strict=True)) == num_differing
