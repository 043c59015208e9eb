"""What `quire doctor` finds for the tiers below the device: host memory, the disk, stores and their clients."""

from __future__ import annotations

import shutil
import socket
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_LOOK_S = 0.2
_STORES = {
    "valkey": (("valkey-server", "redis-server"), "redis", 6379),
    "s3": ((), "obstore", None),
    "mooncake": (("mooncake_master",), "mooncake", 50051),
}
"""By store: programs that serve it, the package of its client, and the port it listens on by habit."""


def examine_tiers(available: int) -> dict[str, Any]:
    """All findings, as plain values. `available` is what may be taken of the host's memory, in bytes."""
    from quire.plan.host import largest_host_bytes

    return {
        "largest_host_memory_bytes": largest_host_bytes(available),
        "storage": _storage(Path.cwd()),
        "stores": {name: _store(*about) for name, about in _STORES.items()},
    }


def _storage(folder: Path) -> dict[str, Any]:
    """Whether files here can be read and written around the page cache, and how much room there is."""
    from quire.tiers.stores.directory.slab_files import SlabFiles

    found: dict[str, Any] = {"folder": str(folder), "free_bytes": shutil.disk_usage(folder).free, "direct": None}
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".quire-doctor-") as scratch:
            found["direct"] = SlabFiles(Path(scratch), direct=None).direct
    except OSError:
        return found  # nothing can be written here; that is what None says
    return found


def _store(programs: tuple[str, ...], package: str, port: int | None) -> dict[str, Any]:
    program = next((found for name in programs if (found := shutil.which(name))), None)
    return {
        "program": program,
        "client": find_spec(package) is not None,
        "listening": f"127.0.0.1:{port}" if port is not None and _listens(port) else None,
    }


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=_LOOK_S).close()
    except OSError:
        return False
    return True


def tier_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """The findings for people: a name and a sentence each."""
    from quire.plan.budget import format_bytes

    storage = found["storage"]
    direct = {True: "with O_DIRECT", False: "without O_DIRECT", None: "cannot be written"}[storage["direct"]]
    return [
        ("Host memory", f"{format_bytes(found['largest_host_memory_bytes'])} at most (--host-memory)"),
        ("Storage here", f"{direct}; {format_bytes(storage['free_bytes'])} free"),
        ("Stores", "; ".join(f"{name}: {_words(about)}" for name, about in found["stores"].items())),
    ]


def _words(about: dict[str, Any]) -> str:
    words = ["client installed" if about["client"] else "client missing"]
    if about["listening"]:
        words.append(f"something listens on {about['listening']}")
    elif about["program"]:
        words.append(f"{Path(about['program']).name} could serve it")
    return ", ".join(words)
