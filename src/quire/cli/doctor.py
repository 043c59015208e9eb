"""`quire doctor`: describes this machine and the defaults of Quire on it."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from quire import __version__
from quire.cli.report import Report, named_rows
from quire.engine.cores import available_cores, quota_cores, usable_cores
from quire.plan.budget import format_bytes
from quire.settings.setting import default_of

_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "msgspec", "fastapi")
_ISA = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "asimd", "bf16", "sve")
_CLIENTS = {"valkey": "redis", "s3": "obstore", "mooncake": "mooncake"}
"""The package of each store's client."""


def doctor() -> Report:
    """Describe this machine, the defaults of Quire on it, and likely problems.

    [dim]Example:[/dim] quire doctor --json
    """
    found = examine()
    return Report(found, lambda: _shown(found))


def examine() -> dict[str, Any]:
    """All findings, as plain values."""
    found: dict[str, Any] = {
        "quire": __version__,
        "python": platform.python_version(),
        "executable": sys.executable,
        "system": platform.platform(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "cpu": _cpu(),
        "memory": _memory(),
        "cuda_devices": _cuda_devices(),
        "native_kernels": _native_kernels(),
    }
    found["tiers"] = examine_tiers(found["memory"]["available_bytes"])
    found["assumed"] = _assumptions(found)
    found["warnings"] = list(_warnings(found))
    return found


def _version(name: str) -> str | None:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return None


def _cpu() -> dict[str, Any]:
    lines: list[str] = []
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    return {
        "name": fields.get("model name") or platform.processor() or platform.machine(),
        "cores": os.cpu_count() or 1,
        "usable_cores": usable_cores(),
        "quota_cores": quota_cores(),
        "load": round(os.getloadavg()[0], 1),
        "isa": [name for name in _ISA if name in flags],
    }


def _memory() -> dict[str, Any]:
    from quire.engine.host_memory import host_memory

    memory = host_memory()
    return {
        "total_bytes": memory.total,
        "available_bytes": memory.available,
        "cgroup_limit_bytes": memory.limit,
        "shm_bytes": shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else None,
    }


def _cuda_devices() -> list[dict[str, Any]]:
    import torch

    found: list[dict[str, Any]] = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        device, (free, total) = torch.cuda.get_device_properties(index), torch.cuda.mem_get_info(index)
        shown = {"name": device.name, "compute_capability": f"{device.major}.{device.minor}"}
        found.append(shown | {"total_bytes": total, "free_bytes": free})
    return found


def _native_kernels() -> dict[str, Any]:
    from quire.kernels.native.library import native

    found = native()
    threads = found.library.quire_threads() if found.library is not None else None
    return {"library": str(found.path) if found.path else None, "threads": threads, "reason": found.reason}


def _assumptions(found: Mapping[str, Any]) -> dict[str, str]:
    import torch

    from quire.engine.config import EngineConfig, engine_config
    from quire.engine.device.device import default_kv_bytes
    from quire.kernels.backend import AttentionBackend

    has_gpu = bool(found["cuda_devices"])
    most = format_bytes(default_kv_bytes(found["memory"]["available_bytes"]))
    pools = "80 % of what is free after loading" if has_gpu else f"at most {most}"
    return {
        "device": "cuda:0" if has_gpu else "cpu",
        "attention": AttentionBackend("auto", torch.device("cuda" if has_gpu else "cpu")).about(),
        "threads": f"{min(torch.get_num_threads(), available_cores())}, {default_of(EngineConfig, 'threads')}",
        "model": f"{engine_config().model_name}, when no --model is given",
        "page_size": "16 tokens",
        "kv_memory": f"{pools}; a server takes no more than all its requests can use",
    }


def _warnings(found: Mapping[str, Any]) -> Iterator[str]:
    """Each likely problem."""
    from quire.spec.bundled import BUNDLED_MODELS

    cpu, native, on_cpu = found["cpu"], found["native_kernels"], not found["cuda_devices"]
    if on_cpu and "+cpu" not in (found["packages"]["torch"] or "") and sys.platform == "linux":
        yield "this torch is built for CUDA, and no CUDA device is visible; steps will run on the CPU."
    if on_cpu and not cpu["isa"]:
        yield "no vector instructions were recognised; steps will be slow."
    if on_cpu and cpu["load"] > cpu["usable_cores"] > 1:
        yield (
            f"other work keeps the cores busy (load {cpu['load']}, {cpu['usable_cores']} cores). Threads of a step "
            "wait for each other, so that steps take many times as long; with --threads 1 they do not."
        )
    if on_cpu and native["library"] is None:
        yield f"steps on the CPU are slower without native kernels: {native['reason']}"
    if absent := [name for name, folder in BUNDLED_MODELS.items() if not (folder / "config.json").exists()]:
        yield f"{' and '.join(absent)} came without weights; install the package again, or give --model."


def _shown(found: Mapping[str, Any]) -> Iterator[RenderableType]:
    cpu, memory, native = found["cpu"], found["memory"], found["native_kernels"]
    limit = memory["cgroup_limit_bytes"]
    available = f"{format_bytes(memory['available_bytes'])} of {format_bytes(memory['total_bytes'])} available"
    container = f"the container's limit is {format_bytes(limit)}" if limit else "no container limits it"
    packages = ", ".join(f"{name} {version or 'missing'}" for name, version in found["packages"].items())
    names = [f"{device['name']} ({format_bytes(device['free_bytes'])} free)" for device in found["cuda_devices"]]
    rows = [
        ("Quire", f"{found['quire']} on Python {found['python']}, {found['system']}"),
        ("Packages", packages),
        ("CPU", f"{cpu['name']}: {cpu['usable_cores']} of {cpu['cores']} cores; {', '.join(cpu['isa']) or '-'}"),
        ("Memory", f"{available}; {container}"),
        *tier_rows(found["tiers"]),
        ("CUDA", ", ".join(names) or "none"),
        ("Native kernels", native["library"] or f"none: {native['reason']}"),
        *((f"Assumed {name}", value) for name, value in found["assumed"].items()),
    ]
    yield named_rows(rows)
    for warning in found["warnings"]:
        yield Text.assemble(("Warning:", "yellow"), f" {warning}")
    if not found["warnings"]:
        yield Text("Nothing looks wrong.", "green")


# -- host memory and storage


def examine_tiers(available: int) -> dict[str, Any]:
    """All findings, as plain values. `available` is the usable host memory in bytes."""
    from quire.plan.host import largest_host_bytes

    return {
        "largest_host_memory_bytes": largest_host_bytes(available),
        "storage": _storage(Path.cwd()),
        "store_clients": {name: find_spec(package) is not None for name, package in _CLIENTS.items()},
    }


def _storage(folder: Path) -> dict[str, Any]:
    """Room in the folder, and whether files there bypass the page cache; None if nothing can be written."""
    from quire.tiers.stores.directory.slab_files import SlabFiles

    direct = None
    with suppress(OSError), tempfile.TemporaryDirectory(dir=folder, prefix=".quire-doctor-") as scratch:
        direct = SlabFiles(Path(scratch), direct=None).direct
    return {"folder": str(folder), "free_bytes": shutil.disk_usage(folder).free, "direct": direct}


def tier_rows(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The findings for people: a name and a sentence each."""
    storage = found["storage"]
    direct = {True: "with O_DIRECT", False: "without O_DIRECT", None: "cannot be written"}[storage["direct"]]
    clients = (f"{name} {'installed' if is_there else 'missing'}" for name, is_there in found["store_clients"].items())
    return [
        ("Host memory", f"{format_bytes(found['largest_host_memory_bytes'])} at most (--host-memory)"),
        ("Storage here", f"{direct}; {format_bytes(storage['free_bytes'])} free"),
        ("Clients of stores", ", ".join(clients)),
    ]
