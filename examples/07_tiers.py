"""Tiers below the device: a prefix that leaves the device, comes back from host memory, and outlives its engine.

The model is so small that computing beats loading; `load="always"` and `prefetch="wait_complete"` use the tiers all the
same. Without them the engine measures, and computes what is faster to compute.
"""

import tempfile

from quire import LLM, SamplingParams, format_bytes

GREEDY = SamplingParams(temperature=0, max_tokens=12)
EMMA = "Emma had nothing to say, and so she looked out of the window at the rain. " * 12
OTHERS = [
    f"Letter {number}. The horses were tired, and the road was long and full of stones. " * 12 for number in (1, 2)
]


def engine(directory: str) -> LLM:
    return LLM(
        kv_memory="2MiB",  # room for one of the three prompts, and a little more
        host_memory="8MiB",
        storage=directory,
        storage_size="64MiB",
        load="always",
        prefetch="wait_complete",
        dtype="float32",
        max_model_len=512,
        eviction="lru",
    )


def ask(llm: LLM, prompt: str, **options) -> str:
    [output] = llm.generate(prompt, GREEDY, **options)
    device = output.num_cached_tokens - output.num_host_tokens - output.num_storage_tokens
    print(
        f"  {len(output.prompt_token_ids)} prompt tokens: {device} from the device, "
        f"{output.num_host_tokens} from host memory, {output.num_storage_tokens} from storage"
    )
    return output.outputs[0].text


with tempfile.TemporaryDirectory() as directory:
    print("1. An engine with all three tiers")
    with engine(directory) as llm:  # the block's end waits for what is on its way to storage
        answers = [ask(llm, EMMA), ask(llm, EMMA)]
        print("  others take the device")
        for prompt in OTHERS:
            ask(llm, prompt)
        answers.append(ask(llm, EMMA))
        links = llm.statistics()["tiers"]["links"]
        print("  moved:", ", ".join(f"{link} {format_bytes(links[link]['bytes'])}" for link in ("save", "load")))

    print("2. Another engine on the same directory")
    with engine(directory) as llm:
        answers.append(ask(llm, EMMA))
        print("  the same prompt with a salt of its own")
        ask(llm, EMMA, salt="another tenant")
        corrupt = llm.statistics()["tiers"]["defects"]

print(f"the same answer every time: {len(set(answers)) == 1}; damaged records: {len(corrupt)}")
