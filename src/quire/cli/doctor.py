"""`quire doctor`: what this machine is and what Quire would assume on it, or what a KV dtype costs a model."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from quire import __version__
from quire.cli.doctor_tiers import examine_tiers, tier_rows
from quire.cli.kv_error import MAX_ERROR, report_kv_error
from quire.cli.options import DebugOption, JsonOption
from quire.cli.report import reported
from quire.errors import InvalidInput

KV_ERROR = "What a KV dtype costs a model"

_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "pyzmq", "msgspec", "fastapi")
_ISA = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "asimd", "bf16", "sve")
_CGROUP_CPU = Path("/sys/fs/cgroup/cpu.max")


def doctor(
    kv_dtype: Annotated[
        list[str] | None,
        typer.Option(
            help="Measure what this KV dtype costs the model: fp8_e4m3, fp8_e5m2, mxfp8, nvfp4, fp4_e2m1; "
            "several with commas, or given again.",
            rich_help_panel=KV_ERROR,
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="The model's folder or hub name. (default: the bundled model)",
            rich_help_panel=KV_ERROR,
        ),
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(help="The text to measure on. (default: a sample of several kinds)", rich_help_panel=KV_ERROR),
    ] = None,
    max_error: Annotated[
        float,
        typer.Option(
            help="The relative error of keys, values, latents or attention above which a layer is refused, with exit "
            "code 4. Rounding to four bits costs 0.1 of a vector, and attention up to twice that; more is a sign of "
            "large channels, or of numbers out of range.",
            rich_help_panel=KV_ERROR,
        ),
    ] = MAX_ERROR,
    dtype: Annotated[
        str | None,
        typer.Option(help="auto, float32, float16 or bfloat16. (default: auto)", rich_help_panel=KV_ERROR),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:N or auto. (default: auto)", rich_help_panel=KV_ERROR)
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Say what this machine is, what Quire would assume on it, and what looks wrong; or what a KV dtype costs a model.

    [dim]Example:[/dim] quire doctor --json

    [dim]Example:[/dim] quire doctor --kv-dtype fp8_e4m3,nvfp4 --model Qwen/Qwen3-0.6B
    """
    with reported(as_json=as_json, debug=debug):
        if kv_dtype:
            report_kv_error(
                [name.strip() for names in kv_dtype for name in names.split(",")],
                model=model,
                dtype=dtype,
                device=device,
                prompt_file=prompt_file,
                max_error=max_error,
                as_json=as_json,
            )
            return
        if any(option is not None for option in (model, dtype, device, prompt_file)):
            raise InvalidInput(
                "--model, --dtype, --device and --prompt-file say what a KV dtype is measured on, and none was named.",
                fix="add --kv-dtype fp8_e4m3.",
            )
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

    defaults = engine_config()
    return {
        "device": "cuda:0" if devices else "cpu",
        "threads": f"{torch.get_num_threads()} for a step",
        "model": f"{defaults.model_name}, when no --model is given",
        "page_size": "16 tokens",
        "kv_memory": "a share of the free device memory"
        if devices
        else format_bytes(default_kv_bytes(memory["available_bytes"])),
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
