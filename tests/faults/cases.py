"""What is done to which process, when, and what clients do meanwhile: drawn from a seed."""

from __future__ import annotations

import random
import signal
from dataclasses import dataclass

TIERS = {
    "none": (),
    "host": ("--host-memory", "4MiB"),
    "disk": ("--host-memory", "2MiB", "--storage-size", "16MiB", "--load", "always"),
}
"""Options of a server by its tiers; `disk` also needs a folder."""

SIGNALS = {"KILL": signal.SIGKILL, "STOP": signal.SIGSTOP, "TERM": signal.SIGTERM}

SERVER = ("engine", "front")
CLUSTER = ("router", "prefill", "decode", "prefill engine", "decode engine")

MOMENTS = ("idle", "begin", "decode", "end", "restart")
"""Before a request is sent; while the first arrive; after a token has arrived; right after the last answer, while pages
move to lower tiers; while an engine that was killed starts again."""

LOADS = ("one", "many", "leaving", "impatient")
"""One client; several; several of which some close their connections; several with deadlines that some cannot meet."""


@dataclass(frozen=True, slots=True)
class Case:
    """One run. `draw` gives what else is random in it."""

    seed: int
    number: int
    process: str
    signal: str
    moment: str
    tier: str
    load: str

    @property
    def target(self) -> str:
        """The servers that it needs: cases of one target can share them."""
        return "cluster" if self.process in CLUSTER else self.tier

    @property
    def ends_the_front(self) -> bool:
        """Whether the process that clients are connected to ends."""
        return self.process in ("front", "router") and self.signal != "STOP"

    def draw(self) -> random.Random:
        return random.Random(f"{self.seed} {self.number} draw")

    def __str__(self) -> str:
        what = f"{self.signal} to the {self.process} at '{self.moment}', tier {self.tier}, load {self.load}"
        return f"--seed {self.seed} --only {self.number}: {what}"


def case(seed: int, number: int, *, cluster_every: int = 0) -> Case:
    """The run of this number. The last of each `cluster_every` is of a cluster."""
    draw = random.Random(f"{seed} {number}")
    if cluster_every and number % cluster_every == cluster_every - 1:
        process, tier = draw.choice(CLUSTER), "host"
        signal_name = draw.choice(("KILL", "STOP", "TERM"))
        moment = draw.choice(("idle", "begin", "decode", "end"))
        return Case(seed, number, process, signal_name, moment, tier, draw.choice(("one", "many")))
    process = draw.choices(SERVER, (3, 2))[0]
    signal_name = draw.choices(tuple(SIGNALS), (4, 4, 2))[0]
    moment = draw.choice(MOMENTS if process == "engine" else MOMENTS[:-1])
    return Case(seed, number, process, signal_name, moment, draw.choice(tuple(TIERS)), draw.choice(LOADS))
