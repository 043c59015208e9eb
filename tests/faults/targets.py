"""Servers under test: which processes they have, what is left of them, and whether they are well again."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from tests.faults.cases import TIERS
from tests.faults.clients import NUM_PROMPTS, body
from tests.serve.live_server import LiveServer

RECOVERS_S = 90.0
ENDS_S = 40.0
_COMMON = ("--dtype", "float32", "--threads", "1", "--log-level", "warning", "--drain", "5", "--max-restarts", "100000")
_MORE_FILES = 8  # than at the first rest; connections that close, and event loops that wake
_MORE_THREADS = 12  # of the pools of a process, which grow up to the number of cores and 4


class Fault(AssertionError):
    """A check that failed."""


def wait_until(holds: Callable[[], object], seconds: float, what: str) -> None:
    """Poll; raises Fault at the deadline."""
    until = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > until:
            raise Fault(f"not within {seconds:.0f} s: {what}")
        time.sleep(0.02)


def is_engine(process: psutil.Process) -> bool:
    """Whether it runs steps: other children of a server track shared memory or tokenise."""
    with contextlib.suppress(psutil.Error):
        return process.status() != psutil.STATUS_ZOMBIE and any("spawn_main" in word for word in process.cmdline())
    return False


def engine_of(front: psutil.Process) -> psutil.Process | None:
    """The engine of a server, if one runs."""
    with contextlib.suppress(psutil.Error):
        return next(filter(is_engine, front.children()), None)
    return None


class Target:
    """A server or a cluster, started when it is needed, and again after its front has ended. `folder` is its own."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.num_starts = 0
        self.live: LiveServer
        self._folder = folder
        self._is_up = False

    def command(self) -> tuple[str, ...]:
        if self.name == "cluster":
            kinds = ("--prefill", "1", "--decode", "1", "--transfer-min-tokens", "16", "--kv-memory", "8MiB")
            return ("quire", "up", "--port", "0", "--json", *_COMMON, *kinds)
        options = (*_COMMON, "--kv-memory", "1536KiB", "--max-model-len", "256", *TIERS[self.name])
        if self.name == "disk":
            options += ("--storage", str(self._folder / "store"))
        return ("quire", "serve", "--port", "0", "--json", *options)

    def up(self) -> LiveServer:
        """Running and well; the same server as long as it lives."""
        if not self._is_up:
            self._folder.mkdir(exist_ok=True, mode=0o700)
            self.live = LiveCluster(*self.command()) if self.name == "cluster" else LiveServer(*self.command())
            self.num_starts += 1
            self._is_up = True
            self.front = psutil.Process(self.live.process.pid)
            self.well()
            self._shape = self._measure()
        return self.live

    def process(self, name: str) -> psutil.Process:
        """The process of this name, when there is one."""
        if name in ("front", "router"):
            return self.front
        if name == "engine":
            return self._engine(self.front)
        role, _, part = name.partition(" ")
        rows = self.live.request("/health")[1]["processes"]
        pid = next(row["pid"] for row in rows if row["name"].startswith(role))
        return self._engine(psutil.Process(pid)) if part else psutil.Process(pid)

    def _engine(self, front: psutil.Process) -> psutil.Process:
        found: list[psutil.Process | None] = []
        wait_until(lambda: found.append(engine_of(front)) or found[-1], RECOVERS_S, "there is an engine")
        assert found[-1] is not None
        return found[-1]

    def next_engine(self, before: int) -> psutil.Process:
        """The engine that takes the place of that process."""
        found: list[psutil.Process | None] = []

        def is_there() -> bool:
            found.append(engine_of(self.front))
            return found[-1] is not None and found[-1].pid != before

        wait_until(is_there, RECOVERS_S, "another engine starts")
        assert found[-1] is not None
        return found[-1]

    # -- what must hold after a fault

    def well(self) -> None:
        """Healthy, at rest, and audited."""
        wait_until(self._is_healthy, RECOVERS_S, "/health is 200 again")
        if self.name == "cluster":
            return
        wait_until(self._is_at_rest, RECOVERS_S, "nothing runs, waits or moves")
        status, found = self.live.request("/v1/cache/audit")
        if status != 200 or found["faults"] or found["violation"]:
            raise Fault(f"the audit: {status} {found}")

    def _is_healthy(self) -> bool:
        status, found = self.live.request("/health")
        rows = found.get("processes", ())
        return status == 200 and found["status"] == "ok" and all(row["healthy"] for row in rows)

    def _is_at_rest(self) -> bool:
        status, found = self.live.request("/v1/cache/statistics")
        if status != 200 or found["running_requests"] or found["waiting_requests"]:
            return False
        groups = [*found["frames"].values(), *(found.get("tiers") or {"host": {}})["host"].values()]
        return not any(group.get(state) for group in groups for state in ("private", "moving"))

    def ask(self, number: int) -> list[int]:
        """The tokens of an answer. A router learns of an engine's death when it looks, or by a request that fails."""
        until = time.monotonic() + RECOVERS_S
        while True:
            try:
                return ask(self.live, number)
            except Fault:
                if self.name != "cluster" or time.monotonic() > until:
                    raise
                time.sleep(0.5)

    def same_shape(self) -> None:
        """No more processes, files or threads than at its first rest."""
        before = self._shape
        _, most_files, most_threads = (before[0], before[1] + _MORE_FILES, before[2] + _MORE_THREADS)

        def holds() -> bool:
            processes, files, threads = self._measure()
            return processes == before[0] and files <= most_files and threads <= most_threads

        wait_until(holds, 30, f"as many processes, files and threads as {before}; there are {self._measure()}")

    def _measure(self) -> tuple[int, int, int]:
        """Processes; files and threads of the front."""
        return (1 + len(self.front.children(recursive=True)), self.front.num_fds(), self.front.num_threads())

    def family(self) -> list[psutil.Process]:
        """All processes of it."""
        with contextlib.suppress(psutil.Error):
            return [self.front, *self.front.children(recursive=True)]
        return []

    def gone(self, family: list[psutil.Process], code: int) -> None:
        """The front has ended with that code, and no process of its family is left."""
        self._is_up = False
        try:
            found = self.live.wait(ENDS_S)
            if found != code:
                raise Fault(f"the front ended with {found}, not {code}: {self.live.log()[-3000:]}")
            wait_until(lambda: not any(map(runs, family)), 20, "the children of a front that has ended end")
        finally:
            for each in filter(runs, family):
                with contextlib.suppress(psutil.Error):
                    each.kill()
            self.live.close()

    def down(self) -> None:
        """End it, as an operator does."""
        if self._is_up:
            family = self.family()
            self.live.terminate()
            self.gone(family, 0)

    def log(self) -> str:
        """The last lines of its log."""
        with contextlib.suppress(ValueError, AttributeError):  # it is closed, or was never made
            return self.live.log()[-3000:]
        return ""

    def drop(self) -> None:
        """Kill all of it: something is wrong with it."""
        if self._is_up:
            self._is_up = False
            for each in self.family():
                with contextlib.suppress(psutil.Error):
                    each.kill()
            self.live.close()
            shutil.rmtree(self._folder, ignore_errors=True)


class LiveCluster(LiveServer):
    """`quire up`: the summary is that of its last row, the router's."""

    def __init__(self, *command: str) -> None:
        super().__init__(*command)
        assert self.process.stdout is not None
        while self.summary["role"] != "router":
            self.summary = json.loads(self.process.stdout.readline())
        self.port = int(self.summary["url"].rpartition(":")[2])


def runs(process: psutil.Process) -> bool:
    """Whether it has not ended."""
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def answers() -> dict[int, list[int]]:
    """The tokens of each prompt, of a server that shares and moves nothing, one after the other."""
    plain = (*_COMMON, "--kv-memory", "8MiB", "--max-model-len", "256", "--no-prefix-caching")
    with LiveServer.quire(*plain) as live:
        return {number: ask(live, number) for number in range(NUM_PROMPTS)}


def ask(live: LiveServer, number: int) -> list[int]:
    """The tokens of an answer."""
    status, answer = live.request("/v1/completions", body(number))
    if status != 200:
        raise Fault(f"prompt {number}: {status} {answer}")
    return list(answer["choices"][0]["token_ids"])


def left_in_shared_memory() -> Iterator[Path]:
    """Files in shared memory that no process has mapped or open: they are left over."""
    found = [path for path in Path("/dev/shm").glob("*") if path.is_file()]  # before its user may be seen
    used = set[str]()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            used |= {each.path for each in process.memory_maps()} | {each.path for each in process.open_files()}
    yield from (path for path in found if str(path) not in used)
