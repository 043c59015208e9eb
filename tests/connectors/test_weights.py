"""The identity of weights changes with their bytes, and with nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quire.connectors import weights
from quire.connectors.weights import weights_identity
from quire.errors import InvalidInput


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "kept" / "weights.json"
    monkeypatch.setattr(weights, "KEPT", place)
    return place


def folder(tmp_path: Path, name: str, content: bytes = b"weights", config: str = "{}") -> Path:
    path = tmp_path / name
    path.mkdir(exist_ok=True)
    (path / "model.safetensors").write_bytes(content)
    (path / "config.json").write_text(config)
    (path / "README.md").write_text(name)
    return path


def test_a_copy_is_the_same_and_changed_weights_are_not(tmp_path: Path) -> None:
    first = folder(tmp_path, "first")
    before = weights_identity(first)
    assert before.startswith("files:") and weights_identity(folder(tmp_path, "second")) == before
    assert weights_identity(folder(tmp_path, "third", config='{"rope_theta": 1}')) != before
    stat = (first / "model.safetensors").stat()
    folder(tmp_path, "first", b"wEights")
    os.utime(first / "model.safetensors", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert weights_identity(first) != before
    folder(tmp_path, "first")
    assert weights_identity(first) == before
    (first / "more.safetensors").write_bytes(b"")
    assert weights_identity(first) != before


def test_files_are_read_once(tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder(tmp_path, "model", b"x" * (weights._READ_BYTES + 5))
    before = weights_identity(path)
    assert kept.exists()
    monkeypatch.setattr(weights, "_read", lambda file: pytest.fail("it was read again"))
    assert weights_identity(path) == before
    monkeypatch.undo()
    kept.write_text("not JSON")
    monkeypatch.setattr(weights, "KEPT", kept)
    assert weights_identity(path) == before


def test_a_copied_snapshot_is_read(tmp_path: Path) -> None:
    """Its name is a commit, and its files may have changed since."""
    (tmp_path / "snapshots").mkdir()
    copy = folder(tmp_path / "snapshots", "a" * 40)
    before = weights_identity(copy)
    folder(tmp_path / "snapshots", "a" * 40, b"other")
    assert before.startswith("files:") and weights_identity(copy) != before


def test_a_commit_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit, other = "a" * 40, "b" * 40
    hub = tmp_path / "hub"
    snapshot = hub / "models--org--name" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (hub / "models--org--name" / "blobs").mkdir()
    (hub / "models--org--name" / "blobs" / "digest").write_bytes(b"weights")
    (snapshot / "model.safetensors").symlink_to("../../blobs/digest")
    (hub / "models--org--name" / "refs").mkdir()
    (hub / "models--org--name" / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    assert weights_identity(snapshot) == weights_identity("org/name") == f"commit:{commit}"
    assert weights_identity("org/name", other) == f"commit:{other}"
    elsewhere = tmp_path / "elsewhere" / "models--org--name" / "refs"
    elsewhere.mkdir(parents=True)
    (elsewhere / "main").write_text(other)
    assert weights_identity("org/name", hub=tmp_path / "elsewhere") == f"commit:{other}"
    (snapshot / "config.json").write_text('{"rope_scaling": null}')  # in place of the link: as model cards say for YaRN
    changed = weights_identity(snapshot)
    assert changed.startswith("files:") and weights_identity("org/name") == changed
    (snapshot / "config.json").write_text('{"rope_scaling": {"type": "yarn"}}')
    assert weights_identity(snapshot) == weights_identity("org/name") != changed
    for name, revision in (("org/other", None), ("org/name", "v2")):
        with pytest.raises(InvalidInput, match="cannot be told"):
            weights_identity(name, revision)
    with pytest.raises(InvalidInput, match="no files of weights"):
        weights_identity(hub)
