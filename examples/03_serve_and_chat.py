"""A server in a process of its own, and the official `openai` client: two streamed turns of one conversation.

The second turn sends the whole conversation again; the server computes only what is new.
Needs the `openai` package (in the `dev` extra).
"""

import json
import subprocess
import sys

from openai import APIStatusError, OpenAI

SYSTEM = "You continue novels in the manner of Jane Austen. Write in complete sentences. " * 3

command = [sys.executable, "-m", "quire", "serve", "--port", "0", "--json", "--kv-memory", "16MiB", "--drain", "1"]
server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
assert server.stdout is not None
ready = json.loads(server.stdout.readline())  # with --json: one line, when the server answers
print(f"{ready['url']} serves {ready['model']}: {ready['num_pages']} pages of {ready['page_size']} tokens\n")

client = OpenAI(base_url=ready["url"] + "/v1", api_key="none")
messages = [{"role": "system", "content": SYSTEM}]


def ask(question: str) -> None:
    messages.append({"role": "user", "content": question})
    stream = client.chat.completions.create(
        model=ready["model"],
        messages=messages,
        max_tokens=48,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    print(f"> {question}")
    answer = ""
    for chunk in stream:
        for choice in chunk.choices:
            text = choice.delta.content or ""
            answer += text
            print(text, end="", flush=True)
        if chunk.usage:
            usage = chunk.usage
    messages.append({"role": "assistant", "content": answer})
    cached = usage.prompt_tokens_details.cached_tokens
    print(f"\n  [{usage.prompt_tokens} prompt tokens, {cached} from the cache]\n")


try:
    ask("Tell me about Emma.")
    ask("What happened next?")
    try:
        client.completions.create(model=ready["model"], prompt="word " * 100, max_tokens=10**6)
    except APIStatusError as error:
        print(f"HTTP {error.status_code}, {error.code}: {error.body['message']}")
finally:
    server.terminate()  # the server lets open requests finish, then ends
    server.wait(30)
