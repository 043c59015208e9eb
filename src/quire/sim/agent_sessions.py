"""agent_sessions: sessions of coding agents, as caches see them.

    agent's prompt and tools | project | task, answer, result of a tool, answer, result, ... | question of a person, ...
    shared by many             by some   the session's own: every turn repeats all of it

A turn appends 500 to 6,000 tokens. Most answers call a tool, and the next turn follows in seconds. A person reads the
others, which takes minutes. Now and then an answer starts sub-agents, which work on a copy of the history or on a
prompt of their own, and the session waits for them. A history that becomes too long is replaced by a summary. Sessions
end without a word: nothing tells that no turn will follow.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from quire.sim.trace_request import Text
from quire.sim.workload import NOMINAL_STEP_S, Workload

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


@dataclass(slots=True)
class _Agent:
    """A session or a sub-agent: what was `said` so far, and when its next turn may arrive."""

    load: Workload
    session: str
    opening: list[Text]
    said: list[Text]
    arrival: float
    after: str = ""
    num_turns: int = 0
    num_branches: int = 0
    think: float = 0.0
    length: int = field(init=False)

    def __post_init__(self) -> None:
        self.length = sum(text.length for text in self.said)

    def turn(self, appended: Text, output_tokens: int, *, calls: bool) -> None:
        """Add the next turn, and draw how long the one after it takes to arrive: a tool's time or a person's."""
        self.said.append(appended)
        end = CALL_ENDS if calls else ANSWER_ENDS
        output = self.load.text(output_tokens - end.length)
        request_id = f"{self.session}.{self.num_turns}"
        fields: dict[str, Any] = {"after": self.after, "think": round(self.think, 6)} if self.after else {}
        self.load.add(
            self.said,
            output,
            self.arrival,
            end,
            request_id=request_id,
            session=self.session,
            calls_tool=calls,
            **fields,
        )
        self.said += [output, end]
        self.length += appended.length + output_tokens
        self.num_turns += 1
        self.think = self.load.spread(*(TOOL_S if calls else PERSON_S))
        self.after = request_id
        self.arrival += output_tokens * NOMINAL_STEP_S + self.think

    def wait_for(self, other: _Agent) -> None:
        """The next turn follows the last one of `other`, as a tool's result."""
        self.think = self.load.spread(*TOOL_S)
        self.after = other.after
        self.arrival = other.arrival - other.think + self.think

    def summarise(self) -> None:
        """Ask for a summary of everything, and go on with the opening, the summary and the last words only."""
        last = self.said[-3:]
        self.turn(self.load.text(200, 400), self.load.between(*SUMMARY), calls=True)
        self.said = [*self.opening, *self.said[-2:], *last]
        self.length = sum(text.length for text in self.said)

    def branch(self, prompt: Text) -> None:
        """One to three sub-agents work at a time, on this history or on a prompt of their own. This one waits."""
        started: list[_Agent] = []
        for _ in range(self.load.between(1, 3)):
            self.num_branches += 1
            forks = self.load.random.random() < FORKS
            said = list(self.said) if forks else [prompt, *self.opening[1:]]
            sub = _Agent(self.load, f"{self.session}/{self.num_branches}", said, list(said), self.arrival, self.after)
            sub.think = self.think
            turns = self.load.between(3, 12)
            for at in range(turns):
                sub.turn(self.load.text(_appended(self.load)), self.load.between(30, 300), calls=at < turns - 1)
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
        agent = _Agent(load, f"s{number}", opening, list(opening), arrival)
        most = load.between(context // 2, context)
        abandoned = load.random.random() < ABANDONED
        turns = load.between(*TURNS)
        for at in range(turns):
            if agent.length > most:
                agent.summarise()
            calls = abandoned if at == turns - 1 else load.random.random() < CALLS
            agent.turn(load.text(_appended(load)), load.between(*((30, 300) if calls else (150, 1200))), calls=calls)
            if calls and at < turns - 1 and load.random.random() < BRANCHES:
                agent.branch(sub_prompt)


def _appended(load: Workload) -> int:
    return round(load.spread(*APPENDED))
