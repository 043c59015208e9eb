"""`quire fleet` on a Ray of its own: answers, what fails and is replaced, and the end of all processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from quire.spec.bundled import BUNDLED_MODELS
from tests.changes import slow_unless_changed
from tests.fleet.live_fleet import MARK, SMALL, LiveFleet, body, left, streamed
from tests.routing.live_router import wait_until
from tests.serve.live_server import LiveServer

pytest.importorskip("ray.serve", reason="Ray is not installed: pip install 'quire-kv[fleet]'")

FLEET = ("src/quire/fleet/", "src/quire/routing/", "tests/fleet/")


@pytest.fixture(scope="module")
def fleet() -> Iterator[LiveFleet]:
    with LiveFleet("--replicas", "2", "--prefill", "1", "--transfer-min-tokens", "16") as live:
        yield live
        assert not live.end()
        assert "Traceback" not in live.log(), live.log()


def tokens(live: LiveServer, given: dict[str, Any]) -> list[int]:
    status, answer = live.request("/v1/completions", given)
    assert status == 200, answer
    return list(answer["choices"][0]["token_ids"])


@pytest.fixture(scope="module")
def expected() -> dict[int, list[int]]:
    """The tokens of one `quire serve`."""
    with LiveServer.quire(*SMALL) as live:
        return {number: tokens(live, body(number, max_tokens=200, ignore_eos=True)) for number in range(8)}


@slow_unless_changed(*FLEET)
def test_tokens_are_those_of_one_server(fleet: LiveFleet, expected: dict[int, list[int]]) -> None:
    assert sorted(row["role"] for row in fleet.rows) == ["decode", "decode", "prefill", "router"]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda number: tokens(fleet, body(number)), range(8)))
    assert found == [expected[number][:24] for number in range(8)]
    rows = fleet.request("/v1/cache/statistics")[1]["processes"]
    transfers = {row["name"].partition("-")[0]: row["answer"]["transfer"] for row in rows}
    assert transfers["prefill"]["sent_tokens"] > 0
    assert transfers["decode"]["fallbacks"] == 0
    chat = fleet.client().chat.completions.create(
        model="quire-bundled", messages=[{"role": "user", "content": "Who walked?"}], max_tokens=8
    )
    assert chat.choices[0].message.content
    assert streamed(fleet.url, body(1)) == (expected[1][:24], "[DONE]")


@slow_unless_changed(*FLEET)
def test_one_scrape_has_the_metrics_of_all(fleet: LiveFleet) -> None:
    text = fleet.request("/metrics")[1]
    for row in fleet.rows[:3]:
        assert f'quire_healthy{{model_name="quire-bundled",process="{row["name"]}"}} 1.0' in text
        assert f'quire_router_in_flight{{process="{row["name"]}"}}' in text


@slow_unless_changed(*FLEET, "src/quire/serve/page.py", "src/quire/serve/live.py")
def test_the_page_of_a_fleet_shows_each_of_its_engines(fleet: LiveFleet) -> None:
    assert "<title>Quire</title>" in httpx.get(fleet.url, headers={"Accept": "text/html"}).text
    for row in fleet.rows[:-1]:
        with httpx.stream("GET", f"{fleet.url}/v1/cache/live", params={"server": row["name"]}, timeout=30) as answer:
            assert (answer.status_code, answer.headers["x-quire-server"]) == (200, row["name"])
            begin = next(line for line in answer.iter_lines() if line.startswith("data: "))
        assert json.loads(begin.removeprefix("data: "))["model"] == "quire-bundled"


@slow_unless_changed(*FLEET)
def test_nothing_listens_beyond_loopback(fleet: LiveFleet) -> None:
    pids = {process.pid for process in fleet.processes()}
    found = [each for each in psutil.net_connections("inet") if each.status == psutil.CONN_LISTEN and each.pid in pids]
    assert len(found) > 8
    assert {each.laddr.ip for each in found} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


@slow_unless_changed(*FLEET)
def test_an_engine_is_closed_to_who_does_not_come_through_the_router(fleet: LiveFleet) -> None:
    url = fleet.rows[0]["url"]
    assert httpx.get(f"{url}/v1/models").status_code == 401
    assert httpx.put(f"{url}/v1/cache/peers", json={"prefill_peers": []}).status_code == 401
    assert fleet.request("/v1/models")[0] == 200
    for process in fleet.processes():
        assert "QUIRE_API_KEY" not in " ".join(process.cmdline())


@pytest.mark.slow
def test_a_replica_that_is_killed_is_replaced_and_cuts_no_stream(
    fleet: LiveFleet, expected: dict[int, list[int]]
) -> None:
    before = set(fleet.health())
    with ThreadPoolExecutor(6) as pool:
        streams = [pool.submit(streamed, fleet.url, body(n, max_tokens=200, ignore_eos=True)) for n in range(6)]
        time.sleep(0.3)
        fleet.replicas("Engine")[0].kill()
        for number, stream in enumerate(streams):
            assert stream.result() == (expected[number], "[DONE]")
    wait_until(lambda: set(fleet.health()) != before and len(fleet.health()) == 3, 120)
    assert tokens(fleet, body(1)) == expected[1][:24]


@pytest.mark.slow
@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_server_that_is_killed_is_replaced(fleet: LiveFleet, expected: dict[int, list[int]], role: str) -> None:
    before = fleet.health()
    name = next(name for name in before if name.startswith(role))
    with ThreadPoolExecutor(6) as pool:
        streams = [pool.submit(streamed, fleet.url, body(n, max_tokens=200, ignore_eos=True)) for n in range(6)]
        time.sleep(0.3)
        os.kill(before[name]["pid"], signal.SIGKILL)
        for number, stream in enumerate(streams):
            assert stream.result() == (expected[number], "[DONE]")
    wait_until(lambda: name not in fleet.health() and len(fleet.health()) == 3, 120)
    assert tokens(fleet, body(7)) == expected[7][:24]


@pytest.mark.slow
def test_an_ingress_that_is_killed_comes_back_at_the_same_address(
    fleet: LiveFleet, expected: dict[int, list[int]]
) -> None:
    before = fleet.replicas("Ingress")
    before[0].kill()

    def listens() -> bool:
        try:
            return bool(fleet.request("/health"))
        except OSError:
            return False

    wait_until(listens, 120)
    assert len(fleet.health()) == 3, "it knows all of them when it listens"
    assert fleet.replicas("Ingress") != before
    assert tokens(fleet, body(2)) == expected[2][:24]


@pytest.mark.slow
def test_engines_follow_the_load_and_no_request_fails() -> None:
    bounds = ("--min-replicas", "1", "--max-replicas", "3", "--target-requests", "2")
    with LiveFleet(*bounds, "--upscale-delay", "1", "--downscale-delay", "1") as live:
        given = body(1, max_tokens=200, ignore_eos=True)
        alone = streamed(live.url, given)
        assert alone[1] == "[DONE]"
        seen, until = {1}, time.monotonic() + 180
        with ThreadPoolExecutor(8) as pool:

            def load() -> list[Any]:
                found = []
                while 3 not in seen and time.monotonic() < until:
                    found.append(streamed(live.url, given))
                return found

            clients = [pool.submit(load) for _ in range(8)]
            wait_until(lambda: seen.add(len(live.health())) or 3 in seen, 180)  # type: ignore[func-returns-value]
            assert all(each == alone for client in clients for each in client.result())
        wait_until(lambda: len(live.health()) == 1, 180)
        assert streamed(live.url, given) == alone
        assert not live.end()


@pytest.mark.slow
def test_a_fleet_without_engines_says_why_and_comes_back(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(BUNDLED_MODELS["quire-bundled"], model)
    with LiveFleet("--model", str(model)) as live:
        model.rename(tmp_path / "elsewhere")
        os.kill(live.rows[0]["pid"], signal.SIGKILL)
        wait_until(lambda: f"there is no folder '{model}'" in live.log(), 120)
        assert live.log().count("there is no folder") < 3, "an error that comes again is told once"
        assert (live.request("/health")[0], live.health()) == (503, {})
        assert "quire_router_can_answer 0.0" in live.request("/metrics")[1]
        (tmp_path / "elsewhere").rename(model)
        wait_until(lambda: live.request("/v1/completions", body(1))[0] == 200, 120)
        assert not live.end()


@pytest.mark.slow
def test_open_requests_get_the_whole_drain_to_finish() -> None:
    with LiveFleet("--drain", "100") as live, ThreadPoolExecutor(1) as pool:
        stream = pool.submit(streamed, live.url, body(1, max_tokens=800, ignore_eos=True))
        time.sleep(0.5)
        os.kill(live.rows[0]["pid"], signal.SIGSTOP)
        live.process.send_signal(signal.SIGTERM)
        time.sleep(65)
        assert live.process.poll() is None, live.log()
        os.kill(live.rows[0]["pid"], signal.SIGCONT)
        found, end = stream.result()
        assert (len(found), end) == (800, "[DONE]")
        assert live.process.wait(90) == 0, live.log()
        assert not left(live.mark)


@pytest.mark.slow
def test_no_process_is_left_when_the_first_is_killed() -> None:
    with LiveFleet() as live:
        live.process.kill()
        live.process.wait()
        assert not left(live.mark, 30)


@pytest.mark.slow
def test_a_signal_during_the_start_ends_it() -> None:
    mark = uuid.uuid4().hex
    command = [sys.executable, "-m", "quire", "fleet", "--port", "0", "--json", *SMALL]
    environment = os.environ | {MARK: mark}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as started:
        time.sleep(6)
        started.send_signal(signal.SIGINT)
        said = started.communicate(timeout=60)
        assert started.returncode == 130, said
        assert b"Traceback" not in said[1], said
    assert not left(mark)


def failed(*options: str) -> dict[str, Any]:
    """The error of a fleet that does not start, and nothing of it is left."""
    mark = uuid.uuid4().hex
    command = [sys.executable, "-m", "quire", "fleet", "--json", *SMALL, *options]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env=os.environ | {MARK: mark}
    )
    assert not left(mark)
    assert done.stdout == ""
    error: dict[str, Any] = json.loads(done.stderr.splitlines()[-1])["error"]
    assert error["exit_code"] == done.returncode != 0
    return error


def test_a_port_in_use_is_named_before_ray_starts() -> None:
    with LiveServer.echo() as server:
        began = time.monotonic()
        assert f"127.0.0.1:{server.port} is in use" in failed("--port", str(server.port))["message"]
        assert time.monotonic() - began < 8


@slow_unless_changed(*FLEET)
def test_an_address_without_a_cluster_is_named() -> None:
    error = failed("--address", "127.0.0.1:1999")
    assert "no Ray cluster answers at '127.0.0.1:1999'" in error["message"] and "ray start" in error["fix"]
    assert "'nowhere' is not HOST:PORT" in failed("--address", "nowhere")["message"]
    with LiveServer.echo() as server:
        assert "not Ray" in failed("--address", f"127.0.0.1:{server.port}")["message"]


@slow_unless_changed(*FLEET)
def test_the_error_of_an_engine_is_that_of_the_fleet(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    error = failed("--port", "0", "--storage", f"{tmp_path}/file")
    assert error["code"] == "QUIRE-STORE-01" and "file" in error["message"]


@slow_unless_changed(*FLEET)
def test_gpus_that_are_not_there_are_named() -> None:
    assert "2 engines need 2 GPUs" in failed("--port", "0", "--replicas", "2", "--num-gpus", "1")["message"]
