"""`quire demo`: a real server with too little memory, several conversations at once, and what its counters say after.

The pool holds three quarters of one context. All conversations share one long system prompt, which is computed once;
what they say themselves is more than what fits, so that pages have to be evicted. After them come two long prompts: one
that just fits, for which nearly all of the cache has to go, and one that never can, which is refused with the numbers.
Then come the hybrids and the tiers: see `quire.cli.demo_pools` and `quire.cli.demo_tiers`.
"""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from quire.cli.demo_client import Client, Conversation, Rejected, Turn
from quire.cli.demo_pools import HYBRIDS, show_pools
from quire.cli.demo_script import RULES, SUBJECTS, question
from quire.cli.demo_server import pool_bytes, read_config, running_server
from quire.cli.demo_tiers import show_tiers
from quire.cli.demo_view import live, print_pools, print_serving, print_tiers
from quire.cli.options import DebugOption, JsonOption
from quire.cli.report import reported
from quire.errors import AuditFailure
from quire.spec.bundled import BUNDLED_MODELS, DEFAULT_MODEL

PAGE_SIZE = 16
MOST_CONTEXT = 2048
POOL_SHARE = 0.75  # of the context
SYSTEM_SHARE = 0.30
OWN_SHARE = 0.30  # what one conversation adds to the system prompt
MOST_ANSWER_TOKENS = 48
FITTING_SHARE = 0.9  # of the largest request: what one long prompt has, which evicts most of what is cached
QUESTION_TOKENS = 16  # about; with the marks of the chat format
IDLE_S = 10.0


class Edition(StrEnum):
    """What to show: the server with the plain model, the pools of a hybrid, or the tiers below the device."""

    PLAIN = "plain"
    WINDOW = "window"
    RECURRENT = "recurrent"
    TIERS = "tiers"
    ALL = "all"


def demo(
    edition: Annotated[Edition, typer.Option(help="What to show.")] = Edition.ALL,
    conversations: Annotated[
        int, typer.Option(help="Conversations held at once, with the plain model.", min=2, max=64)
    ] = 8,
    turns: Annotated[int, typer.Option(help="Questions in each of them.", min=2, max=16)] = 4,
    model: Annotated[Path | None, typer.Option(hidden=True, help="A folder, in place of the plain model's.")] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Start a server with a small pool, talk to it, and show what its cache did; then the pools of two hybrids, and a
    conversation that outlives its server.

    Takes about a minute.

    [dim]Example:[/dim] quire demo --edition window
    """
    with reported(as_json=as_json, debug=debug):
        console = Console(quiet=as_json)
        started_s = time.perf_counter()
        found: dict[str, Any] = {}
        if edition in (Edition.PLAIN, Edition.ALL):
            found |= _serve(console, model or BUNDLED_MODELS[DEFAULT_MODEL], conversations, turns)
            if not as_json:
                print_serving(console, found)
        for name, hybrid in HYBRIDS.items():
            if edition in (name, Edition.ALL):
                with console.status(f"Conversations with {hybrid.model} ..."):
                    found.setdefault("hybrids", {})[name] = show_pools(hybrid)
                if not as_json:
                    print_pools(console, hybrid, found["hybrids"][name])
        if edition in (Edition.TIERS, Edition.ALL):
            found["tiers"] = show_tiers(console, model or BUNDLED_MODELS[DEFAULT_MODEL])
            if not as_json:
                print_tiers(console, found["tiers"])
        found["seconds"] = round(time.perf_counter() - started_s, 1)
        if as_json:
            print(json.dumps(found))
        else:
            console.print(f"Took {found['seconds']} s.")
        missing = [
            check
            for act in (found, *found.get("hybrids", {}).values(), found.get("tiers", {}))
            for check, passed in act.get("checks", {}).items()
            if not passed
        ]
        if missing:
            raise AuditFailure(f"the demo did not show what it should: {', '.join(missing)}.")


def _serve(console: Console, folder: Path, conversations: int, turns: int) -> dict[str, Any]:
    """A server with a small pool, from its start to its end; the findings."""
    context = min(int(read_config(folder)["max_position_embeddings"]), MOST_CONTEXT)
    kv_bytes = pool_bytes(folder, num_tokens=int(POOL_SHARE * context), page_size=PAGE_SIZE)
    options = {"--model": folder, "--kv-memory": kv_bytes, "--page-size": PAGE_SIZE, "--max-model-len": context}
    flags = [str(part) for option in options.items() for part in option]
    with ExitStack() as stack:
        with console.status("Starting quire serve with a small pool ..."):
            summary = stack.enter_context(running_server(*flags, "--dtype", "float32"))
        return _show(console, summary, num_conversations=conversations, num_turns=turns)


def _show(console: Console, summary: dict[str, Any], *, num_conversations: int, num_turns: int) -> dict[str, Any]:
    """Everything the client does; the findings."""
    client = Client(summary["url"])
    context = summary["context"]
    console.print(
        f"[bold]quire serve[/bold] answers on {summary['url']}: {summary['model']}, {summary['num_pages']} pages of "
        f"{summary['page_size']} tokens ({summary['tokens_that_fit']:,} tokens; one context is {context:,})."
    )
    system = _system_prompt(client, int(SYSTEM_SHARE * context))
    before = client.get("/v1/cache/statistics")
    talks = [Conversation(f"{SUBJECTS[i % len(SUBJECTS)]}") for i in range(num_conversations)]
    answer_tokens = max(4, min(MOST_ANSWER_TOKENS, int(OWN_SHARE * context / num_turns) - QUESTION_TOKENS))
    peak_shared = _SharedPages(client)
    started_s = time.perf_counter()
    with live(console, talks, num_turns), peak_shared, ThreadPoolExecutor(num_conversations) as threads:
        jobs = [
            threads.submit(_talk, client, talk, system, num_turns, answer_tokens, seed)
            for seed, talk in enumerate(talks)
        ]
        for job in jobs:
            job.result()
    took_s = time.perf_counter() - started_s
    largest = summary["largest_request"]
    num_characters = int(FITTING_SHARE * largest * len(system) / talks[0].turns[0].prompt_tokens)
    served = _ask_at_length(client, system, num_characters)
    too_large = (largest + context) / 2 / served.get("largest_served_tokens", largest)
    refusal = _ask_at_length(client, system, int(num_characters * too_large))
    after = _idle_statistics(client)
    return _findings(summary, talks, before, after, served | {"refusal": refusal}, took_s, peak_shared.most)


def _system_prompt(client: Client, num_tokens: int) -> str:
    """As many rules as make about `num_tokens` tokens; the server counts them."""
    rules = " ".join(RULES)
    probe = client.chat(
        [{"role": "system", "content": rules[:200]}, {"role": "user", "content": "Hello!"}], max_tokens=1
    )
    num_characters = int(num_tokens * 200 / probe["usage"]["prompt_tokens"])
    return (rules + " ") * (num_characters // len(rules)) + rules[: num_characters % len(rules)]


def _talk(client: Client, talk: Conversation, system: str, num_turns: int, answer_tokens: int, seed: int) -> None:
    """Hold one conversation to its end."""
    messages = [{"role": "system", "content": system}]
    for number in range(num_turns):
        messages.append({"role": "user", "content": question(talk.name, number, seed)})
        talk.text = ""

        def on_text(text: str) -> None:
            talk.text += text

        turn = client.stream(messages, on_text, max_tokens=answer_tokens, temperature=0.7, seed=seed)
        messages.append({"role": "assistant", "content": turn.answer})
        talk.turns.append(turn)


class _SharedPages:
    """Looks now and then at how many pages several requests read at once, and keeps the most."""

    def __init__(self, client: Client) -> None:
        self.most = 0
        self._client = client
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.2):
            self.most = max(self.most, int(self._client.get("/v1/cache/statistics")["shared_pages"]))


def _ask_at_length(client: Client, system: str, num_characters: int) -> dict[str, Any]:
    """Send one long question: the status, and the tokens it had or the error it met."""
    content = (system + " ") * (num_characters // len(system) + 1)
    try:
        answer = client.chat([{"role": "user", "content": content[:num_characters]}], max_tokens=1)
    except Rejected as error:
        return {"status": error.status, **error.body}
    return {"status": 200, "largest_served_tokens": answer["usage"]["total_tokens"]}


def _idle_statistics(client: Client) -> dict[str, Any]:
    """The counters once nothing runs any more."""
    deadline_s = time.monotonic() + IDLE_S
    while True:
        statistics: dict[str, Any] = client.get("/v1/cache/statistics")
        if not statistics["running_requests"] + statistics["waiting_requests"] or time.monotonic() > deadline_s:
            return statistics
        time.sleep(0.05)


def _findings(
    summary: dict[str, Any],
    talks: list[Conversation],
    before: dict[str, Any],
    after: dict[str, Any],
    long_prompts: dict[str, Any],
    took_s: float,
    most_shared: int,
) -> dict[str, Any]:
    def grown(key: str) -> int:
        return int(after[key]) - int(before[key])

    turns = [turn for talk in talks for turn in talk.turns]
    output_tokens = sum(turn.output_tokens for turn in turns)
    refusal = long_prompts["refusal"]
    private = sum(frames["private"] for frames in after["frames"].values())
    return {
        "server": summary,
        "prompt_tokens": grown("prompt_tokens"),
        "reused_tokens": grown("hit_tokens"),
        "reused_by_turn": _by_turn(talks),
        "shared_pages": max(most_shared, int(after.get("peak_shared_pages", 0))),
        "evicted_pages": grown("evicted_pages"),
        "preemptions": grown("preemptions"),
        "largest_served_tokens": long_prompts.get("largest_served_tokens", 0),
        "refusal": refusal,
        "output_tokens": output_tokens,
        "output_tokens_per_s": round(output_tokens / took_s, 1),
        "first_token_s": round(sorted(turn.first_token_s for turn in turns)[len(turns) // 2], 3),
        "private_pages_at_idle": private,
        "frames": after["frames"],
        "answers": [_quote(talk.turns[0]) for talk in talks[:3]],
        "checks": {
            "tokens were reused": grown("hit_tokens") > 0,
            "pages were evicted": grown("evicted_pages") > 0,
            "a request that just fits was served": long_prompts["status"] == 200,
            "the oversized request was refused": refusal["status"] == 413,
            "no page leaked": private == 0,
        },
    }


def _by_turn(talks: list[Conversation]) -> list[dict[str, int]]:
    rows = zip(*(talk.turns for talk in talks), strict=True)
    return [
        {"prompt_tokens": sum(t.prompt_tokens for t in row), "cached_tokens": sum(t.cached_tokens for t in row)}
        for row in rows
    ]


def _quote(turn: Turn) -> dict[str, str]:
    return {"question": turn.question, "answer": turn.answer.strip()}
