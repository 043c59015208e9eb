"""Four scenes that show what a paged, prefix-shared cache does, on the models that come with Quire.

Three run an engine in this process, with pools that are too small on purpose; the fourth, `examples.demo.tiers`, stops
and kills servers. Each ends with ticks: its claims, and whether they hold.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import typer
from examples.demo.tiers import RULES, Rows, Tick, question, show_tiers
from rich.console import Console
from rich.panel import Panel

from quire.cli.command import command
from quire.cli.report import named_rows
from quire.errors import AuditFailure, RequestTooLarge
from quire.plan.budget import counted
from quire.settings.setting import Settings, setting

if TYPE_CHECKING:
    from quire.client.llm import LLM
    from quire.client.request_assembler import RequestOutput

SUBJECTS = ("Emma", "Mr. Darcy", "the ball", "Elizabeth", "the letter", "Captain Wentworth", "the house", "Mrs. Bennet")
ANSWER_TOKENS = 32
ASKED_TWICE = 4  # questions, of an engine that drafts
TITLES = {  # with "1 of 4: " and a spinner they fit 60 columns
    "plain": "a shared prompt, in a cache that is too small",
    "window": "windows are reclaimed, prefixes stay cached",
    "recurrent": "checkpoints of states, behind a shared prefix",
    "tiers": "a conversation that outlives its server",
}
FRAMES = {
    "total": "frames of the pool",
    "free": "free",
    "cached": "cached for later requests",
    "dropped": "reclaimed while the prefix stayed cached",
    "revived": "filled again for such a prefix",
    "left": "checkpoints of states saved",
}
"""Counters of a pool (`quire.cache.statistics.FrameCounts`), as the demo words them."""


class Scene(NamedTuple):
    """So many conversations on one bundled model, whose pool `short` is too small for them."""

    model: str
    short: str
    talks: int
    settings: Mapping[str, Any]

    def engine(self, **changes: Any) -> LLM:
        """An engine on the CPU, with other settings than the scene's where `changes` says so."""
        from quire.client.llm import LLM

        return LLM(self.model, device="cpu", dtype="float32", show_plan=False, **{**self.settings, **changes})


_WINDOWS = {"kv_memory": "1MiB", "max_model_len": 1024, "swa_full_tokens_ratio": 0.2, "max_num_batched_tokens": 128}
_STATES = {"kv_memory": "1280KiB", "max_model_len": 1024, "max_mamba_cache_size": 9}
SCENES = {
    "plain": Scene("quire-bundled", "full", 8, {"kv_memory": "6208KiB"}),  # 96 pages; a context is 128
    "window": Scene("quire-bundled-window", "window", 3, _WINDOWS),
    "recurrent": Scene("quire-bundled-recurrent", "state", 3, _STATES),
}


app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode="rich")


class DemoSettings(Settings):
    """What the demo shows."""

    scene: Literal["plain", "window", "recurrent", "tiers", "all"] = setting(
        "all", "What to show: {choices}.", aliases=("--edition",)
    )
    turns: int = setting(3, "Questions in each conversation.", ge=2, le=16)


@command(app)
def demo(settings: DemoSettings, *, as_json: bool) -> None:
    """Show what the cache does: reuse, eviction and refusal, the pools of hybrids, and a conversation that outlives its
    server. Takes about a minute.

    [dim]Example:[/dim] python -m examples.demo --scene window
    """
    console, started_s = Console(quiet=as_json, highlight=False), time.perf_counter()
    names = [name for name in TITLES if settings.scene in (name, "all")]
    length = "about a minute" if len(names) > 1 else "less than half a minute"
    console.print(f"The demo takes {length}, on small models on the CPU. It shows:")
    for number, name in enumerate(names, 1):
        console.print(f"  {number}. {TITLES[name]}")
    found: dict[str, Any] = {}
    missing: list[str] = []
    for number, name in enumerate(names, 1):
        title = TITLES[name]
        with console.status(f"{number} of {len(names)}: {title} ..."):
            act, ticks, rows = show_tiers() if name == "tiers" else show(SCENES[name], settings.turns)
        found[name] = {**act, "checks": {tick.name: tick.passed for tick in ticks}}
        missing += [tick.name for tick in ticks if not tick.passed]
        console.print(Panel(named_rows(rows), title=f"{number}. {title}", title_align="left", border_style="green"))
        for tick in ticks:
            mark = "[green]✓[/green]" if tick.passed else "[red]✗ not shown:[/red]"
            console.print(f"{mark} {tick.name}{f': {tick.numbers}' if tick.numbers else ''}")
    found["seconds"] = round(time.perf_counter() - started_s, 1)
    if as_json:
        print(json.dumps(found))
    console.print(f"Took {found['seconds']} s.")
    if missing:
        raise AuditFailure(f"the demo did not show what it should: {', '.join(missing)}.")


def show(scene: Scene, turns: int) -> tuple[dict[str, Any], list[Tick], Rows]:
    """Run the conversations; returns the findings, the claims and a table. Raises AuditFailure."""
    with scene.engine() as llm:
        talked = _converse(llm, scene.talks, turns)
        limits = _limits(llm) if scene.short == "full" else {}
        llm.engine.audit()
        after = llm.statistics()
    plan = after["plan"]
    every = [output for turn in talked for output in turn]
    counters = ("prompt_tokens", "hit_tokens", "evicted_pages", "peak_shared_pages", "preemptions")
    found = {name: after[name] for name in counters} | {
        "model": scene.model,
        "hit_tokens_by_turn": [sum(output.num_cached_tokens for output in turn) for turn in talked],
        "pools": {pool["name"]: after["frames"][pool["name"]] for pool in plan["pools"]},
        "answers": len(every),
        **(limits or {"equal_answers": _equal_answers(scene, every)}),
    }
    if limits:
        found["speculation"] = _drafted(scene, every[:ASKED_TWICE])
    reused = ", ".join(f"{tokens:,} in turn {turn}" for turn, tokens in enumerate(found["hit_tokens_by_turn"], 1))
    rows = [
        ("Model", f"{scene.model}, {plan['max_total_num_tokens']:,} tokens in pages of {plan['page_size']}"),
        ("Asked", question(SUBJECTS[0], 0, 0)),
        ("Answered", " ".join(every[0].outputs[0].text.split())),
        ("Reused", f"tokens of prompts: {reused}"),
    ]
    if limits:
        rows.append(("Shared", f"{counted(found['peak_shared_pages'], 'page')}, read by several requests at once"))
        rows.append(("Refused", limits["refusal"].get("message", "")))
    else:
        for key, about in FRAMES.items():
            counts = ", ".join(f"{name} {pool[key]:,}" for name, pool in found["pools"].items())
            rows.append(("", f"{counts}: {about}"))
    return found, ticks_of(scene, found), rows


def _converse(llm: LLM, talks: int, turns: int) -> list[list[RequestOutput]]:
    """Conversations over one system prompt, turn by turn; the outputs of each turn."""
    from quire.scheduler.sampling_params import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS)
    conversations = [[{"role": "system", "content": " ".join(RULES)}] for _ in range(talks)]
    outputs = []
    for number in range(turns):
        for seed, messages in enumerate(conversations):
            messages.append({"role": "user", "content": question(SUBJECTS[seed], number, seed)})
        outputs.append(llm.chat(conversations, greedy))
        for messages, output in zip(conversations, outputs[-1], strict=True):
            messages.append({"role": "assistant", "content": output.outputs[0].text})
    return outputs


def _limits(llm: LLM) -> dict[str, Any]:
    """A request that just fits the pool, and one that is a token too long."""
    from quire.scheduler.sampling_params import SamplingParams

    largest, one = llm.plan.largest_request, SamplingParams(max_tokens=1)
    ids = [5 + token % 97 for token in range(largest)]
    [served] = llm.generate({"prompt_token_ids": ids[:-1]}, one)
    refusal: dict[str, Any] = {}
    try:
        llm.generate({"prompt_token_ids": ids}, one)
    except RequestTooLarge as error:
        refusal = {"status": error.status, "code": error.code, "message": f"{error.message} Fix: {error.fix}"}
    size = len(served.prompt_token_ids) + len(served.outputs[0].token_ids)
    return {"largest_request": largest, "largest_served_tokens": size, "refusal": refusal}


def _equal_answers(scene: Scene, warm: list[RequestOutput]) -> int:
    """How many of the answers an engine without a prefix cache gives too."""
    from quire.scheduler.sampling_params import SamplingParams

    prompts = [{"prompt_token_ids": output.prompt_token_ids} for output in warm]
    with scene.engine(kv_memory="64MiB", enable_prefix_caching=False) as uncached:
        cold = uncached.generate(prompts, SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS))
    return sum(one.outputs[0].token_ids == other.outputs[0].token_ids for one, other in zip(warm, cold, strict=True))


def _drafted(scene: Scene, answered: list[RequestOutput]) -> dict[str, Any]:
    """The same prompts, each twice, one after the other, on an engine that drafts from n-grams."""
    from quire.scheduler.sampling_params import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS)
    ngram = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 3, "shared_history": True}
    twice = [each for each in answered for _ in range(2)]
    with scene.engine(speculative_config=ngram) as llm:
        again = [llm.generate({"prompt_token_ids": each.prompt_token_ids}, greedy)[0] for each in twice]
        found = llm.statistics()
    pairs = zip(again, twice, strict=True)
    equal = sum(one.outputs[0].token_ids == other.outputs[0].token_ids for one, other in pairs)
    names = ("steps", "output_tokens")
    return {**found["speculation"], **{name: found[name] for name in names}, "equal_answers": equal}


def ticks_of(scene: Scene, found: Mapping[str, Any]) -> list[Tick]:
    """The claims about the findings of `show`."""
    short, evicted = found["pools"][scene.short], found["evicted_pages"]
    hit, prompt = found["hit_tokens"], found["prompt_tokens"]
    ticks = [Tick("prefixes were reused", hit > 0, f"{hit:,} of {prompt:,} prompt tokens ({hit / max(1, prompt):.0%})")]
    if "refusal" in found:
        served, refusal = found["largest_served_tokens"], found["refusal"]
        ticks += [
            Tick("pages were evicted", evicted > 0, f"{evicted:,}"),
            Tick("a request that just fits was served", served == found["largest_request"], counted(served, "token")),
            Tick("a larger request was refused", refusal.get("status") == 413, refusal.get("code", "")),
            *_ticks_of_drafts(found["speculation"]),
        ]
    else:
        if scene.short == "state":
            ticks.append(Tick("checkpoints of states were saved for others", short["left"] > 0, f"{short['left']}"))
        reclaimed = f"{scene.short}s were reclaimed while their prefixes stayed cached"
        ticks.append(Tick(reclaimed, short["dropped"] > 0 == evicted, counted(short["dropped"], "frame")))
        equal = found["equal_answers"]
        ticks.append(Tick("without a cache the answers are the same", equal == found["answers"], f"{equal}"))
    return [*ticks, Tick("no frame leaked", not any(pool["private"] for pool in found["pools"].values()))]


def _ticks_of_drafts(found: Mapping[str, Any]) -> list[Tick]:
    accepted, steps, tokens, equal = (
        found[name] for name in ("accepted_tokens", "steps", "output_tokens", "equal_answers")
    )
    return [
        Tick("drafts were accepted of questions asked twice", accepted > 0, f"{accepted} of {found['draft_tokens']}"),
        Tick("drafts saved steps", steps < tokens, f"{steps} steps for {tokens} tokens, one request at a time"),
        Tick("with drafts the answers are the same", equal == 2 * ASKED_TWICE, f"{equal}"),
    ]
