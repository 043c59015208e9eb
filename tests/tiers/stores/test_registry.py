"""URLs of stores."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from quire.errors import InvalidInput, QuireError, StoreError
from quire.tiers.stores import registry
from quire.tiers.stores.directory import DirectoryStore
from quire.tiers.stores.registry import directory_of, open_store, register_store


@pytest.mark.parametrize("form", ["{}", "dir:{}", "dir://{}", "file:{}", "file://{}", "FILE://localhost{}"])
def test_directories(tmp_path: Path, form: str) -> None:
    url = form.format(tmp_path / "store")
    assert directory_of(url) == str(tmp_path / "store")
    with pytest.raises(StoreError, match="there is no store"):
        open_store(url)
    store = open_store(url, capacity=1 << 20)
    assert isinstance(store, DirectoryStore) and store.facts().capacity == 1 << 20
    store.close()
    open_store(url).close()


def test_a_file_url_is_decoded(tmp_path: Path) -> None:
    assert directory_of(f"file://{tmp_path}/a%20store") == f"{tmp_path}/a store"
    with pytest.raises(InvalidInput, match="of the host 'elsewhere'"):
        directory_of("file://elsewhere/store")


@pytest.mark.parametrize("url", ["file:", "file://", "file://localhost", "dir:"])
def test_a_directory_has_a_name(url: str) -> None:
    with pytest.raises(InvalidInput, match="no name"):
        directory_of(url)


def test_a_name_that_looks_like_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything of the store is in that directory, with its index."""
    monkeypatch.chdir(tmp_path)
    open_store("dir:file:store", capacity=1 << 20).close()
    assert [path.name for path in tmp_path.iterdir()] == ["file:store"]
    assert (tmp_path / "file:store" / "index.sqlite").exists()


def test_other_schemes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module of a scheme opens it, with the URL as it is."""
    module = ModuleType("quire.tiers.stores.s3")
    module.open = lambda url, capacity, counts_use: (url, capacity)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "quire.tiers.stores.s3", module)
    assert open_store("s3://bucket/prefix", capacity=5) == ("s3://bucket/prefix", 5)
    assert directory_of("s3://bucket/prefix") is None


@pytest.mark.parametrize(
    ("url", "module", "extra"),
    [
        ("valkey://host:1/0", "valkey", "valkey"),
        ("redis://host:1/0", "valkey", "valkey"),
        ("s3://bucket", "s3", "s3"),
        ("mooncake://host:1", "mooncake", "mooncake"),
    ],
)
def test_a_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, url: str, module: str, extra: str) -> None:
    monkeypatch.setitem(sys.modules, f"quire.tiers.stores.{module}", None)
    with pytest.raises(StoreError) as caught:
        open_store(url)
    assert f"pip install '.[{extra}]'" in caught.value.fix


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("/tmp/" + "a" * 300, "name too long"),
        ("/tmp/a\0b", "null"),
        ("~no-such-user/store", "home directory"),
        ("s3://bucket?endpoint=nonsense", "is no URL"),
        ("s3://bucket/a/../b?endpoint=http://127.0.0.1:1&timeout=1", "cannot be opened"),
        ("valkeys://me:secret@127.0.0.1:1?ssl_nonsense=1", "ssl_nonsense"),
        ("valkey://127.0.0.1:1?timeout=99999999999999", "at most 1,000,000"),
    ],
)
def test_what_no_library_can_open(url: str, says: str) -> None:
    """Whatever it raises, also an error that is no exception of Python's."""
    with pytest.raises(QuireError, match=f"(?i){says}") as caught:
        open_store(url, capacity=None if "://" in url else 1 << 20)
    assert "secret" not in str(caught.value)


def test_a_store_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.tiers.stores.registry._BACKENDS", dict(registry._BACKENDS))

    def opener(url: str, capacity: int | None, *, counts_use: bool) -> DirectoryStore:
        return DirectoryStore(tmp_path / url.removeprefix("my-store://"), capacity, counts_use=counts_use)

    register_store("my-store", opener)
    register_store("my-store", opener)  # a program that is imported again
    store = open_store("my-store://here", capacity=1 << 20)
    assert isinstance(store, DirectoryStore) and (tmp_path / "here").is_dir()
    store.close()
    for taken in ("my-store", "S3", "no scheme", ""):
        with pytest.raises(InvalidInput, match="cannot be the scheme"):
            register_store(taken, lambda url, capacity, *, counts_use: store)


def test_what_means_nothing() -> None:
    with pytest.raises(InvalidInput, match="no store for 'gopher://'"):
        open_store("gopher://host")
