"""`quire doctor`: what this machine is and what Quire would assume on it."""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import sys
import tempfile
from collections.abc import Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console
from rich.table import Table

from quire import __version__
from quire.engine.setting import Settings

_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "pyzmq", "msgspec", "fastapi")
_ISA = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "asimd", "bf16", "sve")
_CGROUP_CPU = Path("/sys/fs/cgroup/cpu.max")
_LOOK_S = 0.2
_STORES = {
    "valkey": (("valkey-server", "redis-server"), "redis", 6379),
    "s3": ((), "obstore", None),
    "mooncake": (("mooncake_master",), "mooncake", 50051),
}
"""By store: programs that serve it, the package of its client, and the port it listens on by habit."""


class DoctorSettings(Settings):
    """`quire doctor` has no settings; it says where the check of a KV dtype is."""

    FOREIGN: ClassVar[Mapping[str, tuple[str, str]]] = {
        "kv_dtype": (
            "what a KV dtype costs a model is measured by a script of the repository.",
            "run `python bench/kv_error.py MODEL --kv-dtype fp8_e4m3` in a checkout.",
        )
    }


def doctor(settings: DoctorSettings, *, as_json: bool) -> None:
    """Say what this machine is, what Quire would assume on it, and what looks wrong.

    [dim]Example:[/dim] quire doctor --json
    """
    found = examine()
    if as_json:
        print(json.dumps(found))
    else:
        _print(found)


def examine() -> dict[str, Any]:
    """All findings, as plain values."""
    versions = {name: _version(name) for name in _PACKAGES}
    cpu, memory, devices = _cpu(), _memory(), _devices()
    return {
        "quire": __version__,
        "python": platform.python_version(),
        "executable": sys.executable,
        "system": platform.platform(),
        "packages": versions,
        "cpu": cpu,
        "memory": memory,
        "tiers": examine_tiers(memory["available_bytes"]),
        "cuda_devices": devices,
        "assumed": _assumptions(memory, devices),
        "warnings": _warnings(cpu, memory, devices, versions),
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _cpu() -> dict[str, Any]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    lines = _read(Path("/proc/cpuinfo")).splitlines()
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    return {
        "name": fields.get("model name") or platform.processor() or platform.machine(),
        "cores": os.cpu_count() or 1,
        "usable_cores": usable,
        "quota_cores": _cpu_quota(),
        "isa": [name for name in _ISA if name in flags],
    }


def _cpu_quota() -> float | None:
    """Cores that the container's CPU quota is worth; None when there is none."""
    quota, _, period = _read(_CGROUP_CPU).strip().partition(" ")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def _memory() -> dict[str, Any]:
    from quire.engine.host_memory import host_memory

    memory = host_memory()
    return {
        "total_bytes": memory.total,
        "available_bytes": memory.available,
        "cgroup_limit_bytes": memory.limit,
        "shm_bytes": shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else None,
    }


def _devices() -> list[dict[str, Any]]:
    import torch

    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        found.append(
            {
                "name": properties.name,
                "compute_capability": f"{properties.major}.{properties.minor}",
                "total_bytes": total,
                "free_bytes": free,
            }
        )
    return found


def _assumptions(memory: dict[str, Any], devices: list[dict[str, Any]]) -> dict[str, str]:
    import torch

    from quire.engine.config import engine_config
    from quire.engine.core import default_kv_bytes
    from quire.plan.budget import format_bytes

    defaults, most = engine_config(), format_bytes(default_kv_bytes(memory["available_bytes"]))
    return {
        "device": "cuda:0" if devices else "cpu",
        "threads": f"{torch.get_num_threads()} for a step",
        "model": f"{defaults.model_name}, when no --model is given",
        "page_size": "16 tokens",
        "kv_memory": ("80 % of what is free after loading" if devices else f"at most {most}")
        + "; a server takes no more than all its requests can use",
    }


def _warnings(
    cpu: dict[str, Any], memory: dict[str, Any], devices: list[dict[str, Any]], versions: dict[str, str | None]
) -> list[str]:
    from quire.spec.bundled import BUNDLED_MODELS

    warnings = []
    if cpu["quota_cores"] and cpu["quota_cores"] < cpu["usable_cores"]:
        warnings.append(
            f"the container's CPU quota is {cpu['quota_cores']:g} of {cpu['usable_cores']} cores; "
            f"set OMP_NUM_THREADS={max(1, round(cpu['quota_cores']))}."
        )
    if not devices and "+cpu" not in (versions["torch"] or "") and sys.platform == "linux":
        warnings.append("this torch is built for CUDA, and no CUDA device is visible; steps will run on the CPU.")
    if not devices and not cpu["isa"]:
        warnings.append("no vector instructions were recognised; steps will be slow.")
    absent = [name for name, folder in BUNDLED_MODELS.items() if not (folder / "config.json").exists()]
    if absent:
        warnings.append(f"{' and '.join(absent)} came without weights; install the package again, or give --model.")
    return warnings


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _print(found: dict[str, Any]) -> None:
    from quire.plan.budget import format_bytes

    console = Console()
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    cpu, memory = found["cpu"], found["memory"]
    table.add_row("Quire", f"{found['quire']} on Python {found['python']}, {found['system']}")
    table.add_row(
        "Packages", ", ".join(f"{name} {version or 'missing'}" for name, version in found["packages"].items())
    )
    table.add_row(
        "CPU", f"{cpu['name']}: {cpu['usable_cores']} of {cpu['cores']} cores; {', '.join(cpu['isa']) or '-'}"
    )
    limit = memory["cgroup_limit_bytes"]
    table.add_row(
        "Memory",
        f"{format_bytes(memory['available_bytes'])} of {format_bytes(memory['total_bytes'])} available"
        + (f"; the container's limit is {format_bytes(limit)}" if limit else "; no container limits it"),
    )
    for name, text in tier_rows(found["tiers"]):
        table.add_row(name, text)
    names = [f"{device['name']} ({format_bytes(device['free_bytes'])} free)" for device in found["cuda_devices"]]
    table.add_row("CUDA", ", ".join(names) or "none")
    for name, value in found["assumed"].items():
        table.add_row(f"Assumed {name}", value)
    console.print(table)
    for warning in found["warnings"]:
        console.print(f"[yellow]Warning:[/yellow] {warning}")
    if not found["warnings"]:
        console.print("[green]Nothing looks wrong.[/green]")


# -- tiers below the device


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
