"""`quire up`: real processes, which are killed, restarted and ended."""

from __future__ import annotations

import asyncio
import json
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar
from unittest.mock import AsyncMock

import psutil
import pytest

from quire.cluster.cluster import Supervisor, _start, make_members, reserve_port
from quire.errors import ConnectorError, InvalidInput, NoServer
from quire.routing.config import ClusterConfig
from quire.routing.member import Member
from quire.routing.router import open_client
from quire.routing.upstream import Upstream
from quire.serve.config import ServerConfig
from quire.serve.server import bind
from tests.changes import TRANSFER, slow_unless_changed
from tests.cli.conftest import Run
from tests.routing.live_router import wait_until
from tests.serve.live_server import LiveServer

SMALL = ("--kv-memory", "32MiB", "--dtype", "float32", "--max-model-len", "1024")
TEXT = "It was a fine autumn evening, and the whole party had walked out to see the new plantation. "


class LiveCluster(LiveServer):
    """`quire up` on a free port; ready when constructed. `rows` are those of its processes."""

    def __init__(self, *options: str) -> None:
        super().__init__("quire", "up", "--port", "0", "--json", "--drain", "5", *SMALL, *options)
        assert self.process.stdout is not None
        self.rows = [self.summary]
        while self.rows[-1]["role"] != "router":
            self.rows.append(json.loads(self.process.stdout.readline()))
        self.summary = self.rows[-1]
        self.port = int(self.summary["url"].rpartition(":")[2])

    def statistics_of(self, name: str) -> dict[str, Any]:
        """The engine's own."""
        found = self.request("/v1/cache/statistics")[1]["processes"]
        return next(row["answer"] for row in found if row["name"] == name)

    def health(self) -> dict[str, dict[str, Any]]:
        """Of each process."""
        return {row["name"]: row for row in self.request("/health")[1]["processes"]}

    def is_whole(self) -> bool:
        return all(row["healthy"] for row in self.health().values())


@pytest.fixture(scope="module")
def cluster() -> Iterator[LiveCluster]:
    with LiveCluster("--prefill", "1", "--decode", "2", "--transfer-min-tokens", "16") as live:
        yield live
        live.terminate()
        assert live.wait() == 0, live.log()
        assert not live.children_left()
        assert "Traceback" not in live.log()


def body(number: int, **more: Any) -> dict[str, Any]:
    prompt = f"Chapter {number}. " + TEXT * (6 + number % 3)
    return {"prompt": prompt, "max_tokens": 24, "temperature": 0, "return_token_ids": True} | more


def tokens(live: LiveServer, given: dict[str, Any]) -> list[int]:
    status, answer = live.request("/v1/completions", given)
    assert status == 200, answer
    return list(answer["choices"][0]["token_ids"])


@pytest.fixture(scope="module")
def expected() -> dict[int, list[int]]:
    """The tokens of one `quire serve`."""
    with LiveServer.quire(*SMALL) as live:
        return {number: tokens(live, body(number)) for number in range(12)}


def received(cluster: LiveCluster) -> int:
    return sum(cluster.statistics_of(f"decode-{index}")["transfer"]["received_tokens"] for index in range(2))


@slow_unless_changed("src/quire/cluster/", "src/quire/serve/", *TRANSFER, "tests/serve/live_server.py")
def test_tokens_are_those_of_one_server(cluster: LiveCluster, expected: dict[int, list[int]]) -> None:
    assert [row["role"] for row in cluster.rows] == ["prefill", "decode", "decode", "router"]
    assert len({row["pid"] for row in cluster.rows}) == 4
    with ThreadPoolExecutor(4) as pool:
        found = dict(zip(range(8), pool.map(lambda number: tokens(cluster, body(number)), range(8)), strict=True))
    assert found == {number: expected[number] for number in range(8)}
    for index in range(2):
        transfer = cluster.statistics_of(f"decode-{index}")["transfer"]
        assert transfer["received_tokens"] > 0, "the router sent it nothing, or it computed all prompts"
        assert transfer["fallbacks"] == 0
    assert cluster.statistics_of("prefill-0")["transfer"]["sent_tokens"] == received(cluster)
    assert tokens(cluster, body(1)) == expected[1]
    assert cluster.client().models.list().data[0].id == "quire-bundled"


@pytest.mark.slow
def test_a_prefill_engine_that_is_killed_costs_time_alone(cluster: LiveCluster, expected: dict[int, list[int]]) -> None:
    before = cluster.health()["prefill-0"]
    with ThreadPoolExecutor(3) as pool:
        open_requests = [pool.submit(tokens, cluster, body(number)) for number in (8, 9, 10)]
        time.sleep(0.02)
        psutil.Process(before["pid"]).kill()
        assert [done.result() for done in open_requests] == [expected[number] for number in (8, 9, 10)]
    wait_until(lambda: cluster.health()["prefill-0"]["pid"] != before["pid"], 120)
    wait_until(cluster.is_whole, 120)
    assert cluster.health()["prefill-0"]["url"] == before["url"]
    had = received(cluster)
    names = [f"decode-{index}" for index in range(2)]
    wait_until(lambda: all(cluster.statistics_of(name)["transfer"]["prefill_peers"] for name in names))
    assert tokens(cluster, body(11)) == expected[11]
    assert received(cluster) > had


@pytest.mark.slow
def test_a_decode_engine_that_is_killed_is_replaced(cluster: LiveCluster, expected: dict[int, list[int]]) -> None:
    before = cluster.health()["decode-0"]["pid"]
    psutil.Process(before).kill()
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda number: tokens(cluster, body(number)), range(8))
        assert list(found) == [expected[number] for number in range(8)]
    wait_until(lambda: cluster.health()["decode-0"]["pid"] != before, 120)
    wait_until(cluster.is_whole, 120)
    engine = max(psutil.Process(cluster.health()["decode-0"]["pid"]).children(), key=lambda c: c.memory_info().rss)
    engine.kill()  # its server lives, and says that it is unhealthy
    before = cluster.health()["decode-0"]["pid"]
    wait_until(lambda: cluster.health()["decode-0"]["pid"] != before, 120)
    wait_until(cluster.is_whole, 120)


@slow_unless_changed("src/quire/cluster/", "src/quire/serve/", *TRANSFER, "tests/serve/live_server.py")
def test_the_secret_is_in_no_command_line(cluster: LiveCluster) -> None:
    for row in cluster.rows[:3]:
        process = psutil.Process(cluster.health()[row["name"]]["pid"])
        secret = process.environ()["QUIRE_TRANSFER_SECRET"]
        assert len(secret) > 30
        assert all(secret not in word for each in (process, *process.children()) for word in each.cmdline())


@pytest.mark.slow
def test_no_process_is_left_when_the_first_is_killed() -> None:
    with LiveCluster("--prefill", "1", "--decode", "1") as live:
        live.process.kill()
        live.wait()
        assert not live.children_left()


@pytest.mark.slow
def test_a_second_signal_ends_it_at_once() -> None:
    with LiveCluster("--prefill", "0", "--decode", "2", "--drain", "1000000") as live:
        assert [row["role"] for row in live.rows] == ["engine", "engine", "router"]
        connection = live.open_request("/v1/completions", body(1, max_tokens=700, n=16, ignore_eos=True))
        wait_until(lambda: any(live.statistics_of(f"engine-{n}")["running_requests"] for n in range(2)))
        live.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        live.process.send_signal(signal.SIGINT)
        assert live.wait() == 0, live.log()
        connection.close()
        assert not live.children_left()
        assert "Traceback" not in live.log(), live.log()


@slow_unless_changed("src/quire/cluster/", "src/quire/cli/")
def test_a_signal_during_the_start_ends_it() -> None:
    command = [sys.executable, "-m", "quire", "up", "--port", "0", "--json", *SMALL]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as up:
        wait_until(lambda: len(psutil.Process(up.pid).children()) == 2, 120)
        children = psutil.Process(up.pid).children(recursive=True)
        up.send_signal(signal.SIGINT)
        assert up.wait(60) == 130
        _, alive = psutil.wait_procs(children, timeout=30)
        assert not alive
        assert up.stderr is not None
        assert b"Traceback" not in up.stderr.read()


@slow_unless_changed("src/quire/cluster/", "src/quire/cli/")
def test_the_error_of_a_process_is_that_of_the_cluster(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    command = [sys.executable, "-m", "quire", "up", "--json", "--port", "0", *SMALL, "--storage", f"{tmp_path}/file"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert "file" in json.loads(done.stderr.splitlines()[-1])["error"]["message"]


def test_a_process_that_does_not_start_again_is_tried_less_and_less(monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = Supervisor([], stall_s=1.0, stop_s=1.0, tell=lambda name, line: None)
    member = Member(upstream=Upstream(name="decode-0", role="decode", url=""), options=(), environment={})
    member.ready_s = time.monotonic() - 3600.0
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 5:
            raise asyncio.CancelledError

    monkeypatch.setattr("quire.cluster.cluster.asyncio.sleep", sleep)
    monkeypatch.setattr(Member, "start", AsyncMock(side_effect=NoServer("no memory.")))
    monkeypatch.setattr(supervisor, "_end_of", AsyncMock(return_value="ended"))
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(supervisor._keep(member))
    assert pauses == [0.2, 0.4, 0.8, 1.6, 3.2]


FIRST_READY_THEN_HUNG = """
import pathlib, sys, time
starts = pathlib.Path(__file__).with_name("starts")
starts.write_text(starts.read_text() + "." if starts.exists() else ".")
number = len(starts.read_text())
print(f"start {number}", file=sys.stderr, flush=True)
if number == 2:
    time.sleep(3600)
print("{}", flush=True)
time.sleep(0 if number == 1 else 3600)
"""


def test_a_process_that_hangs_before_it_is_ready_is_killed_and_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "quire").mkdir()
    (tmp_path / "quire" / "__init__.py").touch()
    (tmp_path / "quire" / "__main__.py").write_text(FIRST_READY_THEN_HUNG)
    monkeypatch.setattr("quire.cluster.cluster._LEAST_START_S", 1.5)
    monkeypatch.setattr("quire.cluster.cluster._STARTS", 0.0)
    monkeypatch.setattr("quire.cluster.cluster._FIRST_PAUSE_S", 0.01)
    upstream = Upstream(name="decode-0", role="decode", url="")
    member = Member(upstream=upstream, options=(), environment={"PYTHONPATH": str(tmp_path)})
    supervisor = Supervisor([member], stall_s=60.0, stop_s=1.0, tell=lambda name, line: None)

    async def run() -> None:
        await supervisor.start()
        first = upstream.pid
        keeping = asyncio.create_task(supervisor.keep())
        hung = set[int | None]()
        async with asyncio.timeout(60):
            while not (upstream.is_healthy and upstream.pid != first):
                hung |= set() if upstream.is_healthy else {upstream.pid}
                await asyncio.sleep(0.01)
        assert not any(psutil.pid_exists(pid) for pid in hung - {upstream.pid} if pid is not None)
        keeping.cancel()
        await asyncio.wait((keeping,))
        await supervisor.kill()

    asyncio.run(run())
    assert (tmp_path / "quire" / "starts").read_text() == "..."
    assert "it was not ready within 1.5 s, and was killed." in caplog.text


STARTING = json.dumps({"error": {"message": "the engine has not started.", "code": "engine_dead"}})


class SlowStart(BaseHTTPRequestHandler):
    """A decode engine's server: 503 twice, then statistics without a peer, then with one."""

    answers: ClassVar[list[tuple[int, str]]] = []

    def do_GET(self) -> None:
        status, body = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        """Write nothing."""


async def start_beside(answers: list[tuple[int, str]]) -> None:
    """Start a cluster of one prefill engine and one decode engine, whose server gives these answers, the last for
    ever."""
    SlowStart.answers = answers
    with ThreadingHTTPServer(("127.0.0.1", 0), SlowStart) as http:
        Thread(target=http.serve_forever, daemon=True).start()
        upstream = Upstream(name="decode-0", role="decode", url=f"http://127.0.0.1:{http.server_port}")
        supervisor = Supervisor([], stall_s=1.0, stop_s=1.0, tell=lambda name, line: None)
        config, server = ClusterConfig.read({"prefill": 1, "decode": 1}), ServerConfig.read({})
        try:
            async with open_client() as client:
                await _start(supervisor, config, server, client, [upstream])
        finally:
            http.shutdown()


def statistics(*peers: str) -> tuple[int, str]:
    return 200, json.dumps({"transfer": {"prefill_peers": peers, "problems": {}}})


def test_a_decode_engine_that_starts_slowly_is_waited_for() -> None:
    answers = [(503, STARTING), (503, STARTING), statistics(), statistics("prefill-0")]
    asyncio.run(start_beside(answers))
    assert answers == [statistics("prefill-0")]


def test_a_decode_engine_that_never_starts_ends_the_start_with_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.cluster.cluster._CONNECT_S", 0.2)
    with pytest.raises(ConnectorError, match=r"decode-0 is not connected .* 503.*the engine has not started"):
        asyncio.run(start_beside([(503, STARTING)]))


# -- settings


def members(**settings: Any) -> list[Any]:
    return make_members(ClusterConfig.read(settings), ServerConfig.read({"port": 1}), list(range(5000, 5100)))


def test_settings_reach_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_STORAGE", "/nowhere")
    monkeypatch.setenv("QUIRE_PORT", "1")
    ngram = {"method": "ngram", "num_speculative_tokens": 3}
    settings = {"kv_memory": "1MiB", "enable_prefix_caching": True, "speculative_config": ngram, "retain_share": 0.5}
    found = members(prefill=2, decode=1, transfer_connector="tcp", **settings)
    assert [member.upstream.name for member in found] == ["prefill-0", "prefill-1", "decode-0"]
    secrets = {member.environment["QUIRE_TRANSFER_SECRET"] for member in found}
    assert len(secrets) == 1
    for member in found:
        assert "QUIRE_STORAGE" not in member.environment, "it is not a setting of the cluster"
        given = {name: member.environment[f"QUIRE_{name.upper()}"] for name in (*settings, "transfer_connector")}
        read = ClusterConfig.read({"prefill": 1, **given})
        assert (read.kv_memory, read.enable_prefix_caching, read.retain_share) == (2**20, True, 0.5)
        assert read.speculative_config is not None
        assert (read.speculative_config.num_steps, read.transfer_connector) == (3, "tcp")
    listens = [member.environment["QUIRE_TRANSFER_LISTEN"] for member in found[:2]]
    assert found[2].environment["QUIRE_PREFILL_PEERS"] == ",".join(listens)
    ports = [*(listen.rpartition(":")[2] for listen in listens), *(m.environment["QUIRE_PORT"] for m in found)]
    assert len(set(ports)) == 5
    assert members(prefill=1, decode=1)[0].environment["QUIRE_TRANSFER_SECRET"] not in secrets


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--prefill", "0", "--transfer-connector", "tcp"), "--transfer-connector does nothing without --prefill"),
        (("--prefill", "1", "--no-prefix-caching"), "prefix caching is off"),
        (("--transfer-secret", "short"), "16 characters"),
        (("--decode", "0"), "decode"),
    ],
)
def test_settings_that_contradict_each_other_start_nothing(run: Run, options: tuple[str, ...], said: str) -> None:
    done = run("up", "--port", "0", "--json", *options)
    assert done.exit_code == 2
    assert said in json.loads(done.stderr)["error"]["message"]


def test_roles_are_the_clusters_choice(run: Run) -> None:
    done = run("up", "--json", env={"QUIRE_ROLE": "decode"})
    assert "QUIRE_ROLE: each of several engines gets its own" in json.loads(done.stderr)["error"]["message"]
    with pytest.raises(InvalidInput, match="gets its own"):
        ClusterConfig.read({"prefill_peers": "127.0.0.1:1"})


def test_a_reserved_port_can_be_listened_on_again_and_again() -> None:
    with reserve_port() as reserved:
        port = reserved.getsockname()[1]
        for _ in range(2):
            bind("127.0.0.1", port).close()


CONNECTIONS = ("src/quire/cluster/", "src/quire/routing/", "src/quire/serve/server.py")


@slow_unless_changed(*CONNECTIONS)
def test_a_server_whose_connections_are_all_open_is_not_taken_for_a_lost_one() -> None:
    with LiveCluster("--prefill", "0", "--max-connections", "4", "--stall-after", "1") as live, ExitStack() as stack:
        given = body(1, max_tokens=800, n=16, ignore_eos=True, stream=True)
        for client in [stack.enter_context(live.open_request("/v1/completions", given)) for _ in range(4)]:
            assert client.recv(12) == b"HTTP/1.1 200"
        time.sleep(6)
        stack.close()
        wait_until(lambda: live.health()["engine-0"]["pid"] == live.rows[0]["pid"])
        assert "was killed" not in live.log(), live.log()


@slow_unless_changed(*CONNECTIONS)
def test_a_router_has_files_for_all_its_connections_and_those_to_servers() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (192, hard))
    try:
        live = LiveCluster("--prefill", "0", "--max-connections", "200")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with live, ExitStack() as stack:
        given = {"prompt": "a", "max_tokens": 64, "ignore_eos": True, "stream": True}
        clients = [stack.enter_context(live.open_request("/v1/completions", given)) for _ in range(195)]
        for client in clients:
            with client.makefile("rb") as answer:
                assert answer.readline().split()[1] == b"200", live.log()
