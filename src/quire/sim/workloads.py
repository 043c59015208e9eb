"""Generated workloads, by name. Each is a function that adds requests to a `Workload`; other arguments are settings.

Nothing here holds tokens: seeds and lengths are drawn when a workload is made, and tokens are computed from them later.

In sessions of coding agents a turn appends 500 to 6,000 tokens. Most answers call a tool, and the next turn follows
in seconds. A person reads the others, which takes minutes. Now and then an answer starts sub-agents, which work on a
copy of the history or on a prompt of their own, and the session waits for them. A history that becomes too long is
replaced by a summary. Sessions end without a word: nothing tells that no turn will follow.
"""

from __future__ import annotations

import inspect
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import accumulate, product
from typing import Any, TypeVar

from quire.errors import InvalidInput
from quire.sim.trace_request import Draft, Text, TraceRequest, text_seed
from quire.spec.events import Namespace

Chosen = TypeVar("Chosen")

NOMINAL_STEP_S = 0.02
"""Assumed time of a decode step, for the estimated arrivals of follow-ups."""


class Workload:
    """A workload while it is being made. All random numbers come from one seeded generator."""

    def __init__(self, name: str, seed: int) -> None:
        self.random, self.seed = random.Random(f"{name}/{seed}"), seed
        self.requests: list[Draft] = []
        self._seed = text_seed((name, seed))
        self._num_texts = 0

    def text(self, low: int, high: int | None = None) -> Text:
        """A text of `low` tokens, or of a random number from `low` to `high`; no other text begins like it."""
        length = low if high is None else self.between(low, high)
        self._num_texts += 1
        return Text((self._seed, self._num_texts), length)

    def between(self, low: int, high: int) -> int:
        """A uniform whole number from `low` to `high`, both included."""
        return self.random.randint(low, high)

    def arrivals(self, count: int, rate: float) -> Iterator[tuple[int, float]]:
        """Numbers from 0 on and times of a Poisson process of `rate` a second, from 0 on, to the microsecond."""
        arrival = 0.0
        for number in range(count):
            yield number, arrival
            arrival += round(self.random.expovariate(1.0) * (1 / rate), 6)

    def spread(self, low: float, high: float) -> float:
        """A number from `low` to `high` whose logarithm is uniform: most are small, and a few are large."""
        return math.exp(self.random.uniform(math.log(low), math.log(high)))

    def popular(self, choices: Sequence[Chosen], exponent: float = 1.0) -> Chosen:
        """One of `choices`, the n-th with a weight of `n ** -exponent`."""
        weights = accumulate((at + 1) ** -exponent for at in range(len(choices)))
        return self.random.choices(choices, cum_weights=tuple(weights))[0]

    def add(self, prompt: Sequence[Text], output: Text, arrival: float, *ends: Text, **fields: Any) -> None:
        """Add a request whose output ends with `ends`. `fields` are others of a `TraceRequest`. Its id is its number
        unless they name it."""
        fields.setdefault("request_id", str(len(self.requests)))
        output_texts = (output, *ends)
        self.requests.append(
            TraceRequest(prompt=tuple(prompt), output=output_texts, arrival=round(arrival, 6), **fields)
        )


@dataclass(slots=True)
class GeneratedChat:
    """Turns whose prompts are all that was `said` so far and a new text. The next turn arrives at `arrival`, or as long
    as its user thinks after that."""

    load: Workload
    session: str
    said: list[Text]
    arrival: float
    namespace: Namespace = Namespace()  # noqa: RUF009 - a frozen value
    after: str = ""
    num_turns: int = 0

    def turn(self, user: Text, output_tokens: int, *, think: float = 0.0) -> None:
        """Add the next turn. It arrives `think` seconds after the one before has finished; the first has no wait."""
        think = think if self.num_turns else 0.0
        self.add(user, [self.load.text(output_tokens)], self.arrival + think, think)
        self.arrival += think + output_tokens * NOMINAL_STEP_S

    def add(self, user: Text, output: Sequence[Text], arrival: float, think: float, **fields: Any) -> None:
        """Add a turn. `fields` are others of a `TraceRequest`."""
        self.said.append(user)
        request_id = f"{self.session}.{self.num_turns}"
        if self.after:
            fields |= {"after": self.after, "think": round(think, 6)}
        fields |= {"session": self.session, "namespace": self.namespace}
        self.load.add(self.said, output[0], arrival, *output[1:], request_id=request_id, **fields)
        self.said += output
        self.num_turns += 1
        self.after = request_id


# -- conversations: each prompt repeats the earlier turns

_TURNS = (1, 1, 2, 3, 3, 4, 5, 6, 8, 10)


def chat(load: Workload, *, requests: int = 200, systems: int = 8, documents: int = 40, rate: float = 2.0) -> None:
    """Conversations of 1 to 10 turns under popular system prompts, every fourth about a popular document.

    `rate` is new conversations a second.
    """
    opening = [load.text(256, 2048) for _ in range(systems)]
    attached = [load.text(1024, 6144) for _ in range(documents)]
    for number, arrival in load.arrivals(requests, rate):
        if len(load.requests) >= requests:
            break
        said = [load.popular(opening, 1.1)]
        if load.random.random() < 0.25:
            said.append(load.popular(attached, 0.9))
        conversation = GeneratedChat(load, f"c{number}", said, arrival)
        for turn in range(min(load.random.choice(_TURNS), requests - len(load.requests))):
            think = load.random.uniform(0.5, 20.0) if turn else 0.0
            conversation.turn(load.text(20, 400), load.between(40, 300), think=think)


def sessions(load: Workload, *, requests: int = 200, systems: int = 16, rate: float = 4.0) -> None:
    """Many sessions at a time, 1 to 8 turns each, that come back after 96 to 640 requests of others.

    `rate` is requests a second, new sessions and turns together.
    """
    opening = [load.text(256, 2048) for _ in range(systems)]
    due: list[tuple[int, int, GeneratedChat, int]] = []
    for tick in range(requests):
        if due and due[0][0] <= tick:
            _, number, conversation, turns = heappop(due)
        else:
            said, turns, number = [load.popular(opening)], load.between(1, 8), tick
            conversation = GeneratedChat(load, f"s{number}", said, arrival=tick / rate)
        wait = load.between(96, 640)
        conversation.turn(load.text(32, 512), load.between(16, 192), think=wait / rate)
        if turns > 1:
            heappush(due, (tick + wait, number, conversation, turns - 1))


def alternating(
    load: Workload, *, sessions: int = 2, tokens: int = 8192, turns: int = 6, user: int = 200, think: float = 30.0
) -> None:
    """A few sessions of `tokens` each that take turns; every turn repeats the whole session. The session that runs
    needs the room of the one before."""
    for number in range(sessions):
        conversation = GeneratedChat(load, f"s{number}", [load.text(tokens)], arrival=number * think / sessions)
        for _ in range(turns):
            conversation.turn(load.text(user), user // 2 + 1, think=think)


def agents(load: Workload, *, tasks: int = 32, calls: int = 12, tools: int = 1024) -> None:
    """Agents that call the model in a loop: 86 % of the gaps are under a second, 95 % under ten, the rest minutes.

    `tools` is the length of the instructions that all of them share.
    """
    instructions = load.text(tools)
    for number in range(tasks):
        task = load.text(100, 800)
        agent = GeneratedChat(load, f"a{number}", [instructions, task], arrival=load.random.uniform(0.0, 20.0))
        for _ in range(calls):
            draw = load.random.random()
            low, high = (0.05, 1.0) if draw < 0.86 else (1.0, 10.0) if draw < 0.95 else (60.0, 600.0)
            think = load.random.uniform(low, high)
            agent.turn(load.text(20, 600), load.between(20, 160), think=think)


# -- prefixes that are hard for a cache to keep, or to find


def rag_scan(load: Workload, *, requests: int = 200, system: int = 2048, hot_every: int = 8, rate: float = 4.0) -> None:
    """A scan: long prompts of passages that never come again, and every `hot_every`-th request a short question under
    one system prompt. A cache should not evict that prompt for the passages."""
    hot = load.text(system)
    for number, arrival in load.arrivals(requests, rate):
        if number % hot_every:
            prompt = [load.text(256, 512) for _ in range(4)]
        else:
            prompt = [hot, load.text(20, 100)]
        load.add(prompt, load.text(16, 64), arrival=arrival)


def mixed_prefixes(
    load: Workload, *, requests: int = 400, large: int = 4, small: int = 96, tokens: int = 8192, rate: float = 4.0
) -> None:
    """`large` prefixes of up to `tokens` and `small` ones of a 16th to a 64th of that, all requested equally often. A
    cache that counts each large one as one entry has room for little else."""
    shared = [load.text(tokens // 2, tokens) for _ in range(large)]
    shared += [load.text(max(tokens // 64, 1), max(tokens // 16, 1)) for _ in range(small)]
    for _, arrival in load.arrivals(requests, rate):
        load.add([load.random.choice(shared), load.text(10, 50)], load.text(8, 32), arrival=arrival)


def match_unit(load: Workload, *, unit: int = 64, requests: int = 4, rate: float = 2.0) -> None:
    """Families of `requests` prompts that share just less than a unit, a unit and just more, and 1,600 tokens of 2,200
    and 1,500 of 2,200: hits depend on the unit in which prefixes match."""
    lengths = [(shared, 2 * unit) for shared in (unit - 1, unit, unit + 1) if shared]
    for shared, own in (*lengths, (1600, 600), (1500, 700)):
        prefix = load.text(shared)
        for _ in range(requests):
            arrival, session = len(load.requests) / rate, f"{shared}+{own}"
            load.add([prefix, load.text(own)], load.text(8), arrival=arrival, session=session)


# -- slightly more than fits, just as much, and less


def over_commit(
    load: Workload, *, pool: int = 16384, ratio: float = 1.25, prompt: int = 128, output: int = 512, rate: float = 50.0
) -> None:
    """Short prompts with long answers, together `ratio` times a pool of `pool` tokens: all of them start, and some must
    be preempted before all can end."""
    requests = max(round(pool * ratio / (prompt + output)), 1)
    for _, arrival in load.arrivals(requests, rate):
        length = load.between(output // 2 + 1, output + output // 2)
        load.add([load.text(prompt)], load.text(length), arrival=arrival)


def two_loads(load: Workload, *, pool: int = 16384, share: float = 0.6, rounds: int = 4, output: int = 64) -> None:
    """Two prompts of `share` of the pool at the same time, again and again: each fits, both do not."""
    prompts = [load.text(max(int(pool * share) - output, 1)) for _ in range(2)]
    for number in range(rounds):
        for prompt in prompts:
            load.add([prompt], load.text(output), arrival=number * 10.0)


def near_capacity(load: Workload, *, pool: int = 4096, page: int = 16, rounds: int = 2, output: int = 32) -> None:
    """Requests of a pool's length, and of up to two pages less and more; the longer ones can never be served."""
    for number in range(rounds):
        for at, pages in enumerate((0, -2, 1, -1, 2)):
            prompt = load.text(max(pool + pages * page - output, 1))
            arrival = number * 50.0 + at * 10.0
            load.add([prompt], load.text(output), arrival=arrival, session=f"{pages:+d} pages")


def abort_storm(
    load: Workload, *, requests: int = 200, share: float = 0.89, systems: int = 4, rate: float = 40.0
) -> None:
    """Requests of which `share` lose their client: a third while they wait, the rest at some token of the answer."""
    opening = [load.text(256, 1024) for _ in range(systems)]
    leaving = set(load.random.sample(range(requests), round(requests * min(share, 1.0))))
    for number, arrival in load.arrivals(requests, rate):
        length = load.between(40, 200)
        abort_after = 0 if load.random.random() < 1 / 3 else load.between(1, length - 1)
        load.add(
            [load.popular(opening), load.text(50, 500)],
            load.text(length),
            arrival=arrival,
            abort_after=abort_after if number in leaving else None,
        )


def fillers(
    load: Workload, *, requests: int = 24, fillers: int = 2000, filler_tokens: int = 1, rate: float = 200.0
) -> None:
    """A set of `requests` twice, and between them `fillers` prompts of `filler_tokens` that answer with one token: the
    second time should hit as much as the first allows."""
    system = load.text(1024)
    asked = [(load.text(50, 400), load.text(16, 64)) for _ in range(requests)]
    arrival = 0.0
    for session in ("before", "after"):
        for question, answer in asked:
            load.add([system, question], answer, arrival=arrival, session=session)
            arrival += 20.0 / rate
        if session == "before":
            for _ in range(fillers):
                load.add([load.text(filler_tokens)], load.text(1), arrival=arrival, session="filler")
                arrival += 1 / rate


def fits(load: Workload, *, pool: int = 32768, turns: int = 4) -> None:
    """Conversations that all fit a pool of `pool` tokens: no eviction is needed, so eviction should cost nothing."""
    tokens = pool // 2
    system = load.text(tokens // 8)
    for number in range(8):
        conversation = GeneratedChat(load, f"s{number}", [system], arrival=number * 2.0)
        for _ in range(turns):
            share = max(tokens // (16 * turns), 1)
            conversation.turn(load.text(share), max(share // 2, 1), think=load.random.uniform(1.0, 5.0))


# -- requests that must not share, or must not slow each other down, whatever their text is


def rl_groups(
    load: Workload, *, epochs: int = 3, prompts: int = 4, fewest: int = 8, most: int = 64, round_s: float = 60.0
) -> None:
    """Reinforcement learning: in each round `fewest` to `most` samples of each prompt at once, and new weights after
    it, which make all earlier pages invalid. The prompts are the same in every round."""
    asked = [load.text(128, 1024) for _ in range(prompts)]
    for epoch in range(epochs):
        weights, arrival = Namespace(salt=f"weights {epoch}"), epoch * round_s
        for number, prompt in enumerate(asked):
            for _ in range(load.between(min(fewest, most), most)):
                output, session = load.text(32, 256), f"group {number}"
                load.add([prompt], output, arrival=arrival, session=session, namespace=weights)


def same_text_other_namespace(load: Workload, *, texts: int = 6, repeats: int = 2, rate: float = 4.0) -> None:
    """Equal prompts under the plain model, two adapters and two salts (two images behind the same placeholder, or
    two tenants): each may only hit pages of its own namespace."""
    plain, one, other = Namespace(), Namespace(adapter="one"), Namespace(adapter="other")
    namespaces = (plain, one, other, Namespace(salt="one"), Namespace(adapter="one", salt="other"))
    asked = [(load.text(200, 1500), load.text(16, 64)) for _ in range(texts)]
    for _, (prompt, output), namespace in product(range(repeats), asked, namespaces):
        load.add([prompt], output, arrival=len(load.requests) / rate, namespace=namespace)


def noisy_neighbour(load: Workload, *, requests: int = 200, noise: int = 9, rate: float = 4.0) -> None:
    """Two tenants: for each turn of a quiet one's conversations a noisy one sends `noise` prompts that never recur."""
    quiet, noisy = Namespace(salt="quiet"), Namespace(salt="noisy")
    system = load.text(1024)
    turns = max(requests // (noise + 1), 1)
    think = (noise + 1) / rate
    for number in range(0, turns, 4):
        conversation = GeneratedChat(load, f"quiet {number}", [system], arrival=number * think, namespace=quiet)
        for _ in range(min(4, turns - number)):
            conversation.turn(load.text(50, 300), load.between(20, 100), think=think)
    for number in range(max(requests - turns, 0)):
        prompt, output = load.text(500, 2000), load.text(20, 100)
        load.add([prompt], output, arrival=number / rate, session="noisy", namespace=noisy)


TENANTS = re.compile(r"[A-Za-z][\w-]*:[^:=,]*(,[A-Za-z][\w-]*:[^:=,]*)+")
"""Tenants and how many of the requests are each's: noisy:9,quiet:1."""

TENANT_REQUESTS, TENANT_RATE = 400, 4.0


def tenant_chats(load: Workload, parts: Mapping[str, int]) -> None:
    """Each tenant has conversations of its own, in its own namespace: 400 requests in all, 4 new conversations in a
    second, both in these parts. What one says does not depend on the others."""
    total = sum(parts.values())
    for name, part in parts.items():
        own = Workload(f"tenant {name}", 0)
        own.random, own.requests = random.Random(f"{load.seed}/{name}"), load.requests
        opening, space = [own.text(256, 2048) for _ in range(4)], Namespace(salt=f"{name}/")
        left = max(1, TENANT_REQUESTS * part // total)
        for number, arrival in own.arrivals(left, TENANT_RATE * part / total):
            turns = min(left, own.random.choice(_TURNS))
            left -= turns
            chat = GeneratedChat(own, f"{name} {number}", [own.popular(opening, 1.1)], arrival, space)
            for turn in range(turns):
                think = own.random.uniform(0.5, 20.0) if turn else 0.0
                chat.turn(own.text(20, 400), own.between(40, 300), think=think)
            if not left:
                break


# -- by name

TURNS = (10, 60)
APPENDED = (500, 6000)  # tokens that a turn adds, before its answer
TOOL_S = (0.3, 30.0)
PERSON_S = (20.0, 1200.0)
CALLS = 0.85  # share of the answers that call a tool
BRANCHES = 0.06  # share of those that start sub-agents
FORKS = 0.5  # share of sub-agents that begin with the history
ABANDONED = 0.25  # share of sessions whose last answer calls a tool whose result never comes
SUMMARY = (800, 2500)
CALL_ENDS, ANSWER_ENDS = Text(("end of a call",), 2), Text(("end of an answer",), 2)
"""The last tokens of every output that calls a tool, and of every other one, as models have them. The very last
token is never computed, so policies see the one before."""


@dataclass(slots=True, kw_only=True)
class _Agent(GeneratedChat):
    """A session or a sub-agent. Its opening is `said` again after a summary."""

    opening: list[Text]
    num_branches: int = 0
    think: float = 0.0
    length: int = field(init=False)

    def __post_init__(self) -> None:
        self.length = sum(text.length for text in self.said)

    def act(self, appended: Text, output_tokens: int, *, calls: bool) -> None:
        """Add the next turn, and draw how long the one after it takes to arrive: a tool's time or a person's."""
        end = CALL_ENDS if calls else ANSWER_ENDS
        output = (self.load.text(output_tokens - end.length), end)
        self.add(appended, output, self.arrival, self.think, calls_tool=calls)
        self.length += appended.length + output_tokens
        self.think = self.load.spread(*(TOOL_S if calls else PERSON_S))
        self.arrival += output_tokens * NOMINAL_STEP_S + self.think

    def wait_for(self, other: _Agent) -> None:
        """The next turn follows the last one of `other`, as a tool's result."""
        self.think = self.load.spread(*TOOL_S)
        self.after = other.after
        self.arrival = other.arrival - other.think + self.think

    def summarise(self) -> None:
        """Ask for a summary of everything, and go on with the opening, the summary and the last words only."""
        last = self.said[-3:]
        self.act(self.load.text(200, 400), self.load.between(*SUMMARY), calls=True)
        self.said = [*self.opening, *self.said[-2:], *last]
        self.length = sum(text.length for text in self.said)

    def branch(self, prompt: Text) -> None:
        """One to three sub-agents work at a time, on this history or on a prompt of their own. This one waits."""
        started: list[_Agent] = []
        for _ in range(self.load.between(1, 3)):
            self.num_branches += 1
            forks = self.load.random.random() < FORKS
            said = list(self.said) if forks else [prompt, *self.opening[1:]]
            name = f"{self.session}/{self.num_branches}"
            sub = _Agent(self.load, name, list(said), self.arrival, after=self.after, opening=said, think=self.think)
            turns = self.load.between(3, 12)
            for at in range(turns):
                sub.act(self.load.text(_appended(self.load)), self.load.between(30, 300), calls=at < turns - 1)
            started.append(sub)
        self.wait_for(max(started, key=lambda sub: sub.arrival - sub.think))


def agent_sessions(
    load: Workload, *, sessions: int = 4, agents: int = 3, projects: int = 12, context: int = 120_000, rate: float = 0.1
) -> None:
    """Coding agents: 10 to 60 turns that append 500 to 6,000 tokens, gaps of seconds for tools and of minutes for
    people, sub-agents, and a summary in place of a history of `context` tokens. `rate` is new sessions a second."""
    prompts = [(load.text(6000, 16000), load.text(2000, 6000)) for _ in range(agents)]
    about = [load.text(500, 4000) for _ in range(projects)]
    for number, arrival in load.arrivals(sessions, rate):
        prompt, sub_prompt = load.popular(prompts)
        opening = [prompt, load.popular(about)]
        agent = _Agent(load, f"s{number}", list(opening), arrival, opening=opening)
        most = load.between(context // 2, context)
        abandoned = load.random.random() < ABANDONED
        turns = load.between(*TURNS)
        for at in range(turns):
            if agent.length > most:
                agent.summarise()
            calls = abandoned if at == turns - 1 else load.random.random() < CALLS
            agent.act(load.text(_appended(load)), load.between(*((30, 300) if calls else (150, 1200))), calls=calls)
            if calls and at < turns - 1 and load.random.random() < BRANCHES:
                agent.branch(sub_prompt)


def _appended(load: Workload) -> int:
    return round(load.spread(*APPENDED))


_FUNCTIONS: tuple[Callable[..., None], ...] = (
    chat, sessions, alternating, agents, agent_sessions, rag_scan, mixed_prefixes, match_unit, over_commit, two_loads,
    near_capacity, abort_storm, fillers, fits, rl_groups, same_text_other_namespace, noisy_neighbour,
)  # fmt: skip

WORKLOADS = {make.__name__.replace("_", "-"): make for make in _FUNCTIONS}
"""Name to function; its docstring says what the workload is."""


def is_workload(source: str) -> bool:
    """Whether it names a workload, or tenants."""
    return source.partition(":")[0] in WORKLOADS or bool(TENANTS.fullmatch(source))


def make_workload(source: str, seed: int) -> Sequence[Draft]:
    """The requests of a workload: `name`, `name:setting=value,setting=value`, or those of tenants (`tenant_chats`):
    `noisy:9,quiet:1`. The same source and seed give the same requests everywhere. Raises InvalidInput for a setting
    that it does not have."""
    name, _, settings = source.partition(":")
    load = Workload(name, seed)
    if TENANTS.fullmatch(source):
        parts = dict(each.split(":") for each in source.split(","))
        if wrong := [name for name, part in parts.items() if not re.fullmatch("[1-9][0-9]{0,5}", part)]:
            told = f"the part of tenant '{wrong[0]}' is '{parts[wrong[0]]}'."
            raise InvalidInput(told, fix="give a whole number from 1 to 999999, as in noisy:9,quiet:1.")
        tenant_chats(load, {name: int(part) for name, part in parts.items()})
        return load.requests
    WORKLOADS[name](load, **_settings(name, settings))
    return load.requests


def _settings(name: str, settings: str) -> dict[str, float]:
    _, *parameters = inspect.signature(WORKLOADS[name]).parameters.values()
    known: dict[str, Any] = {each.name: each.default for each in parameters}
    fix = "it has " + ", ".join(f"{key}={value}" for key, value in known.items()) + "."
    found: dict[str, float] = {}
    for setting in filter(None, settings.split(",")):
        key, _, value = setting.partition("=")
        if key not in known:
            raise InvalidInput(f"workload '{name}' has no setting '{key}'.", fix=fix)
        try:
            found[key] = type(known[key])(value)
        except ValueError:
            why = f"setting '{key}' of workload '{name}' is not a number such as {known[key]}: '{value}'."
            raise InvalidInput(why, fix=fix) from None
        if not 0 < found[key] < 1e9:
            raise InvalidInput(f"setting '{key}' of workload '{name}' is {value}.", fix="use a number above 0.")
    return found
