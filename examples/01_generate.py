"""The engine in this process: the bundled model answers twice, and the second prompt finds the first one's pages."""

from quire import LLM, SamplingParams

llm = LLM(kv_memory="64MiB")  # without a model's name: the bundled one. LLM("Qwen/Qwen3-0.6B") for any other
greedy = SamplingParams(temperature=0, max_tokens=40)

system = (
    "You continue novels in the manner of Jane Austen. Write in complete sentences, and keep to the past tense. "
    "Describe people by what they say and do, and leave the judgement to the reader. "
)
for question in ("Tell me about Emma.", "Tell me about the ball."):
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    [output] = llm.chat(messages, greedy)
    print(f"> {question}  ({len(output.prompt_token_ids)} prompt tokens, {output.num_cached_tokens} from the cache)")
    print(output.outputs[0].text.strip(), "\n")

# Several prompts at once share pages too: what two of them have in common is computed once, for both.
prompts = [system + ending for ending in ("It was a truth", "Mr. Darcy walked")]
drawn = SamplingParams(temperature=0.8, seed=7, max_tokens=24, n=2)  # two continuations of each, the same every time
for output in llm.generate(prompts, drawn):
    print(f"{output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens from the cache")
    for completion in output.outputs:
        print(f"  {completion.index}: ...{completion.text!r} ({completion.finish_reason})")

counters = llm.statistics()
print(f"\n{counters['hit_tokens']} of {counters['prompt_tokens']} prompt tokens were not computed again")
llm.engine.audit()  # every page has exactly one owner, or this raises
