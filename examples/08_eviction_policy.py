"""An eviction policy of your own, beside two that come with Quire.

The tree tells a policy which leaves nothing holds (`offered`) and asks it which one goes first (`victim`). A leaf loses
its last page, and is offered again with the rest. A candidate that is read again or evicted gets the ticket 0.
"""

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import count

import numpy as np

from quire import EvictionPolicy, KVCache, ModelSpec, Node, PlanSettings, make_plan, register_eviction


class DeepestFirst(EvictionPolicy):
    """The leaf that ends furthest from the root goes first: what a prompt begins with is what others share."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Node]] = []
        self._tickets = count(1)

    def offered(self, node: Node) -> None:
        node.ticket = next(self._tickets)
        heappush(self._heap, (-node.depth - node.num_pages, node.ticket, node))

    def victim(self) -> Node | None:
        while self._heap:
            _, ticket, node = heappop(self._heap)
            if ticket == node.ticket:  # otherwise it was read or offered again since
                node.ticket = 0
                return node
        return None

    def candidates(self) -> Iterator[Node]:
        return (node for _, ticket, node in self._heap if ticket == node.ticket)


register_eviction("deepest", DeepestFirst)  # a name for KVCache, LLM and every other place that takes one

config = {
    "model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 2, "max_position_embeddings": 4096, "vocab_size": 32000, "dtype": "bfloat16",
}  # fmt: skip
plan = make_plan(ModelSpec.from_config(config), PlanSettings(kv_memory=32 * 2**20, max_running_requests=4)).memory


def reused(policy: str) -> float:
    """The share of prompt tokens that a cache with this policy has, in a mix of questions and documents."""
    cache = KVCache(plan, eviction=policy)
    draws = np.random.default_rng(0)
    for number in range(600):
        if number % 6 == 0:  # a document of its own, read once
            prompt = draws.integers(100_000, 2**31 - 1, 1200)
        else:  # a question behind one of eight long instructions
            system = int(draws.integers(8))
            prompt = np.concatenate(
                (np.arange(system * 1000, system * 1000 + 320), draws.integers(9000, 2**31 - 1, 40))
            )
        tokens = prompt.astype(np.int32)
        kv = cache.begin(tokens)
        cache.extend([kv], [len(tokens) - kv.num_cached])
        cache.finish(kv, tokens)
    cache.audit()  # asks the policy for all its candidates too
    counts = cache.statistics()
    return counts.hit_tokens / counts.prompt_tokens


print(f"{plan.num_tokens:,} tokens fit")
for policy in ("lru", "density", "deepest"):
    print(f"  {policy:<8} {reused(policy):.1%} of the prompt tokens were cached")
