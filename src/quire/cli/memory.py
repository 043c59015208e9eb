"""`quire memory`: the size of a live server's memory, and another one."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from quire.cli.report import Report, plain_table
from quire.cli.server import DEFAULT_URL, Server, ServerAddress
from quire.errors import InvalidInput
from quire.plan.budget import format_bytes
from quire.settings.setting import Bytes, Settings, setting

_ROUTES = {"release": "/v1/cache/memory/release", "resume": "/v1/cache/memory/resume", "resize": "/v1/cache/resize"}


class AskedMemory(Settings):
    """What the memory should be."""

    resize: Bytes | None = setting(None, "Bytes of KV memory: 8GiB.", otherwise="as it is")
    resize_host: Bytes | None = setting(None, "Bytes of host memory for pages.", otherwise="as it is")
    release: bool = setting(False, "Give all KV memory back; the weights stay, and requests wait.", option="--release")
    resume: bool = setting(False, "Have the KV memory again.", option="--resume")
    preempt: bool = setting(False, "With --resize: running requests give their memory back and go on later.")
    wait: float = setting(10.0, "Seconds to wait until it is reached.", ge=0, le=600)


def memory(where: ServerAddress, asked: AskedMemory) -> Report:
    """Show the size of a live server's memory, or make it smaller or larger between the sizes of its --kv-memory, such
    as 8GiB..24GiB. Exit codes: 0 done, also if running requests still hold a part; 2 bad input, or it cannot be.

    [dim]Example:[/dim] quire memory --resize 8GiB --wait 30

    [dim]Example:[/dim] quire memory --release --json
    """
    server = Server(where.url or DEFAULT_URL, where.api_key)
    sizes = {"device_bytes": asked.resize, "host_bytes": asked.resize_host}
    given = {name: size for name, size in sizes.items() if size is not None}
    verbs = [verb for verb in _ROUTES if verb != "resize" and getattr(asked, verb)] + ["resize"] * bool(given)
    if len(verbs) > 1:
        raise InvalidInput(f"--{verbs[0]} and --{verbs[1]} were given.", fix="give one of them.")
    if asked.preempt and not given:
        raise InvalidInput("--preempt says how to make the memory smaller.", fix="add --resize 8GiB, or leave it out.")
    if not verbs:
        found = server.ask("/v1/cache/memory")
    else:
        more: dict[str, Any] = {**given, "preempt": asked.preempt} if given else {}
        found = server.ask(_ROUTES[verbs[0]], {"wait_s": asked.wait, **more}, timeout_s=asked.wait + 60)
    return Report(found, lambda: [Text(f"{server.url}: {_state(found)}"), _sizes(found), *_holders(found)])


def _state(found: dict[str, Any]) -> str:
    state = "the KV memory is released, and requests wait" if found["released"] else "the KV memory is in use"
    left = f"{found['evicted_pages']:,} pages have left the device, {found['moved_frames']:,} frames have moved"
    changed = f"; {left}" if found["evicted_pages"] or found["moved_frames"] else ""
    return f"{state}{changed}" + ("" if found["done"] else "; it goes on as requests end")


def _sizes(found: dict[str, Any]) -> Any:
    heads = ("memory", "asked", "now", "least", "most")
    tiers = [(tier, found[tier]) for tier in ("device", "host") if found[tier] is not None]
    body = [
        (tier, *(format_bytes(each[name]) for name in ("asked", "reached", "least", "most"))) for tier, each in tiers
    ]
    return plain_table(heads, body)


def _holders(found: dict[str, Any]) -> list[Any]:
    sizes = ("num_bytes", "most_bytes")
    body = [(each["name"], *(format_bytes(each[name]) for name in sizes)) for each in found["holders"]]
    return [plain_table(("what keeps the rest", "now", "at its end"), body)] if body else []
