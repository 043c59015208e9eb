"""Capacity as a library, without torch or weights: a plan from a configuration, what limits it, and what would fit."""

from quire import ModelSpec, Plan, PlanSettings, format_bytes, make_plan, options_to_fit, read_model_config

config, found = read_model_config("gemma-3-27b")  # or a config.json, its folder, or a hub id
spec = ModelSpec.from_config(config)
print(f"{spec.architecture} ({found}): {len(spec.layers)} layers, {len(spec.groups(page_size=16))} groups")


def plan(settings: PlanSettings) -> Plan:
    return make_plan(spec, settings)


wanted = PlanSettings(kv_memory=40 * 2**30, max_model_len=32_768, concurrency=24)
answer = plan(wanted)
for pool in answer.config.pools:
    print(f"  {pool.name}: {pool.frames:,} frames of {pool.bytes_per_frame:,} bytes, {pool.why}")
print(f"  {answer.config.max_total_num_tokens:,} tokens, {answer.requests_at(32_768)} requests of 32,768")

print("\n24 requests of 32,768 tokens fit with one of these:")
for option in options_to_fit(answer, plan):
    print(f"  {option}")

memory = answer.memory  # what KVCache and Pool are built from, and what admission asks
print(
    f"\n{format_bytes(memory.pool_bytes)} of tensors; {memory.pages_of(32_768):,} pages for a request of 32,768 tokens"
)
