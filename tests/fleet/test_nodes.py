"""A fleet in a Ray cluster of several nodes: a node that is lost, a rolling update, and `quire fleet --address`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from quire.serve.server import bind
from tests.fleet.live_fleet import MARK, SMALL, body, left, streamed
from tests.routing.live_router import wait_until

pytest.importorskip("ray.serve", reason="Ray is not installed: pip install 'quire-kv[fleet]'")

pytestmark = pytest.mark.slow

NODES = 3
ENGINE = {"kv_memory": "32MiB", "dtype": "float32", "max_model_len": 1024}


class Nodes:
    """The cluster of `tests.fleet.nodes`, whose proxy is at `url`."""

    def __init__(self) -> None:
        with bind("127.0.0.1", 0) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.mark = uuid.uuid4().hex
        environment = os.environ | {MARK: self.mark, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
        environment |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
        self.environment = environment
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fleet.nodes", str(self.port), str(NODES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        self.address = self._answer()["address"]

    def ask(self, line: str) -> Any:
        """Let it obey a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(("{", '"')):  # Ray writes others there
                return json.loads(line)
        raise AssertionError("the cluster has ended")

    def engines(self) -> set[str]:
        """The names that the router knows."""
        return {row["name"] for row in httpx.get(f"{self.url}/health").json()["processes"] if row["healthy"]}

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            assert self._process.wait(90) == 0
            assert not left(self.mark)
        finally:
            assert self._process.stdout is not None
            self._process.stdout.close()
            for process in left(self.mark, 0):
                process.kill()


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    live = Nodes()
    yield live
    live.close()


class Clients:
    """Four that stream without end, until the block ends. All their answers are the same, and whole."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._given = body(1, max_tokens=200, ignore_eos=True)
        self.found: list[Any] = []

    def __enter__(self) -> Clients:
        self._alone = streamed(self._url, self._given)
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(4)
        self._clients = [self._pool.submit(self._run) for _ in range(4)]
        return self

    def _run(self) -> None:
        while not self._stop.is_set():
            self.found.append(streamed(self._url, self._given))

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pool.shutdown()
        for client in self._clients:
            client.result()
        assert self._alone[1] == "[DONE]" and len(self._alone[0]) == 200
        assert [each for each in self.found if each != self._alone] == []


def deploy(nodes: Nodes, replicas: int = NODES - 1, **server: Any) -> None:
    assert nodes.ask(f"deploy {json.dumps([ENGINE | {'replicas': replicas, 'num_cpus': 1}, server])}") == "done"
    wait_until(lambda: len(nodes.engines()) == replicas, 120)


def test_a_rolling_update_fails_no_request(nodes: Nodes) -> None:
    deploy(nodes)
    before = nodes.engines()
    with Clients(nodes.url) as clients:
        deploy(nodes, max_queue=100)
        wait_until(lambda: not nodes.engines() & before and len(nodes.engines()) == NODES - 1, 180)
    assert len(clients.found) >= 4


def test_a_node_that_is_killed_costs_no_token(nodes: Nodes) -> None:
    deploy(nodes, NODES)  # so that each has an engine
    before = nodes.engines()
    with Clients(nodes.url):
        assert nodes.ask("kill") == "done"
        wait_until(lambda: len(nodes.engines()) == NODES - 1, 60)
        assert nodes.ask("add") == "done"
        wait_until(lambda: nodes.engines() != before and len(nodes.engines()) == NODES, 180)


def refused(nodes: Nodes, port: int) -> str:
    """The error of a fleet that cannot join."""
    command = [sys.executable, "-m", "quire", "fleet", "--address", nodes.address, "--port", str(port), "--json"]
    done = subprocess.run(command, env=nodes.environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    return str(json.loads(done.stderr.splitlines()[-1])["error"]["message"])


def test_a_command_joins_a_cluster_and_leaves_it(nodes: Nodes) -> None:
    deploy(nodes)
    assert "runs in this cluster already" in refused(nodes, nodes.port)
    assert nodes.ask("delete") == "done"
    assert "Serve listens at" in refused(nodes, nodes.port + 1)
    command = [sys.executable, "-m", "quire", "fleet", "--address", nodes.address, "--port", str(nodes.port), "--json"]
    deploy(nodes)
    second = subprocess.run(command, env=nodes.environment, capture_output=True, text=True)
    assert second.returncode == 2 and "a fleet runs in this cluster" in second.stderr
    assert nodes.engines(), "the first goes on"
    nodes.ask("delete")
    with subprocess.Popen(
        [*command, "--until-eof", "--drain", "2", *SMALL],
        env=nodes.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as joined:
        assert joined.stdin is not None and joined.stdout is not None
        rows = [json.loads(joined.stdout.readline())]
        while rows[-1]["role"] != "router":
            rows.append(json.loads(joined.stdout.readline()))
        assert rows[-1]["url"] == nodes.url
        assert {row["name"] for row in rows[:-1]} == nodes.engines()
        joined.stdin.close()
        assert joined.wait(90) == 0
    assert httpx.get(f"{nodes.url}/health").status_code in (404, 503)
    deploy(nodes)
