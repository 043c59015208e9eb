"""The cache as a library: an engine's loop over many requests, with one operation per step for all that run.

A `MemoryPlan` says what there is. Engines get theirs from `quire.plan.planner.make_plan`; `small_plan` makes one by
hand.
"""

import numpy as np

from quire.cache import KVCache
from quire.testing import small_plan

SYSTEM = np.arange(1_000, 1_064, dtype=np.int32)  # 64 tokens that all prompts share
cache = KVCache(small_plan(num_pages=600, page_size=16, context=512, max_requests=32), explains=True)

print("Admit 32 requests: match, begin, extend")
prompts = [np.concatenate((SYSTEM, np.arange(n * 100, n * 100 + 20 + n, dtype=np.int32))) for n in range(32)]
requests = []
for number, prompt in enumerate(prompts):
    request = cache.begin(prompt, label=f"request {number}")  # what is cached is leased
    cache.extend([request], [len(prompt) - request.num_cached])  # pages for the rest, evicting where it must
    cache.commit(request, prompt)  # after the step that computed it: others may share it now
    requests.append(request)
print(f"  {cache.statistics().hit_tokens} of {cache.statistics().prompt_tokens} prompt tokens were cached")

print("Decode 100 steps: one call for all of them")
batch = cache.rows.batch(requests)
for _ in range(100):
    cache.extend(batch, 1)  # arithmetic; only requests that reach a new page take an id
    slots = cache.rows.next_slots(batch)  # where the step writes their keys and values: frame * page_size + offset
print(f"  the last step wrote to slots {slots[:4].tolist()} ...; {cache.pages.num_free_pages} pages are free")

print("End them; what they said can be reused by their next turns")
for request, prompt in zip(requests, prompts, strict=True):
    cache.finish(request, np.concatenate((prompt, np.full(100, 7, dtype=np.int32))))
following = np.concatenate((prompts[5], np.full(100, 7, dtype=np.int32), np.array([1, 2, 3], dtype=np.int32)))
for reason in cache.admission.explain(following, cache.match(following)).reasons:
    print(f"  tokens {reason.start}..{reason.start + reason.tokens - 1}: {reason.cause} {reason.detail}")
cache.audit()  # every law holds
