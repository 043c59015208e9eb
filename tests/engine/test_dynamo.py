"""Dynamo's own indexer follows an engine's events, and says of each prompt how many of its tokens are cached."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import zmq

from quire.engine.core import EngineCore
from quire.engine.messages import EngineRequest
from quire.scheduler.sampling_params import SamplingParams
from quire.spec.events import Namespace
from tests.engine.running import tight_core
from tests.engine.test_kv_events import publisher_of, rest
from tests.engine.tiered import case_of
from tests.observe.test_kv_publisher import until
from tests.tiny_models import VOCAB_SIZE

PYTHON = os.environ.get("QUIRE_DYNAMO_PYTHON", sys.executable)
"""An interpreter that has ai-dynamo-runtime."""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.executable == PYTHON and find_spec("dynamo") is None, reason="Dynamo is not installed"),
]
PAGE = 4
PROBES = 10_000
SALTS = ("", "one", "two")


class Indexer:
    """`python -m dynamo.indexer`, and what it says of the one engine that it follows."""

    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as found:
            port = found.getsockname()[1]
        self._log = (folder / "indexer.log").open("w+")
        command = [PYTHON, "-m", "dynamo.indexer", "--port", str(port)]
        self._process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT)
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}")
        until(self._answers)

    def _answers(self) -> bool:
        try:
            return self._client.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def follow(self, core: EngineCore) -> None:
        """Read the events of an engine from its start on."""
        publisher = publisher_of(core)
        places = {"endpoint": publisher.address, "replay_endpoint": publisher.replay_address}
        answer = self._client.post("/register", json={"instance_id": 1, "model_name": "m", "block_size": PAGE} | places)
        assert answer.status_code == 201, answer.text
        self._publisher = publisher
        self._events = zmq.Context.instance().socket(zmq.SUB)
        self._events.subscribe(b"")
        self._events.connect(publisher.address)
        self._number = 0
        time.sleep(0.3)  # its sockets connect: what is sent before is in its first replay

    def catch_up(self) -> None:
        """Wait until all that was published has arrived at another reader."""
        publisher = self._publisher
        until(lambda: not publisher._queue)
        while self._number < publisher._next - 1 and self._events.poll(200):
            self._number = int.from_bytes(self._events.recv_multipart()[1], "big")

    def cached(self, tokens: np.ndarray[Any, np.dtype[np.int32]], salt: str) -> int:
        """How many first tokens it believes to be cached."""
        asked = {"token_ids": tokens.tolist(), "model_name": "m"} | ({"cache_salt": salt} if salt else {})
        scores = self._client.post("/query", json=asked).json()["scores"]
        return max([score for ranks in scores.values() for score in ranks.values()], default=0)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._client.close()
        self._events.close(linger=0)
        self._log.close()


@pytest.fixture
def indexer(tmp_path: Path) -> Iterator[Indexer]:
    found = Indexer(tmp_path)
    yield found
    found.close()


def prompt(random_of: random.Random) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Few different beginnings, so that they meet; no whole number of pages, so that all whole pages can be cached."""
    pages = [random_of.randrange(3) for _ in range(random_of.randrange(1, 7))]
    tokens = [7 * page + at for page in pages for at in range(PAGE)] + [VOCAB_SIZE - 1]
    return np.array(tokens, dtype=np.int32)


def compute(core: EngineCore, name: str, tokens: np.ndarray[Any, np.dtype[np.int32]], salt: str) -> int:
    """Compute a prompt: how many of its tokens were cached."""
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    core.add(EngineRequest(request_id=name, prompt=tokens.tobytes(), params=params, salt=salt))
    found = 0
    while core.has_work():
        for output in core.step():
            found = output.use.num_cached_tokens if output.use is not None else found
    return found


def probe(core: EngineCore, indexer: Indexer, seed: int, count: int) -> tuple[int, list[tuple[int, int]]]:
    """How many prompts had cached tokens, and where the indexer and the engine differ."""
    random_of, hits, wrong = random.Random(seed), 0, []
    for at in range(count):
        if random_of.randrange(200) == 0:
            core.flush(Namespace(salt=random_of.choice(SALTS)))
        tokens, salt = prompt(random_of), random_of.choice(SALTS)
        rest(core)
        sent = publisher_of(core).counters().batches
        believed = _steady(indexer, tokens, salt)
        cached = compute(core, f"{seed}-{at}", tokens, salt)
        assert publisher_of(core).counters().batches >= sent
        hits += cached > 0
        if believed != cached:
            wrong.append((believed, cached))
    return hits, wrong


def _steady(indexer: Indexer, tokens: np.ndarray[Any, np.dtype[np.int32]], salt: str) -> int:
    """What it says five times in a row: events are on their way for a moment, and longer on a busy machine."""
    indexer.catch_up()
    last, same = -1, 0
    while same < 5:
        found = indexer.cached(tokens, salt)
        same = same + 1 if found == last else 1
        last = found
        time.sleep(0.003)
    return last


def engine(name: str, **settings: Any) -> EngineCore:
    here = {"kv_events": "tcp://127.0.0.1:0", "kv_events_replay": "tcp://127.0.0.1:0"} | settings
    return tight_core(case_of(name).model, **{"num_tokens": 30 * PAGE, "page_size": PAGE} | here)


def test_its_match_is_what_was_cached(indexer: Indexer) -> None:
    core = engine("llama_gqa")
    indexer.follow(core)
    hits, wrong = probe(core, indexer, 0, PROBES)
    assert hits > 0.6 * PROBES and not wrong
    core.close()


@pytest.mark.parametrize("window_pages", [12, 400])
def test_of_windows_it_knows_the_most_that_can_be_cached(window_pages: int, indexer: Indexer) -> None:
    """Frames of windows leave before their pages do, which its events cannot say."""
    core = engine("gemma3_text", window_tokens=window_pages * PAGE)
    indexer.follow(core)
    hits, wrong = probe(core, indexer, 0, 300)
    assert hits > 60 and all(believed > cached for believed, cached in wrong)
    assert bool(wrong) == (window_pages == 12)
    core.close()


def test_a_restart_at_the_same_address_is_seen(indexer: Indexer) -> None:
    core = engine("llama_gqa")
    indexer.follow(core)
    assert probe(core, indexer, 1, 50)[0] > 10
    places = {"kv_events": publisher_of(core).address, "kv_events_replay": publisher_of(core).replay_address}
    core.close()
    core = engine("llama_gqa", **places)
    compute(core, "first", np.arange(9, dtype=np.int32), "")
    rest(core)
    time.sleep(2.0)  # it connects again, and then there is a message
    hits, wrong = probe(core, indexer, 2, 100)
    assert hits > 20 and not wrong
    core.close()
