"""A connector's store on real servers: what was saved is loaded by another engine, and a damaged record is a miss."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from quire.memory.record import HEADER_BYTES
from quire.tiers.scope_facts import read_facts
from quire.tiers.store import Answer, Store, StoreKey, write_record
from quire.tiers.stores.registry import open_store
from tests.changes import STORES, unless_changed
from tests.connectors.test_checked_store import FACTS, SIZES, checked, halves, key, loaded, payload
from tests.tiers.stores.servers import NotHere, free_port, mooncake_master, started, valkey

pytestmark = unless_changed(__name__, "src/quire/connectors/", *STORES)
HIT, MISS = Answer.HIT, Answer.MISS


@pytest.fixture(params=["valkey", "s3", "mooncake"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    with ExitStack() as stack:
        if request.param == "valkey":
            pytest.importorskip("redis")
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="quire-")))
            stack.enter_context(started(lambda: valkey(folder)))
            url = f"unix://{folder}/valkey.sock?db=0"
        elif request.param == "s3":
            pytest.importorskip("obstore")
            pytest.importorskip("moto.server")
            from tests.tiers.stores.test_s3 import BUCKET, with_bucket

            for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
                monkeypatch.setenv(name, "testing")
            port = free_port()
            stack.enter_context(with_bucket(port))
            url = f"s3://{BUCKET}/connector?endpoint=http://127.0.0.1:{port}"
        else:
            try:
                mooncake_master()
            except NotHere as reason:
                pytest.skip(str(reason))
            from tests.tiers.stores.test_mooncake import running

            pool = stack.enter_context(running(tmp_path))
            url = f"mooncake://127.0.0.1:{pool.port}?metrics={pool.metrics}&bounce=16MiB"
        yield stack.enter_context(closing(open_store(url)))


def test_two_engines_on_a_server(store: Store) -> None:
    engine, again, other = checked(store), checked(store), checked(store, weights="w2")
    for each in (engine, again, other):
        each._deadline_s = 30.0  # the servers share this machine
    keys, payloads = [key(at, at % 2) for at in range(40)], [payload(at, at % 2) for at in range(40)]
    assert engine.submit_save(keys, [halves(each) for each in payloads]).wait() == [HIT] * 40
    assert again.submit_exists([*keys, key(99)]).wait() == [HIT] * 40 + [MISS]
    buffers = [bytearray(SIZES[part]) for _, part in keys]
    assert again.submit_load(keys, [halves(each) for each in buffers]).wait() == [HIT] * 40
    assert buffers == payloads and not again.bad
    assert other.exists(keys) == [MISS] * 40 and loaded(other, keys[:2]) == [None] * 2
    assert read_facts(store, [engine.scope, other.scope]) == {engine.scope: FACTS}
    bad = StoreKey(engine.scope, key(77)[0], 0)
    assert write_record(store, bad, bytes(HEADER_BYTES + SIZES[0])) is HIT
    assert loaded(again, [key(77), key(0)]) == [None, payload(0)]
    assert again.bad == {"magic": 1}
