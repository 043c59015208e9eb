"""Agents as they are, each one turn with a tool call and its result, twice: what the second turn and run find cached.

The programs are found on PATH, or in the folders that QUIRE_TEST_AGENTS names. The engine is the real one, of the
bundled model for agents; it says what the prompt asks for.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serve.live_server import LiveServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MODEL = "quire-bundled-agent"
PAGE = 16
WITHIN_S = 240
COMMAND = "echo @@'@Done.@@'@"  # its result has the next answer; the command has not
TURN = re.compile(r": (\d+) prompt tokens, (\d+) cached, (\d+) output tokens")


@pytest.fixture(scope="module")
def saying() -> Iterator[LiveServer]:
    options = ("--kv-memory", "256MiB", "--log-level", "info")
    serve = ("tests.serve.saying_server", "serve", "--port", "0", "--json", "--model", MODEL, *options)
    with LiveServer(*serve) as live:
        yield live


def say(answer: str) -> str:
    return f"Say @@@{answer}@@@"


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class Agent:
    """An agent in a folder of its own, which is also its home, and the server that it talks to."""

    num_turns = 2

    def __init__(self, name: str, server: LiveServer, folder: Path) -> None:
        path = os.pathsep.join(each for name in ("QUIRE_TEST_AGENTS", "PATH") if (each := os.environ.get(name)))
        found = shutil.which(name, path=path)
        if found is None:
            pytest.skip(f"{name} is not on PATH, nor in QUIRE_TEST_AGENTS")
        self.program, self.server, self.folder = found, server, folder
        self._num_seen = len(TURN.findall(server.log()))

    def run(self, *arguments: str, given: str = "", **environment: str) -> str:
        """What it prints; it must end well."""
        done = subprocess.run(
            [self.program, *arguments],
            input=given,
            capture_output=True,
            text=True,
            cwd=self.folder,
            env=os.environ | {"HOME": str(self.folder), "PWD": str(self.folder)} | environment,
            timeout=WITHIN_S,
        )
        assert done.returncode == 0, (done.stdout[-2000:], done.stderr[-2000:], self.server.log()[-2000:])
        return done.stdout

    def turns(self) -> list[tuple[int, int, int]]:
        """Tokens of the prompt, cached ones and output of each turn since the last call, from the server's log. The
        shortest prompts of an agent, such as the one for a title, are no turns."""
        deadline = time.monotonic() + 30
        while True:
            self.server.wait_idle()
            found = [tuple(map(int, each)) for each in TURN.findall(self.server.log())[self._num_seen :]]
            if len(found) >= self.num_turns:
                self._num_seen += len(found)
                return sorted(found)[-self.num_turns :]  # type: ignore[return-value]
            assert time.monotonic() < deadline, self.server.log()[-2000:]
            time.sleep(0.1)


class Claude(Agent):
    def ask(self) -> str:
        prompt = say(call("Bash", command=COMMAND, description="Say"))
        url = self.server.summary["url"]
        options = ("--bare", "--tools", "Bash", "--allowedTools", "Bash", "--system-prompt", "Be brief.")
        return self.run(
            *(*options, "-p", prompt),
            ANTHROPIC_BASE_URL=url,
            ANTHROPIC_API_KEY="none",
            ANTHROPIC_MODEL=MODEL,
            CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
            DISABLE_TELEMETRY="1",
        )


class Codex(Agent):
    def ask(self) -> str:
        provider = f'{{name="quire", base_url="{self.server.summary["url"]}/v1", wire_api="responses"}}'
        settings = {"model": f'"{MODEL}"', "model_provider": '"quire"', "model_providers.quire": provider}
        options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        prompt = say(call("exec_command", cmd=COMMAND))
        return self.run("exec", "--skip-git-repo-check", *options, prompt, CODEX_HOME=str(self.folder))


class Opencode(Agent):
    def ask(self) -> str:
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": f"{self.server.summary['url']}/v1"},
            "models": {MODEL: {}},
        }
        settings = {"provider": {"quire": provider}, "model": f"quire/{MODEL}", "small_model": f"quire/{MODEL}"}
        (self.folder / "opencode.json").write_text(json.dumps(settings))
        given = say(call("bash", command=COMMAND, description="Say"))
        return self.run("run", given=given, OPENCODE_DISABLE_MODELS_FETCH="1", OPENCODE_DISABLE_AUTOUPDATE="1")


class Aider(Agent):
    num_turns = 1  # it edits the file itself

    def ask(self) -> str:
        file = self.folder / "hello.py"
        file.write_text('print("hi")\n')
        edit = '<<<<<<< SEARCH\nprint("hi")\n=======\nprint("Done.")\n>>>>>>> REPLACE'
        no = ("git", "stream", "show-model-warnings", "check-update", "analytics", "suggest-shell-commands")
        options = ("--yes", "--edit-format", "diff", "--map-tokens", "0", *(f"--no-{each}" for each in no))
        self.run(
            *("--model", f"openai/{MODEL}", *options, "--message", say(f"hello.py\n```\n{edit}\n```\n"), "hello.py"),
            OPENAI_API_BASE=f"{self.server.summary['url']}/v1",
            OPENAI_API_KEY="none",
            LITELLM_LOCAL_MODEL_COST_MAP="True",
        )
        return file.read_text()


@pytest.mark.parametrize("kind", [Claude, Codex, Opencode, Aider])
def test_a_turn_finds_all_whole_pages_of_the_one_before(kind: type[Agent], saying: LiveServer, tmp_path: Path) -> None:
    agent = kind(kind.__name__.lower(), saying, tmp_path)
    runs = []
    for _ in range(2):
        assert "Done." in agent.ask()  # type: ignore[attr-defined]
        runs.append(agent.turns())
    for (prompt, _, output), (_, cached, _) in [(run[0], run[1]) for run in runs if len(run) > 1]:
        assert cached >= (prompt + output - 1) // PAGE * PAGE, runs  # the last token of an answer is not computed
    first, again = runs[0][0], runs[1][0]
    assert again[0] == first[0]
    assert again[1] == (first[0] - 1) // PAGE * PAGE, runs
    print(kind.__name__, runs)
