"""An engine's loop on the cache: requests share prefixes, wait for room and are preempted; cached pages are evicted.

The toy model has two layers: one reads all tokens, one the last 32. Where a model keeps keys and values it keeps the
tokens, and it draws what follows from sums of what it reads: one wrong page would give a wrong answer.
"""

from dataclasses import dataclass

import numpy as np

from quire import DType, Field, GroupSpec, KVCache, MemoryPlan, OutOfPages, PageLayout, ReachSpec, RequestKV

PAGE, WINDOW, PROMPT, END = 16, 32, 110, 170  # tokens
layout = PageLayout(PAGE, (Field(name="token", shape=(1,), dtype=DType.INT32, layers=(0,)),))
groups = (GroupSpec(name="full", layout=layout), GroupSpec(name="window", layout=layout, reach=ReachSpec("window", 32)))
plan = MemoryPlan(page_size=PAGE, groups=groups, num_pages=40, frames=(40, 24), context=512, max_requests=12)
cache = KVCache(plan)
pools = [np.zeros((plan.frames_of(group) + 1, PAGE), dtype=np.int32) for group in (0, 1)]  # frame 0 is padding


@dataclass(eq=False)
class Request:
    tokens: np.ndarray  # int32: the prompt and what was drawn
    kv: RequestKV | None = None


def draw(seen: np.ndarray, near: np.ndarray) -> np.int32:
    return np.int32((7 * seen.sum() + near.sum()) % 5000)


def compute(batch: list[Request], starts: list[int]) -> None:
    """One step: write each request's tokens from its start on, and draw one more from what its layers read."""
    kvs, tokens, ends = [r.kv for r in batch], [r.tokens for r in batch], [len(r.tokens) for r in batch]
    for group, pool in enumerate(pools):
        slots = cache.rows.slots(kvs, starts, ends, group)  # frame * PAGE + offset, one request after the other
        pool.reshape(-1)[slots] = np.concatenate([own[start:] for own, start in zip(tokens, starts, strict=True)])
    tables = [cache.rows.page_table(kvs, ends, group) for group in (0, 1)]  # frames, a row for each request
    for request, end, *frames in zip(batch, ends, *tables, strict=True):
        seen, near = (pool[row].reshape(-1)[:end] for pool, row in zip(pools, frames, strict=True))
        request.tokens = np.append(request.tokens, draw(seen, near[-WINDOW:]))
    cache.commit(kvs, tokens)  # the step has settled: whole pages are shared from now on, windows give up old ones


def admit(request: Request) -> bool:
    """Begin on what is cached, make room for the rest and compute it. False: there is no room now."""
    kv = request.kv = cache.begin(request.tokens, hit=cache.match(request.tokens))
    try:
        cache.extend([kv], [len(request.tokens) - kv.num_cached])
    except OutOfPages:
        cache.finish(kv)
        return False
    compute([request], [kv.num_cached])
    return True


requests = [Request(np.append(range(80), range(n * 100, n * 100 + 30)).astype(np.int32)) for n in range(1, 13)]
waiting, running, room = requests.copy(), [], True
while waiting or running:
    while waiting and room and (room := admit(waiting[0])):
        running.append(waiting.pop(0))
    try:
        cache.extend([request.kv for request in running], 1)
    except OutOfPages:  # preempt the last one; what it has computed stays cached while there is room
        waiting.insert(0, running.pop())
        cache.finish(waiting[0].kv, waiting[0].tokens[:-1])
        continue
    compute(running, [len(request.tokens) - 1 for request in running])
    for request in [each for each in running if len(each.tokens) == END]:
        cache.finish(request.kv, request.tokens[:-1])  # its last token is drawn, and in no page
        running.remove(request)
        room = True  # for others to begin
cache.audit()  # every page has one owner, or this raises
counts = cache.statistics()
print(f"{counts.hit_tokens} of {counts.prompt_tokens} tokens were cached; {counts.evicted_pages} pages were evicted")
for request in requests:  # the same without a cache
    tokens = request.tokens[:PROMPT]
    while len(tokens) < END:
        tokens = np.append(tokens, draw(tokens, tokens[-WINDOW:]))
    assert tokens.tolist() == request.tokens.tolist()
print(f"{len(requests)} answers are those of a model without a cache")
