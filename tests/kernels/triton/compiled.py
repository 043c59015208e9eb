"""Compiles the Triton kernels for devices that are not there, as a launch would specialise them.

    python -m tests.kernels.triton.compiled 90 plain-128 moves    # compute capability, names of configurations

The host code runs on tensors of the CPU; each launch is compiled in its place. One JSON line for each kernel.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import triton
from bench.kernels.launches import SilentDriver

from quire.kernels.batch import PagedBatch
from quire.kernels.fields import KVFields, LatentFields, PagedField
from quire.kernels.moves import HostEntries, Pieces
from quire.kernels.terms import AttentionTerms
from quire.kernels.triton import attention, moves, write
from quire.kernels.triton.launch import Launch
from quire.spec.group import ReachSpec
from quire.spec.kv_format import KV_FORMATS, KVFormat
from quire.spec.layers import formatted, fp8_row
from quire.spec.layout import DType

LATENT_ROW = fp8_row(512, 128, DType.FLOAT32)


@dataclass(frozen=True)
class Config:
    """A kind of attention. `dims` are those of keys and values, or of latents and rotary keys."""

    heads: tuple[int, int]  # of KV, and of a query group
    dims: tuple[int, int]
    dtype: torch.dtype = torch.bfloat16
    kv_format: KVFormat | None = None
    latents: bool = False
    softcap: float | None = None
    trees: bool = False
    page_size: int = 16


CONFIGS = {
    "plain-128": Config((8, 4), (128, 128)),
    "plain-64": Config((8, 8), (64, 64)),
    "plain-80": Config((32, 1), (80, 80), torch.float16),
    "plain-256": Config((4, 2), (256, 256), softcap=50.0),
    "widths": Config((4, 16), (192, 128)),
    "widest": Config((1, 8), (512, 512)),
    "float32": Config((8, 4), (128, 128), torch.float32),
    "float32-256": Config((4, 2), (256, 256), torch.float32),
    "fp8": Config((8, 4), (128, 128), kv_format=KV_FORMATS["fp8_e4m3"]),
    "e5m2": Config((8, 4), (128, 128), kv_format=KV_FORMATS["fp8_e5m2"]),
    "fp4": Config((8, 4), (128, 128), kv_format=KV_FORMATS["fp4_e2m1"]),
    "mxfp8": Config((8, 4), (128, 128), kv_format=KV_FORMATS["mxfp8"]),
    "nvfp4": Config((8, 4), (128, 128), kv_format=KV_FORMATS["nvfp4"]),
    "trees": Config((8, 4), (128, 128), trees=True),
    "latents": Config((1, 16), (512, 64), latents=True),
    "latents-64": Config((1, 64), (512, 64), latents=True),
    "latents-128": Config((1, 128), (512, 64), latents=True),
    "latents-fp8": Config((1, 128), (512, 64), latents=True, kv_format=LATENT_ROW),
    "latents-float32": Config((1, 128), (512, 64), torch.float32, latents=True),
}


class _Compiled:
    """A kernel that is compiled at each launch, and not run."""

    def __init__(self, kernel: Any, found: Callable[[str, Any, dict[str, Any]], None]) -> None:
        self._kernel, self._found = kernel, found
        self.arg_names = kernel.arg_names

    def __getitem__(self, grid: object) -> Callable[..., None]:
        def launch(*first: Any, **given: Any) -> None:
            code = self._kernel.warmup(*first, grid=(1,), **given)
            self._found(self._kernel.__name__, code, {**dict(zip(self.arg_names, first, strict=False)), **given})

        return launch


def _field(name: str, dims: tuple[int, ...], config: Config, kv_format: KVFormat | None) -> PagedField:
    if kv_format is None:
        return PagedField(torch.zeros(9, config.page_size, *dims, dtype=config.dtype))
    parts = formatted(name, dims, kv_format, group="full", reach=ReachSpec())
    frames = [torch.zeros(9, config.page_size, *part.shape, dtype=getattr(torch, part.dtype.value)) for part in parts]
    return PagedField(frames[0], frames[1] if len(frames) > 1 else None, kv_format)


def compile_config(config: Config, found: Callable[[str, Any, dict[str, Any]], None]) -> None:
    """Writes and attention of a step of decodes and chunks, and selected tokens of latents."""
    (kv_heads, group), (first, second) = config.heads, config.dims
    if config.latents:
        fields: Any = LatentFields(
            _field("l", (first,), config, config.kv_format), _field("r", (second,), config, None)
        )
    else:
        fields = KVFields(
            *(_field(name, (kv_heads, dim), config, config.kv_format) for name, dim in (("k", first), ("v", second)))
        )
    frames = np.ones((2, 600), dtype=np.int32)
    parents = np.array([-1, -1, *range(1, 99), 51], dtype=np.int32) if config.trees else None
    contexts = np.array([9000, 9000])
    batch = PagedBatch.of(frames, contexts - [1, 100], contexts, config.page_size, parents)
    attention.attend_tasks = _Compiled(attention.attend_tasks, found)
    attention.merge_parts = _Compiled(attention.merge_parts, found)
    write.write_tiles = _Compiled(write.write_tiles, found)
    kernel = attention.TritonAttention(torch.device("cpu"), programs=264)
    width = first + second if config.latents else first
    query = torch.zeros(101, kv_heads * group, width, dtype=config.dtype)
    sinks = torch.zeros(kv_heads * group)
    key = fields.parts()[0]
    new = torch.zeros(101, kv_heads, first, dtype=config.dtype)
    write.write_rows(key, torch.from_numpy(batch.slots).long(), new[:, 0] if config.latents else new)
    kernel.pages(query, fields.parts(), batch, AttentionTerms(scale=0.1, softcap=config.softcap, sinks=sinks))
    if config.latents:
        slots = torch.zeros(101, 2048, dtype=torch.int64)
        kernel.selected(query, fields.parts(), slots, slots > 0, AttentionTerms(scale=0.1))


def compile_moves(found: Callable[[str, Any, dict[str, Any]], None]) -> None:
    """One launch of each move."""
    names = ("set_table_entries", "move_pieces", "swap_in_entries", "read_rows", "write_rows")
    real = {name: getattr(moves, name) for name in names}
    try:
        for name in names:
            setattr(moves, name, _Compiled(real[name], found))
        made = moves.TritonMoves()
        made.set_entries(torch.zeros(2, 65, 512, dtype=torch.int32), torch.zeros(3, 300, dtype=torch.int32))
        frames = np.arange(4)
        rows = torch.from_numpy(frames)
        for size in (32768, 2056, 13):  # bytes of a piece: of vectors, of words, of neither
            pool = torch.zeros(9, 2, 1, size, dtype=torch.uint8).transpose(0, 1)
            pieces = Pieces.of([(16 if size > 13 else 3, pool)], 2 * size + (16 if size > 13 else 5))
            records = torch.zeros(4, pieces.record_words, dtype=pieces.word)
            made.gather(pieces, rows, records)
            made.scatter(pieces, rows, records)
        states = torch.zeros(9, 1, 64, 64, 128, dtype=torch.bfloat16)
        made.write_states(states, rows, made.read_states(states, rows, torch.float32))
        for size in (656, 1152, 40):
            host, hot = (torch.zeros(9, 16, 1, size, dtype=torch.uint8) for _ in range(2))
            made.swap_in(HostEntries([(host, hot)]), frames, frames, rows)
    finally:
        for name in names:
            setattr(moves, name, real[name])


def compile_steps(found: Callable[[str, Any, dict[str, Any]], None]) -> None:
    """Launches of several steps, with other numbers of rows and arrays that begin at other places."""
    config = Config((1, 16), (64, 16), latents=True)
    fields = LatentFields(_field("l", (64,), config, None), _field("r", (16,), config, None))
    attention.attend_tasks = _Compiled(attention.attend_tasks, found)
    attention.merge_parts = _Compiled(attention.merge_parts, found)
    kernel = attention.TritonAttention(torch.device("cpu"), programs=264)
    for count in (1, 3, 40, 130, 300):
        slots = torch.zeros(count, 2048, dtype=torch.int64)
        query = torch.zeros(count, 16, 80, dtype=config.dtype)
        kernel.selected(query, fields.parts(), slots, slots > 0, AttentionTerms(scale=0.1))
    names = ("swap_in_entries", "read_rows", "write_rows")
    real = {name: getattr(moves, name) for name in names}
    try:
        for name in names:
            setattr(moves, name, _Compiled(real[name], found))
        made, rows = moves.TritonMoves(), torch.arange(4)
        states = torch.zeros(9, 1, 64, 128, dtype=torch.bfloat16)
        host, hot = (torch.zeros(9, 16, 1, 656, dtype=torch.uint8) for _ in range(2))
        entries = HostEntries([(host, hot)])
        for some in (rows[:2], rows[1:2], rows[1:4]):
            made.write_states(states, some, made.read_states(states, some))
            made.swap_in(entries, some.numpy(), some.numpy(), some)
    finally:
        for name in names:
            setattr(moves, name, real[name])


class _Uncompiled:
    """In place of compiled code, which takes seconds for each kind of a launch."""

    function = packed_metadata = None

    def run(self, *_: Any) -> None:
        pass

    def launch_metadata(self, *_: Any) -> None:
        pass

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self.run


def check_kinds() -> Iterator[tuple[str, bool, bool]]:
    """By launch: the kernel, whether Triton would launch the same code, and whether it is one that was kept."""
    real, lines = Launch.__call__, []

    def launch(self: Launch, grid: tuple[int, int, int], arguments: tuple[Any, ...], kind: Any) -> None:
        was_kept = kind in self._compiled
        real(self, grid, arguments, kind)
        asked = self._kernel.warmup(*arguments, *self._constants, grid=(1,), **self._options)
        lines.append((self._kernel.__name__, asked is self._compiled[kind], was_kept))

    made = attention.TritonAttention(torch.device("cpu"), programs=264)
    config, memory = Config((2, 4), (64, 64)), torch.zeros(1 << 20, dtype=torch.bfloat16)
    fields = [_field(name, (2, 64), config, KV_FORMATS["mxfp8"] if name == "v" else None) for name in "kv"]
    sinks = torch.zeros(9)
    with patch.object(Launch, "__call__", launch), patch("triton.compiler.compile", lambda *_, **__: _Uncompiled()):
        for news, contexts, offset, row, head in (
            *(([1, 1], [90, 40], 0, 512, 64), ([1] * 5, [900] * 5, 0, 512, 64), ([1], [9000], 0, 512, 64)),
            *(([1, 3], [90, 40], 1, 512, 64), ([1, 3], [900, 40], 8, 520, 64), ([1, 33], [90, 9000], 0, 513, 64)),
            *(([1], [9000], 0, 512, 65), ([40], [41], 3, 777, 66), ([1], [9000], 0, 64, 1024), ([1], [3], 0, 1, 80)),
        ):
            stops, width = np.array(contexts), -(-max(contexts) // 16)
            frames = np.ones((len(contexts), width), dtype=np.int32)
            batch = PagedBatch.of(frames, stops - news, stops, 16)
            query = memory.as_strided((sum(news), 8, 64), (row, head, 1), offset)
            new = memory.as_strided((sum(news), 2, 64), (row, head, 1), offset)
            both = (fields[0], None, fields[1])
            for field in fields:
                write.write_rows(field, torch.from_numpy(batch.slots).long(), new)
            for given in (None, sinks[:8], sinks[1:]):
                terms = AttentionTerms(scale=0.1, sinks=given)
                made.pages(query, both, batch, terms, keep_lse=given is None)
            slots = torch.zeros(sum(news), 512 + 64 * (head == 64) + row % 2, dtype=torch.int64)
            made.selected(query, both, slots, slots > 0, AttentionTerms(scale=0.1))
    yield from lines


def _usage(cubin: bytes) -> dict[str, int]:
    """Registers, and bytes of the stack, where spilled registers are."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    numbers = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", text))
    return {name.lower(): int(number) for name, number in numbers.items()}


def compiled(capability: int, names: list[str]) -> Iterator[dict[str, Any]]:
    """What was compiled of each configuration."""
    triton.runtime.driver.set_active(SilentDriver(capability))
    real = attention.attend_tasks, attention.merge_parts, write.write_tiles
    for name in names:
        lines: list[dict[str, Any]] = []

        def found(kernel: str, code: Any, given: dict[str, Any], name: str = name, lines: Any = lines) -> None:
            ptx = code.asm["ptx"]
            lines.append(
                {
                    "config": name,
                    "kernel": kernel,
                    "hash": code.hash,
                    **{key: given.get(key) for key in ("M", "N", "STAGES", "SELECTED", "ALIGNED", "SIZE")},
                    "shared": code.metadata.shared,
                    **_usage(code.asm["cubin"]),
                    "cp_async": len(re.findall(r"cp\.async\.c[ga]", ptx)),
                    "cp_async_16": len(
                        re.findall(r"cp\.async\.c[ga]\.shared\.global \[[^\]]*\], \[[^\]]*\], 0x10", ptx)
                    ),
                    "loads_16": len(re.findall(r"ld\.global\S*\.(?:v4\.b32|v2\.b64)", ptx)),
                    "stores_16": len(re.findall(r"st\.global\S*\.(?:v4\.b32|v2\.b64)", ptx)),
                    "mma": len(re.findall(r"\bmma\.sync", ptx)),
                    "wgmma": len(re.findall(r"wgmma\.mma_async", ptx)),
                    "tcgen05": len(re.findall(r"tcgen05\.mma", ptx)),
                }
            )

        if name in ("moves", "steps"):
            (compile_moves if name == "moves" else compile_steps)(found)
        else:
            compile_config(CONFIGS[name], found)
        attention.attend_tasks, attention.merge_parts, write.write_tiles = real
        yield from lines


if __name__ == "__main__":
    if sys.argv[2:] in (["kinds"], ["one-kind"]):
        triton.runtime.driver.set_active(SilentDriver(int(sys.argv[1])))
        if sys.argv[2] == "one-kind":  # a mistake that the check must find
            for module in (attention, write):
                module.is_aligned, module.hint = (lambda tensor: True), (lambda number: 0)  # type: ignore[assignment]
        print(json.dumps(list(check_kinds())))
        sys.exit()
    for line in compiled(int(sys.argv[1]), sys.argv[2:] or [*CONFIGS, "moves"]):
        print(json.dumps(line), flush=True)
