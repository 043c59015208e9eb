"""What cannot be served with is refused before weights are read: a bad store, and sizes that hold nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quire.engine.before_load import check_model
from quire.engine.config import engine_config
from quire.engine.core import EngineCore
from quire.engine.tier_storage import open_tiers, storage_size
from quire.errors import (
    HostMemoryError,
    InvalidInput,
    ModelLoadError,
    PlanError,
    QuireError,
    RefusedCombination,
    StoreError,
    UnsupportedModel,
)
from quire.settings.setting import parse_bytes
from quire.spec.hisparse import HiSparseConfig
from quire.testing.contracts.records import make_key, make_record, write
from quire.tiers.store import Answer
from quire.tiers.stores.directory import DirectoryStore
from tests.serve.tiny_model import make_tiny_model

REFUSED = """
import sys
from quire.engine.config import engine_config
from quire.client.process import build_engine_core
from quire.errors import StoreError
try:
    build_engine_core(engine_config(storage=sys.argv[1]), lambda done, total: None)
except StoreError as error:
    print("torch" in sys.modules, error)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(autouse=True)
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_model(*_: object, **__: object) -> None:
        raise AssertionError("weights were read before it was refused")

    monkeypatch.setattr("quire.engine.core.load_model", load_model)


def refused(kind: type[QuireError], **settings: Any) -> QuireError:
    with pytest.raises(kind) as caught:
        EngineCore(engine_config(**settings))
    assert caught.value.fix
    return caught.value


def unused_port() -> int:
    """A port without a listener."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.mark.parametrize(
    ("url", "kind", "said"),
    [
        ("ftp://host/x", InvalidInput, "no store for 'ftp://'"),
        ("valkey://127.0.0.1:{port}/0?timeout=1", StoreError, "does not answer"),
        ("unix:///nowhere/valkey.sock", StoreError, "does not answer"),
        ("s3://bucket/x?endpoint=http://127.0.0.1:{port}&timeout=1", StoreError, "cannot be reached"),
        ("mooncake://127.0.0.1:{port}?timeout=1", StoreError, "ooncake"),
        ("valkey://127.0.0.1:{port}/0?tiemout=1", InvalidInput, "no option 'tiemout'"),
    ],
)
def test_a_store_that_is_not_there(
    model: Path, url: str, kind: type[QuireError], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    assert said in refused(kind, model=str(model), storage=url.format(port=unused_port())).message


def test_a_package_that_is_missing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    for module in ("connections", "valkey"):
        monkeypatch.delitem(sys.modules, f"quire.tiers.stores.{module}", raising=False)
    error = refused(StoreError, model=str(model), storage="valkey://127.0.0.1:6379/0")
    assert "pip install" in error.fix and "valkey" in error.fix


def test_directories_that_cannot_be_used(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.txt").write_text("x")
    for path, said in (("file", "file"), ("file/store", "file"), ("foreign", "thesis.txt"), ("/proc/nowhere", "")):
        storage = str(tmp_path / path)
        assert said in refused(StoreError, model=str(model), storage=storage, storage_size="1GiB").message
        assert said in refused(StoreError, model=str(model), storage=storage).message


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write anywhere")
def test_a_directory_that_cannot_be_written(model: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert "ermission" in refused(StoreError, model=str(model), storage=str(tmp_path / "store")).message


def test_an_index_of_another_version(model: Path, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "index.sqlite").write_bytes(b"not a database" * 1000)
    assert "cannot be opened" in refused(StoreError, model=str(model), storage=str(tmp_path / "store")).message


@pytest.mark.parametrize("setting", ["storage_size", "host_memory"])
def test_sizes_that_hold_no_page(model: Path, tmp_path: Path, setting: str) -> None:
    """The size that is named as the least is enough."""
    settings = {"model": str(model), "storage": str(tmp_path / "kv"), setting: "1KiB"}
    error = refused(PlanError, **settings)
    assert "hold no page" in error.message
    assert not (tmp_path / "kv").exists(), "nothing was made for it"
    least = error.fix.split("use --")[1].split()[1]
    opened = open_tiers(engine_config(**settings | {setting: least}))
    assert opened.store is not None
    assert setting != "storage_size" or opened.num_bytes == parse_bytes(least)
    opened.store.close()


def test_host_memory_that_is_not_there(model: Path, tmp_path: Path) -> None:
    settings = {"model": str(model), "storage": str(tmp_path / "kv"), "storage_size": "16MiB"}
    error = refused(HostMemoryError, **settings, host_memory="900TiB")
    assert "The largest size that fits is" in error.message and "--host-memory" in error.fix
    assert not (tmp_path / "kv").exists()


def test_what_was_opened_is_closed_where_the_load_fails(model: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="weights were read"):
        EngineCore(engine_config(model=str(model), storage=str(tmp_path / "kv"), storage_size="16MiB"))
    store = DirectoryStore(tmp_path / "kv", None)
    assert store.facts().num_owners == 1 and store.facts().capacity == 16 * 2**20
    store.close()


def test_a_server_is_refused_before_torch_is_loaded() -> None:
    url = f"valkey://127.0.0.1:{unused_port()}/0?timeout=1"
    done = subprocess.run([sys.executable, "-c", REFUSED, url], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.startswith("False QUIRE-STORE-01"), done.stdout + done.stderr


def test_models_that_are_not_here_are_left_to_the_load(tmp_path: Path) -> None:
    """The configuration would have to be fetched, or says too little: that is no reason to refuse here."""
    for name in ("owner/model", str(tmp_path)):
        opened = open_tiers(engine_config(model=name, storage=str(tmp_path / "kv"), storage_size="2KiB"))
        assert opened.store is not None
        opened.store.close()


def test_what_a_new_directory_gets(tmp_path: Path) -> None:
    found = storage_size(engine_config(storage=str(tmp_path / "a" / "b")))
    assert found is not None and 0 < found <= 32 * 2**30
    assert storage_size(engine_config(storage="valkey://host")) is None
    assert storage_size(engine_config(storage=str(tmp_path / "a"), storage_size="1MiB")) == 2**20


def test_a_new_disk_is_a_new_directory(tmp_path: Path) -> None:
    """A filesystem that was just made holds a folder of its own."""
    (tmp_path / "lost+found").mkdir()
    config = engine_config(storage=str(tmp_path))
    assert 0 < (storage_size(config) or 0) <= shutil.disk_usage(tmp_path).total // 2
    opened = open_tiers(config)
    assert isinstance(opened.store, DirectoryStore)
    opened.store.close()
    assert storage_size(config) is None, "from now on it is as it is"


def test_a_size_that_holds_no_page(tmp_path: Path) -> None:
    """Refused with the least size that does, given now or when the directory was made; that size holds a page."""
    path = tmp_path / "store"
    with pytest.raises(PlanError, match="hold no page") as caught:
        open_tiers(engine_config(storage=str(path), storage_size="4KiB", page_size=256))
    assert not path.exists()
    DirectoryStore(path, 4 << 10).close()
    with pytest.raises(PlanError, match="hold no page") as found:
        open_tiers(engine_config(storage=str(path), page_size=256))
    assert found.value.fix == caught.value.fix
    least = found.value.fix.partition("--storage-size ")[2].partition(" ")[0]
    opened = open_tiers(engine_config(storage=str(path), storage_size=least, page_size=256))
    assert isinstance(opened.store, DirectoryStore) and opened.store.facts().num_owners == 1
    size = opened.num_bytes or 0
    assert write(opened.store, [make_key(0)], [make_record(0, size)]) == [Answer.HIT]
    opened.store.close()


@pytest.mark.parametrize(
    ("method", "changed", "said"),
    [
        ("draft_model", {"vocab_size": 99}, "vocabulary of 99"),
        ("draft_model", {"max_position_embeddings": 64}, "context of 64"),
        ("draft_model", {"sliding_window": 32, "model_type": "mistral"}, "windows"),
        ("draft_model", {"model_type": "bert"}, "is an encoder"),
        ("draft_model", {"quantization_config": {"quant_method": "awq"}}, "quantised"),
        ("eagle", {"hidden_size": 48}, "hidden size of 48, and the target of 32"),
        ("eagle", {"model_type": "qwen3"}, "of type 'qwen3'"),
        ("eagle3", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 9]}}, "reads the layers"),
    ],
)
def test_a_draft_that_cannot_draft(
    model: Path, tmp_path: Path, method: str, changed: dict[str, Any], said: str
) -> None:
    """Before the weights of either are read, by an engine and by a command, with the exit code of a refused
    combination."""
    found = json.loads((model / "config.json").read_text()) | changed
    (tmp_path / "config.json").write_text(json.dumps(found))
    draft = {"method": method, "model": str(tmp_path), "num_speculative_tokens": 2}
    error = refused(UnsupportedModel, model=str(model), speculative_config=draft)
    assert said in error.message and error.exit_code == 3
    with pytest.raises(UnsupportedModel, match=re.escape(error.message)):
        check_model(engine_config(model=str(model), speculative_config=draft, kv_memory="1MiB"))


def test_a_draft_that_is_not_there(model: Path) -> None:
    draft = {"method": "eagle", "model": "/nowhere", "num_speculative_tokens": 2}
    assert "/nowhere" in refused(ModelLoadError, model=str(model), speculative_config=draft).message


@pytest.mark.parametrize("changed", [{"max_position_embeddings": 64, "rope_parameters": {"rope_type": "dynamic"}}, {}])
def test_a_draft_that_may_fit_is_left_to_the_load(model: Path, tmp_path: Path, changed: dict[str, Any]) -> None:
    found = json.loads((model / "config.json").read_text()) | changed
    (tmp_path / "config.json").write_text(json.dumps(found))
    draft = {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 2}
    with pytest.raises(AssertionError, match="weights were read"):
        EngineCore(engine_config(model=str(model), speculative_config=draft, max_model_len=128))


@pytest.mark.parametrize(
    "settings",
    [
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}, "overlap": True},
    ],
)
def test_refused_combinations_of_drafts_have_one_exit_code(settings: dict[str, Any]) -> None:
    with pytest.raises(RefusedCombination) as caught:
        engine_config(**settings)
    assert caught.value.exit_code == UnsupportedModel.exit_code == 3 and caught.value.fix


@pytest.mark.parametrize("kv_memory", [None, "1MiB"])
def test_a_model_whose_latents_cannot_be_in_host_memory(model: Path, kv_memory: str | None) -> None:
    """Before its weights are read, by an engine and by a command, also without a size of KV memory."""
    config = engine_config(model=str(model), kv_memory=kv_memory).model_copy(update={"hisparse": HiSparseConfig()})
    for refuse in (EngineCore, check_model):
        with pytest.raises(InvalidInput, match=r"no layer of .* selects latents"):
            refuse(config)
