"""The cache as a library, without a model or torch: plan, begin, extend, commit, finish; a hit, an eviction, events.

The caller plays the engine: where a comment says "forward", a model would write keys and values to
`cache.rows.slots(...)`.
"""

import numpy as np

from quire import EventLog, KVCache, ModelSpec, PlanSettings, RequestKV, RequestTooLarge, format_bytes, make_plan

# A model's config.json says what a page costs. These are the sizes of an 8B Llama; no weights are read.
config = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "max_position_embeddings": 8192, "vocab_size": 128256, "dtype": "bfloat16",
}  # fmt: skip
plan = make_plan(ModelSpec.from_config(config), PlanSettings(kv_memory=26 * 2**20, max_running_requests=4)).memory
print(f"plan: {plan.num_pages} pages of {plan.page_size} tokens, {format_bytes(plan.bytes_per_page)} each")

log = EventLog()
cache = KVCache(plan, eviction="lru", emit=log.append, explains=True)
system = np.arange(1000, 1048, dtype=np.int32)  # 48 tokens: three whole pages that every prompt begins with


def prompt(question: int, length: int = 20) -> np.ndarray:
    return np.concatenate((system, np.arange(question, question + length, dtype=np.int32)))


def prefill(tokens: np.ndarray) -> RequestKV:
    """Begin a request, make room for what is not cached, and commit it as if a step had computed it."""
    kv = cache.begin(tokens)
    cache.extend([kv], [len(tokens) - kv.num_cached])
    # forward: the model reads pages before `num_cached` and writes the slots after it
    cache.commit(kv, tokens)
    print(f"  {len(tokens)} tokens: {kv.num_cached} from the cache, pages {cache.rows.page_ids(kv).tolist()}")
    return kv


print("\n1. The first request computes everything; its whole pages stay when it ends.")
cache.finish(prefill(prompt(1)))

print("\n2. Two requests at once over the same system prompt read the same three pages.")
second, third = prefill(prompt(2000)), prefill(prompt(3000))
print(f"  shared now: {cache.statistics().shared_pages} pages")
for reason in third.explanation.reasons:  # why no more of the third prompt was cached
    print(f"  tokens {reason.start}..{reason.start + reason.tokens - 1}: {reason.cause} {reason.detail}")

print("\n3. A request that needs more than is free evicts what no request holds.")
print(f"  before: {cache.pages.num_free_pages} free, {cache.admission.num_available_pages} available with eviction")
fourth = prefill(np.arange(5000, 5080, dtype=np.int32))  # 80 tokens of its own: 5 pages
print(f"  evicted: {cache.statistics().evicted_pages} page(s)")

print("\n4. One that can never fit is refused before it takes anything.")
try:
    plan.check_request(prompt=150, max_tokens=100)
except RequestTooLarge as error:
    print(f"  {error}")

for kv in (second, third, fourth):
    cache.finish(kv)
cache.audit()  # raises AuditFailure if a page has no owner, or two
counts = cache.statistics().frames["full"]
print(f"\naudit passed: {counts.free} free + {counts.cached} cached + {counts.private} private = {counts.total}")
print("events:", ", ".join(f"{type(event).__name__}({len(event.hashes)})" for event in log.since(0)[1]))
