"""QuireHiCache inside SGLang's HiCache: bytes, layouts, ranks, identities, and what is refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.peers.hicache_sglang import HiCache, Shape
from prometheus_client import REGISTRY
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.runtime_context import get_context
from sglang.srt.server_args import ServerArgs

from quire.connectors.sglang import QuireHiCache, hicache
from quire.errors import InvalidInput, RefusedCombination
from tests.connectors.sglang_harness import (
    PAGES,
    TOKENS,
    config,
    fetch,
    fill_host,
    name_of,
    opened,
    pages_of,
    ranked,
    store,
    store_of,
)

DIRECT = [
    Shape(layout=layout, is_latent=latent) for layout in ("layer_first", "page_first_direct") for latent in (0, 1)
]
LARGE = [Shape(layout="layer_first", is_latent=latent, layers=2, heads=8, head_dim=128) for latent in (0, 1)]
"""Pages by layer in pieces that are large enough to be read and written in place."""
ALL = [
    *(*DIRECT, *LARGE, Shape(layout="page_first"), Shape(layout="page_first", is_latent=True)),
    *(Shape(layout="page_head"), Shape(layout="page_first", page=1, host_tokens=512)),
]


@pytest.mark.parametrize("interface", [0, 1])
@pytest.mark.parametrize("shape", DIRECT, ids=str)
def test_from_the_device_and_back(shape: Shape, interface: int, extra: dict[str, Any]) -> None:
    with opened(shape, extra | {"interface_v1": interface}) as cache:
        taken, rows = cache.store(TOKENS, seed=1)
        assert taken == len(TOKENS)
        assert cache.restore(TOKENS) == (len(TOKENS), rows)
        assert cache.restore([7, *TOKENS[1:]]) == (0, b"")
        assert cache.restore([*TOKENS[:112], *range(1000, 1160)]) == (112, first_rows(rows, 112, len(cache.buffers())))


def first_rows(rows: bytes, count: int, buffers: int) -> bytes:
    """The bytes of the first tokens, of those of all in each buffer."""
    size = len(rows) // buffers
    return b"".join(rows[at : at + size * count // len(TOKENS)] for at in range(0, len(rows), size))


@pytest.mark.parametrize("interface", [0, 1])
@pytest.mark.parametrize("shape", ALL, ids=str)
def test_either_interface_reads_what_the_other_stored(shape: Shape, interface: int, extra: dict[str, Any]) -> None:
    with opened(shape, extra | {"interface_v1": interface}) as writer:
        pages = store(writer)
        assert fetch(writer) == pages
    with opened(shape, extra | {"interface_v1": 1 - interface}) as reader:
        assert fetch(reader) == pages


@pytest.mark.parametrize("interface", [0, 1])
@pytest.mark.parametrize("shape", [Shape(), Shape(is_latent=True), *LARGE], ids=str)
def test_a_layout_is_read_only_where_it_has_the_same_bytes(shape: Shape, interface: int, extra: dict[str, Any]) -> None:
    extra = extra | {"interface_v1": interface}
    with opened(replace(shape, layout="layer_first"), extra) as writer:
        pages = store(writer)
    with opened(replace(shape, layout="page_first_direct"), extra) as reader:
        assert fetch(reader) == pages
    with opened(replace(shape, layout="page_first"), extra) as other:
        assert fetch(other) == []
        found = store(other, seed=2)
        assert fetch(other) == found
    with opened(replace(shape, layout="layer_first"), extra) as reader:
        assert fetch(reader) == pages


def test_small_pieces_are_copied_and_large_ones_are_not(extra: dict[str, Any]) -> None:
    for shape, pieces in ((Shape(layout="layer_first"), 1), (LARGE[0], 4), (LARGE[1], 2), (Shape(), 2)):
        with opened(shape, extra) as cache:
            pages = cache.backend._pools["kv"].pages
            assert len(pages.outgoing(32)) == len(pages.incoming(32)) == pieces


def test_counters_are_among_those_of_sglang(extra: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def value(name: str, **labels: str) -> float:
        return REGISTRY.get_sample_value(f"sglang:quire_{name}", labels) or 0.0

    before = {name: value(f"{name}_total", pool="kv") for name in ("saved", "hits", "misses")}
    with opened(Shape(), extra) as cache:
        assert fetch(cache) == []
        store(cache)
        fetch(cache)
        assert cache.backend.get_stats() is None
        assert {name: value(f"{name}_total", pool="kv") - count for name, count in before.items()} == {
            "saved": PAGES,
            "hits": PAGES,
            "misses": PAGES,
        }
        assert value("off") == 0
        monkeypatch.setattr(hicache, "weight_version", lambda: "new")
        cache.backend.get_stats()
        assert value("off") == 1 and fetch(cache) == []


def test_what_the_bytes_depend_on_is_part_of_the_key(extra: dict[str, Any]) -> None:
    shape = Shape()
    with opened(shape, extra) as writer:
        pages = store(writer)
    for other, settings, model in (
        (shape, {"weights": "two"}, "toy"),
        (shape, {}, "another"),
        (replace(shape, dtype=torch.float16), {}, "toy"),
        (replace(shape, page=32), {}, "toy"),
        (replace(shape, layers=5), {}, "toy"),
        (replace(shape, heads=1, head_dim=32), {}, "toy"),
    ):
        with opened(other, extra | settings, model=model) as reader:
            found = fetch(reader)
            assert found == [] or (other.heads, found) == (1, pages)  # the weights say how wide a head is
    with opened(shape, extra) as reader:
        assert fetch(reader) == pages


@pytest.mark.parametrize("ranks", [("tp_rank", "tp_size"), ("pp_rank", "pp_size"), ("attn_cp_rank", "attn_cp_size")])
@pytest.mark.parametrize("is_latent", [False, True])
def test_ranks_read_their_own(ranks: tuple[str, str], is_latent: bool, extra: dict[str, Any]) -> None:
    rank, size = ranks
    shape = Shape(is_latent=is_latent)
    with (
        closing(ranked(extra, shape, **{rank: 0, size: 2})) as first,
        closing(ranked(extra, shape, **{rank: 1, size: 2})) as second,
    ):
        rows, pages = fill_host(first.cache, TOKENS, 1)
        keys = first.cache.keys(TOKENS)
        assert first.batch_set_v1(keys, rows) == [True] * PAGES
        is_shared = is_latent and rank == "tp_rank"  # all ranks compute the same, and the first stores it
        assert second.batch_exists(keys) == (PAGES if is_shared else 0)
        rows = second.cache.host.alloc(len(TOKENS))
        assert second.batch_get_v1(keys, rows) == [is_shared] * PAGES
        assert not is_shared or pages_of(second.cache, rows) == pages
    with closing(ranked(extra, shape)) as alone:
        assert alone.batch_exists(keys) == (PAGES if is_shared else 0)


def test_the_first_miss_ends_a_read(extra: dict[str, Any]) -> None:
    with opened(Shape(), extra) as cache:
        pages, keys = store(cache, TOKENS), cache.keys(TOKENS)
        assert store_of(cache.backend).remove([name_of(cache.backend, keys[5])]) == 1
        assert cache.backend.batch_exists(keys) == 5
        rows = cache.host.alloc(len(TOKENS))
        assert cache.backend.batch_get_v1(keys, rows) == [True] * 5 + [False] * 15
        assert pages_of(cache, rows)[:5] == pages[:5]
        flat = [cache.host.get_dummy_flat_data_page() for _ in keys]
        found = cache.backend.batch_get(keys, flat)
        assert [page is not None for page in found] == [True] * 5 + [False] * 15
        assert fetch(cache) == pages[:5]
        store(cache, TOKENS)
        assert cache.backend.batch_exists(keys) == PAGES


def test_the_wrong_size_is_no_hit(extra: dict[str, Any]) -> None:
    with opened(Shape(), extra) as cache:
        pages, keys = store(cache, TOKENS[:32]), cache.keys(TOKENS[:32])
        for wrong in (torch.zeros(7, dtype=torch.uint8), torch.zeros(3 * len(pages[0]), dtype=torch.uint8)):
            assert cache.backend.get(keys[0], wrong) is None and not wrong.any()
            assert cache.backend.set(keys[0], wrong) is False
        strided = torch.zeros(2 * len(pages[0]), dtype=torch.uint8)[::2]
        assert cache.backend.get(keys[0], strided) is None
        whole = cache.backend.get(keys[0])
        assert whole is not None and whole.numpy().tobytes() == pages[0]
        assert cache.backend.exists(keys[0]) and not cache.backend.exists("0" * 64)
        assert cache.backend.batch_get_v1(keys, torch.arange(7)) == [False, False]
        with pytest.raises(InvalidInput, match="64 hexadecimal digits"):
            cache.backend.exists("page-1")


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"weights": None}, {}, "weights"),
    ({"store": None}, {}, "store"),
    ({"wieghts": "one"}, {}, "wieghts"),
    ({"deadline_s": 0}, {}, "deadline_s"),
    ({"store_size": "much"}, {}, "much"),
    ({}, {"should_split_heads": True}, "tp_lcm_size"),
    ({}, {"is_mla_model": True, "tp_size": 2, "dcp_size": 2, "logical_page_size": 32}, "dcp"),
]


@pytest.mark.parametrize(("settings", "fields", "said"), REFUSED, ids=lambda each: str(each)[:20])
def test_refused_at_start(settings: dict[str, Any], fields: dict[str, Any], said: str, extra: dict[str, Any]) -> None:
    given = {name: value for name, value in (extra | settings).items() if value is not None}
    with pytest.raises(InvalidInput, match=said):
        QuireHiCache(config(extra_config=given, **fields), {})


def test_refused_pools(extra: dict[str, Any]) -> None:
    """Bytes whose element type is not known; heads that SGLang stores on one rank only; memory that moves."""
    with pytest.raises(Exception, match="element type"):
        HiCache(Shape(dtype=torch.float8_e4m3fn), "dynamic", extra)
    with closing(QuireHiCache(config(extra_config=extra, is_mla_model=True, tp_size=2), {})) as backend:
        with pytest.raises(RefusedCombination, match="rank 0 only"):
            backend.register_mem_host_pool_v2(HiCache(Shape(), None).host, PoolName.DRAFT)
        parted = HiCache(Shape(), None).host
        parted.dcp_size = 2
        with pytest.raises(RefusedCombination, match="parts of its pages"):
            backend.register_mem_host_pool_v2(parted, PoolName.SWA)
        moving = HiCache(Shape(), None).host
        moving.shared_allocation_domain = object()
        with pytest.raises(RefusedCombination, match="moves"):
            backend.register_mem_host_pool_v2(moving, PoolName.SWA)


def test_detached_and_attached_again(extra: dict[str, Any]) -> None:
    with opened(Shape(), extra) as cache:
        pages = store(cache)
        threads = threading.active_count()
        for _ in range(3):
            cache.controller.detach_storage_backend()
            cache.controller.attach_storage_backend("dynamic", 16, "toy", dict(extra))
            assert fetch(cache) == pages
        assert threading.active_count() <= threads


def test_clear_removes_only_its_own(extra: dict[str, Any]) -> None:
    with opened(Shape(), extra) as cache, opened(Shape(), extra, model="another") as other:
        pages = store(cache)
        store(other)
        other.backend.clear()
        assert (fetch(other), fetch(cache)) == ([], pages)


def served(model_path: Path, **options: Any) -> None:
    """Publish the options of a server in this process, as its scheduler does."""
    get_context().set_server_args(ServerArgs(model_path=str(model_path), device="cpu", **options))


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Path]:
    """A folder of weights; nothing is published at the end."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"one")
    yield folder
    get_context()._server_args = None
    get_context()._config_bags = None


def test_weights_are_those_of_the_served_model(extra: dict[str, Any], model: Path) -> None:
    """By the bytes of their files: new ones at the same path are others, and the same at another path are the same."""
    del extra["weights"]
    served(model)
    with opened(Shape(), extra) as cache:
        pages = store(cache)
    moved = model.rename(model.with_name("moved"))
    served(moved)
    with opened(Shape(), extra) as cache:
        assert fetch(cache) == pages
    (moved / "model.safetensors").write_bytes(b"two")
    with opened(Shape(), extra) as cache:
        assert fetch(cache) == []
    for elsewhere in ("dummy", "remote_instance"):
        served(moved, load_format=elsewhere)
        with pytest.raises(Exception, match="do not name the weights"):
            HiCache(Shape(), "dynamic", extra)


def test_adapters_that_a_path_identifies_are_refused(extra: dict[str, Any], model: Path) -> None:
    served(model, lora_paths=["one=/adapters/one"])
    with pytest.raises(Exception, match="lora-paths"):
        HiCache(Shape(), "dynamic", extra)
    with opened(Shape(), extra | {"adapters": True}) as cache:
        assert store(cache) == fetch(cache)


def test_what_its_server_was_told_is_part_of_the_key(extra: dict[str, Any], model: Path) -> None:
    """Eight bits are raw bytes in its pools, whatever they mean."""
    shape = Shape(dtype=torch.float8_e4m3fn)
    served(model, kv_cache_dtype="fp8_e4m3")
    with opened(shape, extra) as cache:
        pages = store(cache)
    for options in (
        {"kv_cache_dtype": "fp8_e5m2"},
        {"kv_cache_dtype": "fp8_e4m3", "json_model_override_args": '{"a": 1}'},
        {"kv_cache_dtype": "fp8_e4m3", "dtype": "float16"},
    ):
        served(model, **options)
        with opened(shape, extra) as cache:
            assert fetch(cache) == []
    served(model, kv_cache_dtype="fp8_e4m3")
    with opened(shape, extra) as cache:
        assert fetch(cache) == pages


def test_weights_that_were_updated_are_others(extra: dict[str, Any], model: Path) -> None:
    """In a running server, by the version that the update gives: until it is attached again, nothing is found."""
    served(model)
    with opened(Shape(), extra) as cache:
        pages, keys = store(cache), cache.keys(TOKENS)
        get_context().override("scheduler.weight_version", weight_version="2")
        assert fetch(cache) == []
        rows = cache.host.alloc(len(TOKENS))
        assert cache.back_up([1, *TOKENS[1:]], rows) == 0
        assert not cache.backend.batch_set(keys[:1], [cache.host.get_data_page(0)])
        assert cache.backend.batch_get(keys[:1]) == [None]
        cache.controller.detach_storage_backend()
        cache.controller.attach_storage_backend("dynamic", 16, "toy", dict(extra))
        assert fetch(cache) == []
        assert cache.back_up(TOKENS, rows) == len(TOKENS) and len(fetch(cache)) == PAGES
        get_context().override("scheduler.weight_version", weight_version="default")
    with opened(Shape(), extra) as cache:
        assert fetch(cache) == pages


def test_a_log_says_what_was_asked(extra: dict[str, Any], tmp_path: Path) -> None:
    log = tmp_path / "lookups"
    with opened(Shape(), extra | {"log": str(log)}) as cache:
        store(cache, TOKENS[:160])
        fetch(cache)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    (found,) = [line for line in lines if "asked" in line]
    assert (found["asked"], found["found"], found["missed"]) == (20, 10, f"{cache.keys(TOKENS)[10]}.0")
    assert sum(len(line.get("saved", ())) for line in lines) == 10
