"""The identity of a model's weights: a revision, or a digest of their files; never a path, under which weights change.

A digest reads every file once and takes about as long as loading them. It is kept beside size, time and inode of the
file, in `~/.cache/quire/weights.json`, so that the next start does not read again what did not change.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from xxhash import xxh3_128

from quire.errors import InvalidInput

KEPT = Path("~/.cache/quire/weights.json")
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}
# vLLM's and SGLang's load formats that read the model's files; others take weights from elsewhere.
LOADED_FROM_FILES = {"auto", "hf", "safetensors", "pt", "npcache", "mistral", "gguf", "fastsafetensors", "layered"}
LOADED_FROM_FILES |= {"instanttensor", "sharded_state", "runai_streamer", "runai_streamer_sharded", "bitsandbytes"}
_COMMIT = re.compile("[0-9a-f]{40}")
_READ_BYTES = 16 << 20


def weights_identity(model: str | Path, revision: str | None = None, hub: str | Path | None = None) -> str:
    """What distinguishes the weights of `model`, a folder or a file of weights, or the name of a repository on the Hub.

    `commit:` and a commit of the Hub, also for the folder that its cache keeps of one; else `files:` and a digest over
    `config.json` and all files of weights. So a snapshot is read whose files were changed. `hub` is the cache that the
    engine loads from, by default huggingface_hub's. Raises InvalidInput if there are none, or a name has no commit
    here."""
    path = Path(model).expanduser()
    if path.exists():
        return f"commit:{path.resolve().name}" if path.is_dir() and _is_of_hub(path.resolve()) else _digest_of(path)
    commit, folder = revision or "main", Path(hub or _default_hub()).expanduser()
    folder /= f"models--{str(model).replace('/', '--')}"
    if not _COMMIT.fullmatch(commit):
        ref = folder / "refs" / commit
        commit = ref.read_text().strip() if ref.is_file() else ""
    if (there := folder / "snapshots" / commit).is_dir() and any(_weights_in(there)):
        return weights_identity(there)
    if not _COMMIT.fullmatch(commit):
        raise InvalidInput(
            f"the weights of '{model}' cannot be told from others: it is no folder, and has no commit here.",
            fix="give the commit as the revision, the folder of the weights, or an identity of your own.",
        )
    return f"commit:{commit}"


def _is_of_hub(path: Path) -> bool:
    """Whether this is a snapshot of the Hub's cache, whose files are links to blobs that never change. A copy may."""
    blobs, files = path.parent.parent / "blobs", list(_weights_in(path))
    files += filter(Path.is_file, [path / "config.json"] if files else [])
    is_named = path.parent.name == "snapshots" and bool(_COMMIT.fullmatch(path.name))
    return is_named and bool(files) and all(file.is_symlink() and file.resolve().parent == blobs for file in files)


def _weights_in(path: Path) -> Iterator[Path]:
    return (file for file in path.iterdir() if file.suffix in _WEIGHTS)


def _default_hub() -> str:
    try:
        from huggingface_hub.constants import HF_HUB_CACHE
    except ImportError:
        return "~/.cache/huggingface/hub"
    return HF_HUB_CACHE


def _digest_of(path: Path) -> str:
    found = [path] if path.is_file() else sorted(_weights_in(path))
    if not found:
        raise InvalidInput(
            f"'{path}' has no files of weights.", fix=f"give a folder with {', '.join(sorted(_WEIGHTS))}."
        )
    config = path / "config.json"
    files = [*found, *([config] if config.is_file() else [])]
    digest = hashlib.sha256(b"quire-files-1")
    for file, part in zip(files, _digests(files), strict=True):
        for text in (file.name, part):
            digest.update(len(text).to_bytes(8, "little") + text.encode())
    return f"files:{digest.hexdigest()[:32]}"


def _digests(files: Iterable[Path]) -> list[str]:
    """xxh3_128 of each file, from `KEPT` for files that did not change."""
    place = KEPT.expanduser()
    known: dict[str, str] = {}
    with suppress(OSError, ValueError):
        known = dict(json.loads(place.read_text()))
    digests, before = [], dict(known)
    for file in files:
        facts = file.stat()
        name = f"{file.resolve()} {facts.st_size} {facts.st_mtime_ns} {facts.st_ctime_ns} {facts.st_ino}"
        if name not in known:
            known[name] = _read(file)
        digests.append(known[name])
    if known != before:
        with suppress(OSError):
            place.parent.mkdir(parents=True, exist_ok=True)
            written = place.with_name(f"{place.name}.{os.getpid()}")
            written.write_text(json.dumps(known))
            written.replace(place)
    return digests


def _read(file: Path) -> str:
    digest = xxh3_128()
    buffer = memoryview(bytearray(_READ_BYTES))
    with file.open("rb", buffering=0) as opened:
        while count := opened.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()
