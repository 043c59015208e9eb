"""Random writes, reads and copies of frames of two fields in one format, against a table of what each slot holds."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.kernels.codec import decode, encode
from quire.memory.host_pool import HostPool
from quire.memory.pool import Pool
from quire.models.forward import paged_field
from quire.spec.group import GroupSpec, ReachSpec
from quire.spec.kv_format import KV_FORMATS, KVFormat
from quire.spec.layers import LayerField, formatted, fp8_row
from quire.spec.layout import DType, Field, PageLayout, scales_of

WIDTH = 128  # fits every format
LATENT_ROW = fp8_row(WIDTH, 128, DType.FLOAT32)
COMPRESSED_ROW = fp8_row(WIDTH, 64, DType.UINT8)
FORMATS = {**KV_FORMATS, "latent row": LATENT_ROW, "compressed row": COMPRESSED_ROW}
ENCODED = [name for name, kv_format in FORMATS.items() if kv_format.encodes]
PADDING = 3  # scales of a compressed row beyond its own
PAGE, FRAMES = 4, 6


def pool_of(
    kv_format: KVFormat, *, frames: int = FRAMES, page: int = PAGE, device: str = "cpu", hosted: bool = False
) -> Pool:
    """A pool of one layer with fields "k" and "v" of two heads; compressed rows have padded scales. `hosted`: its
    frames are records of a host pool, second of two groups."""
    reach = ReachSpec()
    parts = [part for name in "kv" for part in formatted(name, (2, WIDTH), kv_format, group="full", reach=reach)]
    fields = tuple(
        Field(
            name=part.name,
            shape=(*part.shape[:-1], part.shape[-1] + _padding(part, kv_format)),
            dtype=part.dtype,
            layers=(0,),
            kv_format=part.kv_format,
        )
        for part in parts
    )
    layout = PageLayout(page, fields)
    if hosted:
        group = GroupSpec(name="full", layout=layout)
        host = HostPool([group, group], [1, frames])
        return Pool(layout, rows=torch.from_numpy(host.payloads(1)), reader=torch.device(device))
    return Pool(layout, frames, device=device)


def _padding(part: LayerField, kv_format: KVFormat) -> int:
    return PADDING if kv_format is COMPRESSED_ROW and part.name.endswith(scales_of("")) else 0


def copy_frame(pool: Pool, source: int, target: int, *, without: str = "") -> None:
    """Every byte of a frame, but for those of the field named `without`."""
    for field in pool.layout.fields:
        if field.name != without:
            pool.layer(field.name, 0)[target] = pool.layer(field.name, 0)[source]


def round_trip(rows: Tensor, kv_format: KVFormat) -> Tensor:
    """`rows` as a reader sees them once they are stored."""
    return decode(*encode(rows, kv_format), kv_format, rows.dtype)


def check_stored(seed: int, *, hosted: bool = False) -> None:
    """One format, two fields and thirty operations; every answer must be bit for bit what the table says."""
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    kv_format = FORMATS[list(FORMATS)[seed % len(FORMATS)]]
    dtype = (torch.float32, torch.bfloat16, torch.float16)[rng.integers(3)]
    pool = pool_of(kv_format, hosted=hosted)
    fields = {name: paged_field(pool, name, 0) for name in "kv"}
    num_slots = (FRAMES + 1) * PAGE
    table = {name: torch.zeros(num_slots, 2, WIDTH, dtype=dtype) for name in fields}
    for _ in range(30):
        if rng.random() < 0.2:
            source, target = rng.integers(1, FRAMES + 1, 2).tolist()
            copy_frame(pool, source, target)
            for rows in table.values():
                rows[target * PAGE :][:PAGE] = rows[source * PAGE :][:PAGE].clone()
            continue
        slots = torch.from_numpy(rng.choice(num_slots, rng.integers(1, 6), replace=False))
        start, stop = sorted(rng.choice(num_slots + 1, 2, replace=False).tolist())
        for name, stored in fields.items():
            size = 2.0 ** rng.integers(-4, 5)
            rows = (torch.randn(2, len(slots), WIDTH, generator=generator) * size).to(dtype).transpose(0, 1)
            written = stored.write(slots, rows)
            table[name][slots] = round_trip(rows, kv_format)
            assert torch.equal(written, table[name][slots]), "a new row is what readers will see"
        run = torch.arange(start, stop)
        reads = {name: stored.gather(run, dtype, f"{name} run") for name, stored in fields.items()}
        index = torch.from_numpy(rng.integers(0, num_slots, 7))
        gathers = {name: stored.gather(index, dtype, name) for name, stored in fields.items()}
        for name, rows in table.items():
            assert torch.equal(reads[name], rows[start:stop]), "consecutive rows"
            assert torch.equal(gathers[name], rows[index]), "scattered rows"
