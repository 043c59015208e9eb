"""The ledger of a plan: a line for every byte of the budget on the device, and lines for the host."""

from __future__ import annotations

from quire.plan.devices import Line
from quire.plan.plan import Plan


def ledger_of(plan: Plan, lines: tuple[Line, ...]) -> tuple[Line, ...]:
    """A line for every byte of the budget, and the tables on the host."""
    pools, settings = plan.config.pools, plan.settings
    found = list(lines)
    for pool in pools:
        size, frames = pool.bytes_per_frame, pool.frames
        why = f"{frames:,} frames of {size:,} bytes: {pool.why}"
        found.append(Line(name=f"pool {pool.name}", bytes=frames * size, why=why))
    padding = sum(pool.bytes_per_frame for pool in pools)
    found.append(Line(name="padding", bytes=padding, why="frame 0 of every pool, where padded tokens write"))
    left = plan.kv_bytes - plan.config.bytes
    found.append(Line(name="unused", bytes=left, why=_unused_why(plan)))
    if settings.device is not None and settings.kv_memory is not None:
        rest = settings.device.memory - sum(line.bytes for line in found)
        found.append(Line(name="not asked for", bytes=rest, why="what --kv-memory leaves of the device"))
    memory = plan.memory
    rows = f"{memory.max_requests:,} requests of up to {memory.pages_per_row:,} page ids of 4 bytes"
    found.append(Line(name="request tables", bytes=memory.row_bytes, why=rows, where="host"))
    return tuple(found)


def _unused_why(plan: Plan) -> str:
    cap, tokens = plan.settings.max_total_tokens, plan.config.max_total_num_tokens
    if cap is not None and tokens <= cap:
        return f"beyond the cap of {cap:,} tokens"
    return "less than one more page takes"
