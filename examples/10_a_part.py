"""A feature of your own: a part that counts how much of each tenant's prompts was cached.

The loop calls the hooks of its parts. Engine and simulator run the same loop, so the part runs in both, unchanged.
"""

from collections import Counter
from typing import Any

import numpy as np

from quire import LLM, Namespace, Part, SamplingParams
from quire.plan.step_cost import CostModel
from quire.scheduler.step import Step
from quire.sim.replay import Replay, ReplaySettings
from quire.sim.trace_request import TraceRequest


class TenantHits(Part):
    """Prompt tokens by tenant: all, and those from the cache."""

    def __init__(self) -> None:
        self.prompt_tokens, self.cached_tokens = Counter[str](), Counter[str]()

    def scheduled(self, step: Step) -> None:
        for request in step.admitted:
            self.prompt_tokens[request.namespace.salt] += request.num_prompt_tokens
            self.cached_tokens[request.namespace.salt] += request.num_cached

    def rates(self) -> dict[str, float]:
        return {name: self.cached_tokens[name] / n for name, n in self.prompt_tokens.items()}

    def counters(self) -> list[tuple[str, Any]]:
        return [("tenant_hit_rate", self.rates())]  # a section of the statistics


hits = TenantHits()
llm = LLM(kv_memory="16MiB", show_plan=False, parts=[hits])
text = "It was a fine autumn evening, and the whole party had walked out to see the new plantation. "
for tenant, question in (("anna", "Emma said"), ("anna", "Mr. Knightley said"), ("ben", "Emma said")):
    llm.generate(text + question, SamplingParams(max_tokens=8, temperature=0), salt=tenant)
print("engine:   ", {name: f"{rate:.0%}" for name, rate in llm.engine.statistics()["tenant_hit_rate"].items()})

opening, rest = np.arange(320, dtype=np.int32), np.arange(1000, 1040, dtype=np.int32)
trace = []
for n, tenant in enumerate(("anna", "ben", "anna", "ben", "anna")):
    prompt = np.append(opening, rest + n)
    trace.append(TraceRequest(f"r{n}", prompt, rest, arrival=n / 2, namespace=Namespace(salt=tenant)))
hits, cost = TenantHits(), CostModel.from_flags(prefill_rate=20_000, decode_ms=5)
replay = Replay(llm.engine.plan, cost, ReplaySettings(check="all"), parts=[hits])
replay.run(trace)
print("simulator:", {name: f"{rate:.0%}" for name, rate in hits.rates().items()})
