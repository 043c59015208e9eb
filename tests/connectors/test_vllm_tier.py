"""vLLM with Quire's tier: the same tokens as vLLM alone, from saved records, and never from bad ones."""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from bench.harness import Worker

from quire.tiers.store import Store
from quire.tiers.stores.registry import open_store
from tests.changes import unless_changed
from tests.connectors.vllm_runs import (
    CHUNK,
    PATHS,
    Damage,
    chunks,
    damage,
    engine,
    exchanged,
    flipped,
    model,
    of_another,
    prompt_sets,
    quire_tier,
    torn,
    truncated,
)
from tests.tiers.stores.servers import free_port, started, valkey

pytestmark = unless_changed(__name__, *PATHS)

NEW = 12
SETS = prompt_sets(4)
PATIENT_S = 60.0
"""A deadline for tests that count each record: what a busy machine reads too late is not counted."""


def outputs(vllm: Worker, sets: list[list[list[int]]] = SETS) -> list[list[list[int]]]:
    """Greedy tokens of each set, one set after another, with caches as they are."""
    return [answer["tokens"] for prompts in sets for answer in [run(vllm, prompts)]]


def run(vllm: Worker, prompts: list[list[int]]) -> dict[str, Any]:
    """Run prompts. No request may fail."""
    answer = vllm.ask("run", prompts=prompts, new=NEW)
    assert answer["ends"] == ["length"] * len(prompts)
    return answer


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def alone(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[list[int]]]:
    """What vLLM answers without tiers."""
    with engine(llama, tmp_path_factory.mktemp("alone") / "log") as vllm:
        return outputs(vllm)


@pytest.fixture(scope="module")
def saved(llama: Path, alone: list[list[list[int]]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with all chunks of the sets, saved by a process that has ended."""
    folder = tmp_path_factory.mktemp("saved")
    with engine(llama, folder / "log", quire_tier(folder / "store")) as vllm:
        assert outputs(vllm) == alone
        vllm.ask("settle")
        metrics = vllm.ask("metrics")
        assert metrics["quire_saved"] == sum(map(chunks, SETS))
        assert "quire_hits" not in metrics
    return folder / "store"


@pytest.fixture
def store(saved: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(saved, tmp_path / "store"))


def test_a_new_process_finds_what_another_has_saved(
    llama: Path, alone: list[list[list[int]]], store: Path, tmp_path: Path
) -> None:
    with engine(llama, tmp_path / "log", quire_tier(store)) as vllm:
        assert outputs(vllm) == alone
        metrics = vllm.ask("metrics")
        assert metrics["quire_hits"] == metrics["tiering_chunk_hits 1:QuireTier"] == sum(map(chunks, SETS))
        assert "quire_saved" not in metrics
        for prompts in SETS:
            vllm.ask("forget")
            before = vllm.ask("metrics")["quire_hits"]
            found = run(vllm, prompts[:1])["cached"][0]
            assert found == CHUNK * (vllm.ask("metrics")["quire_hits"] - before) == len(prompts[0]) // CHUNK * CHUNK


def kinds(store: Store) -> dict[str, tuple[Damage, str]]:
    """Ways to damage all records, with the reason that vLLM's metrics give."""
    return {
        "flipped": (flipped, "digest"),
        "torn": (torn, "digest"),
        "truncated": (truncated, "length"),
        "exchanged": (exchanged, "key"),
        "weights": (of_another(store, weights="files:0"), "weights"),
        "dtype": (of_another(store, dtype="bfloat16 auto None"), "dtype"),
        "page": (of_another(store, page_size="16"), "page_size"),
        "rank": (of_another(store, rank="tp=2 pp=1 pcp=1 dcp=1"), "rank"),
    }


def check_bad_records(vllm: Worker, store: Path, sets: list[list[list[int]]], expected: list[list[list[int]]]) -> None:
    """All of one kind after another: vLLM's answers are right, none is a hit, and each that it met is counted."""
    for name in ("flipped", "torn", "truncated", "exchanged", "weights", "dtype", "page", "rank"):
        vllm.ask("forget")
        before = vllm.ask("metrics")
        with closing(open_store(str(store))) as directory:
            change, reason = kinds(directory)[name]
            assert damage(directory, change) == sum(map(chunks, sets))
        assert outputs(vllm, sets) == expected
        vllm.ask("forget")
        after = vllm.ask("metrics")
        grown = {key: int(value - before.get(key, 0)) for key, value in after.items() if value != before.get(key, 0)}
        bad = {key: count for key, count in grown.items() if key.startswith("quire_bad_records")}
        assert bad == {f"quire_bad_records {reason}": sum(map(chunks, sets))}, grown
        assert "quire_hits" not in grown and grown["quire_saved"]
        # What waits for a record is not saved by vLLM, though it turns out to be bad; it is the next time.
        assert outputs(vllm, sets) == expected
        assert vllm.ask("metrics")["quire_hits"] > after.get("quire_hits", 0)


def test_bad_records_are_missed_and_counted(
    llama: Path, alone: list[list[list[int]]], store: Path, tmp_path: Path
) -> None:
    with engine(llama, tmp_path / "log", quire_tier(store, deadline_s=PATIENT_S)) as vllm:
        check_bad_records(vllm, store, SETS, alone)


@pytest.mark.slow
def test_a_thousand_bad_records_of_each_kind(llama: Path, tmp_path: Path) -> None:
    sets = prompt_sets(9, each=8, seed=2, shared=4, own=500, least=470)
    assert sum(map(chunks, sets)) > 1000
    with engine(llama, tmp_path / "alone") as vllm:
        expected = outputs(vllm, sets)
    store = tmp_path / "store"
    with engine(llama, tmp_path / "log", quire_tier(store, deadline_s=PATIENT_S), cpu_bytes=256 << 20) as vllm:
        assert outputs(vllm, sets) == expected
        vllm.ask("settle")
        check_bad_records(vllm, store, sets, expected)


def test_vllms_own_tier_gives_wrong_tokens_where_this_one_misses(
    llama: Path, alone: list[list[list[int]]], tmp_path: Path
) -> None:
    """The control: if it passes no more, these tests show less than they did."""
    files = tmp_path / "files"
    with engine(llama, tmp_path / "log", {"type": "fs", "root_dir": str(files)}) as vllm:
        assert outputs(vllm) == alone
        vllm.ask("forget")
        saved = sorted(files.glob("**/*.bin"))
        records = [path.read_bytes() for path in saved]
        for at, path in enumerate(saved):
            path.write_bytes(records[at - 1])
        assert outputs(vllm) != alone


@pytest.mark.slow
def test_vllms_own_tier_serves_records_of_old_weights(llama: Path, tmp_path: Path) -> None:
    """The control of the next test."""
    folder, files = tmp_path / "model", {"type": "fs", "root_dir": str(tmp_path / "files")}
    shutil.copytree(llama, folder)
    with engine(folder, tmp_path / "old", files) as vllm:
        outputs(vllm)
        vllm.ask("settle")
    shutil.copy(model(tmp_path / "other", seed=1) / "model.safetensors", folder)
    with engine(folder, tmp_path / "alone") as vllm:
        right = outputs(vllm)
    with engine(folder, tmp_path / "new", files) as vllm:
        assert outputs(vllm) != right
        assert vllm.ask("metrics")["tiering_chunk_hits 1:fs"]


@pytest.mark.parametrize("changed", ["weights", "dtype", "block_size"])
def test_records_of_another_engine_are_not_found(
    llama: Path, alone: list[list[list[int]]], store: Path, tmp_path: Path, changed: str
) -> None:
    more: dict[str, Any] = {"dtype": {"dtype": "bfloat16"}, "block_size": {"block_size": 64}}.get(changed, {})
    folder = tmp_path / "model"
    shutil.copytree(llama, folder)
    if changed == "weights":
        shutil.copy(model(tmp_path / "other", seed=1) / "model.safetensors", folder)
    with engine(folder, tmp_path / "log", quire_tier(store), **more) as vllm:
        found = outputs(vllm)
        vllm.ask("forget")
        metrics = vllm.ask("metrics")
        assert "quire_hits" not in metrics and metrics["quire_saved"]
        assert (found == alone) is (changed == "block_size")
        assert outputs(vllm) == found  # from its own records
        assert vllm.ask("metrics")["quire_hits"]


WINDOWS: dict[str, Any] = {
    "sliding_window": 64,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
MEMORY = {"chunked prefill": {"max_num_batched_tokens": 64}, "preemption": {"num_gpu_blocks_override": 17}}


@pytest.mark.parametrize("memory", MEMORY)
def test_short_steps_and_little_memory(
    llama: Path, alone: list[list[list[int]]], store: Path, tmp_path: Path, memory: str
) -> None:
    with engine(llama, tmp_path / "log", quire_tier(store), **MEMORY[memory]) as vllm:
        assert outputs(vllm) == alone
        assert vllm.ask("metrics")["quire_hits"]
        sets = prompt_sets(3, seed=1, each=6)
        found = outputs(vllm, sets)
        assert vllm.ask("preempted")["times"] if memory == "preemption" else True
        vllm.ask("forget")
        assert outputs(vllm, sets) == found


def test_a_model_with_windows(tmp_path: Path) -> None:
    folder = model(tmp_path / "gemma", "gemma3_text", **WINDOWS)
    with engine(folder, tmp_path / "alone") as vllm:
        alone = outputs(vllm)
    for log in ("cold", "warm"):
        with engine(folder, tmp_path / log, quire_tier(tmp_path / "store")) as vllm:
            assert outputs(vllm) == alone
            vllm.ask("settle")
            metrics = vllm.ask("metrics")
    assert metrics["quire_hits"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["plain", "chunked prefill", "preemption", "windows"])
def test_fifty_sets(llama: Path, tmp_path: Path, kind: str) -> None:
    """Cold, and in a new process."""
    sets, folder = prompt_sets(50, seed=3), llama
    if kind == "windows":
        folder = model(tmp_path / "gemma", "gemma3_text", **WINDOWS)
    more: dict[str, Any] = MEMORY.get(kind, {})
    with engine(folder, tmp_path / "alone") as vllm:
        expected = outputs(vllm, sets)
    for log in ("cold", "warm"):
        with engine(folder, tmp_path / log, quire_tier(tmp_path / "store"), cpu_bytes=256 << 20, **more) as vllm:
            assert outputs(vllm, sets) == expected
            vllm.ask("settle")
            metrics = vllm.ask("metrics")
    assert metrics["quire_hits"] == metrics["tiering_chunk_hits 1:QuireTier"]
    assert metrics["quire_hits"] >= sum(map(chunks, sets)) * (2 if kind == "windows" else 1) // 2


def test_two_engines_at_once(llama: Path, alone: list[list[list[int]]], tmp_path: Path) -> None:
    tier = quire_tier(tmp_path / "store")
    with (
        ThreadPoolExecutor() as pool,
        engine(llama, tmp_path / "a", tier) as one,
        engine(llama, tmp_path / "b", tier) as two,
    ):
        first = pool.submit(outputs, one, SETS)
        second = pool.submit(outputs, two, SETS[::-1])
        assert first.result() == alone and second.result() == alone[::-1]
        for vllm in (one, two):
            vllm.ask("forget")
            assert outputs(vllm) == alone
            assert vllm.ask("metrics")["quire_hits"]


def test_a_full_store_evicts(llama: Path, alone: list[list[list[int]]], tmp_path: Path) -> None:
    with engine(llama, tmp_path / "log", quire_tier(tmp_path / "store", store_size="1MiB")) as vllm:
        for _ in range(2):
            assert outputs(vllm) == alone
            vllm.ask("forget")
        metrics = vllm.ask("metrics")
    assert metrics["quire_saved"]
    with closing(open_store(str(tmp_path / "store"))) as directory:
        assert 0 < sum(entry.num_bytes for entry in directory.entries()) <= 1 << 20


def test_a_store_that_lies(llama: Path, alone: list[list[list[int]]], tmp_path: Path) -> None:
    with engine(llama, tmp_path / "log", quire_tier(f"faulty://20{tmp_path}/store")) as vllm:
        for _ in range(4):
            assert outputs(vllm) == alone
            vllm.ask("forget")
        metrics = vllm.ask("metrics")
    assert metrics["quire_hits"] and metrics["quire_bad_records digest"]


def test_requests_are_aborted_while_records_load(
    llama: Path, alone: list[list[list[int]]], store: Path, tmp_path: Path
) -> None:
    with engine(llama, tmp_path / "log", quire_tier(f"slow://0.2{store}")) as vllm:
        for prompts in SETS:
            assert vllm.ask("abort", prompts=prompts, steps=3)["without_token"] == len(prompts)
        vllm.ask("forget")
        assert outputs(vllm) == alone
        assert vllm.ask("metrics")["quire_hits"]


def test_a_server_that_hangs_and_one_that_is_killed(llama: Path, alone: list[list[list[int]]], tmp_path: Path) -> None:
    """A request waits for one deadline at most; when the server answers again, so does the tier."""
    with tempfile.TemporaryDirectory() as folder, started(lambda: valkey(Path(folder))) as server:
        tier = quire_tier(f"unix://{folder}/valkey.sock", deadline_s=1, store_size=None)
        with engine(llama, tmp_path / "log", tier) as vllm:
            assert outputs(vllm) == alone
            vllm.ask("forget")
            assert server.process is not None
            server.process.send_signal(signal.SIGSTOP)
            began = time.monotonic()
            assert outputs(vllm) == alone
            assert time.monotonic() - began < 30
            server.process.send_signal(signal.SIGCONT)
            assert vllm.ask("metrics")["quire_expired"]
            eventually_hits(vllm, alone)
            server.kill()
            vllm.ask("forget")
            assert outputs(vllm) == alone
            server.start()
            eventually_hits(vllm, alone)


def test_a_directory_that_hangs(llama: Path, alone: list[list[list[int]]], store: Path, tmp_path: Path) -> None:
    """A load waits for its deadline; what is read later is dropped."""
    with engine(llama, tmp_path / "log", quire_tier(f"hanging://{store}", deadline_s=1)) as vllm:
        hang_each(vllm, SETS, alone, store.with_name(f"{store.name}.hangs"))
        assert vllm.ask("metrics")["quire_expired"]
        eventually_hits(vllm, alone)


def hang_each(vllm: Worker, sets: list[list[list[int]]], expected: list[list[list[int]]], hangs: Path) -> None:
    """Each set while the store hangs, and again when it answers."""
    for prompts, tokens in zip(sets, expected, strict=True):
        vllm.ask("forget")
        hangs.touch()
        began = time.monotonic()
        assert run(vllm, prompts)["tokens"] == tokens
        assert time.monotonic() - began < 60, "a few deadlines of a second"
        hangs.unlink()
        assert run(vllm, prompts)["tokens"] == tokens


FIFTY = prompt_sets(50, seed=5)


@pytest.fixture(scope="module")
def fifty(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[list[int]]]:
    """What vLLM answers to fifty sets without tiers."""
    with engine(llama, tmp_path_factory.mktemp("fifty") / "log") as vllm:
        return outputs(vllm, FIFTY)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_fifty_sets_are_aborted_or_hang(llama: Path, fifty: list[list[list[int]]], tmp_path: Path) -> None:
    store = tmp_path / "store"
    with engine(llama, tmp_path / "cold", quire_tier(store), cpu_bytes=256 << 20) as vllm:
        assert outputs(vllm, FIFTY) == fifty
    with engine(llama, tmp_path / "log", quire_tier(f"slow://0.1{store}"), cpu_bytes=256 << 20) as vllm:
        for prompts in FIFTY:
            assert vllm.ask("abort", prompts=prompts, steps=3)["without_token"] == len(prompts)
        vllm.ask("forget")
        assert outputs(vllm, FIFTY) == fifty
        assert vllm.ask("metrics")["quire_hits"]
    tier = quire_tier(f"hanging://{store}", deadline_s=1)
    with engine(llama, tmp_path / "log", tier, cpu_bytes=256 << 20) as vllm:
        hang_each(vllm, FIFTY, fifty, tmp_path / "store.hangs")
        metrics = vllm.ask("metrics")
        assert metrics["quire_expired"] and not any(name.startswith("quire_bad_records") for name in metrics)
        eventually_hits(vllm, fifty, FIFTY)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_fifty_sets_in_a_full_store_and_by_two_engines(
    llama: Path, fifty: list[list[list[int]]], tmp_path: Path
) -> None:
    small = quire_tier(tmp_path / "small", store_size="4MiB")
    with engine(llama, tmp_path / "log", small, cpu_bytes=256 << 20) as vllm:
        for _ in range(2):
            assert outputs(vllm, FIFTY) == fifty
            vllm.ask("forget")
        assert vllm.ask("metrics")["quire_saved"] > sum(map(chunks, FIFTY))
    tier = quire_tier(tmp_path / "store")
    with (
        ThreadPoolExecutor() as pool,
        engine(llama, tmp_path / "a", tier) as one,
        engine(llama, tmp_path / "b", tier) as two,
    ):
        first = pool.submit(outputs, one, FIFTY)
        second = pool.submit(outputs, two, FIFTY[::-1])
        assert first.result() == fifty and second.result() == fifty[::-1]
        for vllm in (one, two):
            vllm.ask("forget")
            assert outputs(vllm, FIFTY) == fifty
            assert vllm.ask("metrics")["quire_hits"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_fifty_sets_with_a_server_that_hangs_or_is_killed(
    llama: Path, fifty: list[list[list[int]]], tmp_path: Path
) -> None:
    """Before each set it is stopped or killed in turns, and continues or starts after it."""
    with tempfile.TemporaryDirectory() as folder, started(lambda: valkey(Path(folder))) as server:
        tier = quire_tier(f"unix://{folder}/valkey.sock", deadline_s=1, store_size=None)
        with engine(llama, tmp_path / "log", tier, cpu_bytes=256 << 20) as vllm:
            assert outputs(vllm, FIFTY) == fifty
            for at, (prompts, tokens) in enumerate(zip(FIFTY, fifty, strict=True)):
                vllm.ask("forget")
                assert server.process is not None
                if at % 2:
                    server.kill()
                else:
                    server.process.send_signal(signal.SIGSTOP)
                assert run(vllm, prompts)["tokens"] == tokens
                if at % 2:
                    server.start()
                else:
                    server.process.send_signal(signal.SIGCONT)
                assert run(vllm, prompts)["tokens"] == tokens
            assert vllm.ask("metrics")["quire_expired"]
            eventually_hits(vllm, fifty, FIFTY)


def test_a_bucket(llama: Path, alone: list[list[list[int]]], tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    pytest.importorskip("moto.server")
    from tests.tiers.stores.test_s3 import BUCKET, with_bucket

    keys = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing"}
    port = free_port()
    with with_bucket(port):
        tier = quire_tier(f"s3://{BUCKET}/vllm?endpoint=http://127.0.0.1:{port}", store_size=None)
        for log in ("cold", "warm"):
            with engine(llama, tmp_path / log, tier, env=keys) as vllm:
                assert outputs(vllm) == alone
                vllm.ask("settle")
                metrics = vllm.ask("metrics")
    assert metrics["quire_hits"]


def test_what_is_saved_after_the_last_token_is_counted(llama: Path, tmp_path: Path) -> None:
    tier = quire_tier(f"slow://0.3{tmp_path}/store", save_share=1.0)
    with engine(llama, tmp_path / "log", tier) as vllm:
        run(vllm, SETS[0])
        assert vllm.ask("settle")["is_settled"]
        assert vllm.ask("metrics")["quire_saved"] == chunks(SETS[0])


def eventually_hits(vllm: Worker, alone: list[list[list[int]]], sets: list[list[list[int]]] = SETS) -> None:
    """The tier serves again, within some deadlines."""
    before, end = vllm.ask("metrics").get("quire_hits", 0), time.monotonic() + 30
    while vllm.ask("metrics").get("quire_hits", 0) == before:
        assert time.monotonic() < end
        vllm.ask("forget")
        assert outputs(vllm, sets) == alone


@pytest.mark.parametrize(
    ("tier", "more", "said"),
    [
        ({}, {"prefix_caching_hash_algo": "xxhash"}, "draws a seed in each process"),
        ({}, {"load_format": "dummy"}, "has weights that no file of the model identifies"),
        ({"stor": "x"}, {}, "'stor' is not a setting"),
    ],
)
def test_what_cannot_be_keyed_is_refused_at_start(
    llama: Path, tmp_path: Path, tier: dict[str, Any], more: dict[str, Any], said: str
) -> None:
    with (
        pytest.raises(RuntimeError, match=said),
        engine(llama, tmp_path / "log", quire_tier(tmp_path / "s", **tier), **more),
    ):
        pass


def test_a_reset_ends_what_was_saved(llama: Path, alone: list[list[list[int]]], store: Path, tmp_path: Path) -> None:
    """vLLM resets its caches when weights change."""
    with engine(llama, tmp_path / "log", quire_tier(store)) as vllm:
        assert outputs(vllm) == alone
        vllm.ask("settle")
        hits = vllm.ask("metrics")["quire_hits"]
        assert vllm.ask("reset")["is_reset"]
        assert outputs(vllm) == alone
        vllm.ask("forget")
        assert vllm.ask("metrics")["quire_hits"] == hits
