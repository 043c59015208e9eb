"""`quire demo`: a real server with too little memory, several conversations at once, and what its counters say after.

The pool holds three quarters of one context. All conversations share one long system prompt, which is computed once;
what they say themselves is more than what fits, so that pages have to be evicted. After them come two long prompts: one
that just fits, for which nearly all of the cache has to go, and one that never can, which is refused with the numbers.
"""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from quire.cli.demo_client import Client, Conversation, Rejected, Turn
from quire.cli.demo_server import pool_bytes, read_config, running_server
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

RULES = (
    "House style. Write in complete sentences, and end each of them with a full stop.",
    "Mention the person or the thing that the user asks about in the first sentence.",
    "Keep every answer between one and five sentences long.",
    "Do not use lists, tables, headings or any other markup.",
    "Prefer the past tense, and keep to it within an answer.",
    "Use British spelling throughout: honour, favour, neighbour, colour, civilise.",
    "Put direct speech in double quotation marks.",
    "When the user asks you to go on, continue from the last sentence that you wrote.",
    "Never speak of yourself, and never apologise for an answer.",
    "Be civil to the user, whatever the manner of the question may be.",
    "Describe a house by its rooms, its grounds and the road that leads to it.",
    "Describe a person by what they say and do, and leave the judgement to the reader.",
    "The setting is a village in the south of England, with a town some ten miles away.",
    "The season is autumn, and most of the families have returned from the sea.",
    "Letters may be quoted, but never at a length of more than three sentences.",
    "Finish when the thought is finished; do not add a moral.",
)
SUBJECTS = ("Emma", "Mr. Darcy", "the ball", "Elizabeth", "the letter", "Captain Wentworth", "the house", "Mrs. Bennet")
FOLLOW_UPS = ("Go on.", "What happened next?", "Tell me more.", "And then?")


def demo(
    conversations: Annotated[int, typer.Option(help="Conversations held at once.", min=2, max=64)] = 8,
    turns: Annotated[int, typer.Option(help="Questions in each of them.", min=2, max=16)] = 4,
    model: Annotated[Path | None, typer.Option(hidden=True, help="Another model's folder.")] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Start a server with a small pool, talk to it, and show what its cache did. Takes less than a minute.

    [dim]Example:[/dim] quire demo --conversations 12
    """
    with reported(as_json=as_json, debug=debug):
        console = Console(quiet=as_json)
        folder = model or BUNDLED_MODELS[DEFAULT_MODEL]
        context = min(int(read_config(folder)["max_position_embeddings"]), MOST_CONTEXT)
        kv_bytes = pool_bytes(folder, num_tokens=int(POOL_SHARE * context), page_size=PAGE_SIZE)
        options = {"--model": folder, "--kv-memory": kv_bytes, "--page-size": PAGE_SIZE, "--max-model-len": context}
        flags = [str(part) for option in options.items() for part in option]
        started_s = time.perf_counter()
        with ExitStack() as stack:
            with console.status("Starting quire serve with a small pool ..."):
                summary = stack.enter_context(running_server(*flags, "--dtype", "float32"))
            found = _show(console, summary, num_conversations=conversations, num_turns=turns)
        found["seconds"] = round(time.perf_counter() - started_s, 1)
        if as_json:
            print(json.dumps(found))
        else:
            _print(console, found)
        missing = [name for name, passed in found["checks"].items() if not passed]
        if missing:
            raise AuditFailure(f"the demo did not show what it should: {', '.join(missing)}.")


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
    with _live(console, talks, num_turns), peak_shared, ThreadPoolExecutor(num_conversations) as threads:
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
        question = FOLLOW_UPS[(number + seed) % len(FOLLOW_UPS)] if number else f"Tell me about {talk.name}."
        messages.append({"role": "user", "content": question})
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
    question = (system + " ") * (num_characters // len(system) + 1)
    try:
        answer = client.chat([{"role": "user", "content": question[:num_characters]}], max_tokens=1)
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


# What it looks like.


def _live(console: Console, talks: list[Conversation], num_turns: int) -> AbstractContextManager[object]:
    if console.quiet or not console.is_terminal:
        return nullcontext()
    return Live(_Progress(talks, num_turns), console=console, refresh_per_second=8, transient=True)


class _Progress:
    """The conversations as they go; drawn anew at every refresh."""

    def __init__(self, talks: list[Conversation], num_turns: int) -> None:
        self._talks = talks
        self._num_turns = num_turns

    def __rich__(self) -> Table:
        table = Table(expand=True, title="Conversations over one system prompt")
        table.add_column("About", no_wrap=True)
        table.add_column("Turn", no_wrap=True)
        table.add_column("From cache", justify="right", no_wrap=True)
        table.add_column("Answer", ratio=1, no_wrap=True, overflow="ellipsis")
        for talk in self._talks:
            last = talk.turns[-1] if talk.turns else None
            cached = f"{last.cached_tokens} of {last.prompt_tokens}" if last else "-"
            table.add_row(talk.name, f"{len(talk.turns)}/{self._num_turns}", cached, Text(talk.text.replace("\n", " ")))
        return table


def _print(console: Console, found: dict[str, Any]) -> None:
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold")
    facts.add_column()
    share = found["reused_tokens"] / max(1, found["prompt_tokens"])
    facts.add_row(
        "Tokens reused", f"{found['reused_tokens']:,} of {found['prompt_tokens']:,} prompt tokens ({share:.0%})"
    )
    for number, row in enumerate(found["reused_by_turn"], start=1):
        facts.add_row(f"  in turn {number}", f"{row['cached_tokens']:,} of {row['prompt_tokens']:,}")
    facts.add_row("Pages shared", f"{found['shared_pages']} at once, by several running requests")
    facts.add_row("Pages evicted", f"{found['evicted_pages']:,}, because the pool is that small")
    facts.add_row("Preemptions", f"{found['preemptions']}")
    facts.add_row("Largest prompt", f"{found['largest_served_tokens']:,} tokens served")
    facts.add_row(
        "Throughput",
        f"{found['output_tokens_per_s']:,} output tokens/s; first token after {found['first_token_s'] * 1000:.0f} ms",
    )
    frames = ", ".join(
        f"{frames['free']} free + {frames['cached']} cached + {frames['private']} private = {frames['total']}"
        for frames in found["frames"].values()
    )
    facts.add_row("Pages at idle", frames)
    answers = Text()
    for answer in found["answers"]:
        answers.append(f"{answer['question']}\n", style="bold")
        answers.append(f"{answer['answer']}\n\n")
    answers.rstrip()
    refusal = found["refusal"]
    refused = Text(f"HTTP {refusal['status']}, {refusal.get('code', 'nothing was refused')}\n", style="bold")
    refused.append(str(refusal.get("message", "")), style="not bold")
    panels = [
        Panel(answers, title="Answers", title_align="left"),
        Panel(facts, title="The server's counters", title_align="left", border_style="green"),
        Panel(refused, title="A request larger than the pool", title_align="left", border_style="yellow"),
    ]
    console.print(Group(*panels))
    for name, passed in found["checks"].items():
        console.print(f"[green]✓[/green] {name}" if passed else f"[red]✗ not shown:[/red] {name}")
    console.print(f"Took {found['seconds']} s.")
