"""Devices by name with their figures, and the part of a device's memory that pools cannot use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quire.errors import InvalidInput

_MIB = 2**20
GRAPH_BYTES = 2 * _MIB
"""Bytes of the largest CUDA graph, for each of its requests: logits, activations and parts of attention. More if the
vocabulary is large."""
LEAST_GRAPHS = 64 * _MIB
"""Bytes of all CUDA graphs: torch reserves memory for them in segments of 2 and of 20 MiB."""
MOVE_BYTES = 64 * _MIB
"""Bytes beside the pools through which frames of an arena are moved, so many at once."""
MEMORY_SHARE = 0.8
"""Share of a published bandwidth, reached by streaming reads."""
LAUNCH_S = 0.0005
"""Host and launch time of a step with captured graphs."""
_MOST_SAMPLED = 2**22
_PER_LOGIT = 17  # bytes: logits, scores, logits before changes, their logarithms, and comparisons with these
_PER_SAMPLED = 88  # bytes of what filters compute for a number at once
_PER_TOKEN = 3 * _MIB // 2  # bytes of activations of a token, in a model of this width
_WIDE = 8192

DEVICES: Mapping[str, tuple[int, float, float, float]] = {
    "a10-24gb": (23_028, 125, 600, 32),
    "a100-40gb": (40_960, 312, 1555, 32),
    "a100-80gb": (81_920, 312, 2039, 32),
    "b200-180gb": (183_359, 2250, 8000, 64),
    "h100-80gb": (81_559, 989, 3350, 64),
    "h100-nvl-94gb": (95_830, 835, 3900, 64),
    "h20-96gb": (97_871, 148, 4000, 64),
    "h200-141gb": (143_771, 989, 4800, 64),
    "l4-24gb": (23_034, 121, 300, 32),
    "l40s-48gb": (46_068, 362, 864, 32),
    "mi300x-192gb": (196_592, 1307, 5300, 64),
    "rtx-3090-24gb": (24_576, 71, 936, 32),
    "rtx-4090-24gb": (24_564, 165, 1008, 32),
    "rtx-5090-32gb": (32_607, 209, 1792, 64),
    "rtx-a6000-48gb": (49_140, 155, 768, 32),
    "rtx-pro-6000-96gb": (97_887, 504, 1792, 64),
    "t4-16gb": (15_360, 65, 320, 16),
    "v100-16gb": (16_384, 125, 900, 16),
    "v100-32gb": (32_768, 125, 900, 16),
}
"""Devices by name: total memory in MiB, as `nvidia-smi` or `rocm-smi` prints it; and published peaks: TFLOP/s of
dense 16-bit matrix products with 32-bit sums, GB/s of memory, and GB/s of the host's bus in one direction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device's name and its total memory in bytes."""

    name: str
    memory: int


def find_device(name: str, *, otherwise: str = "give its bytes with --device-memory 80GiB") -> Device:
    """The device of that name, or of a name without its size if only one has it.

    Raises InvalidInput, whose fix ends in `otherwise`.
    """
    wanted = name.strip().lower().replace("_", "-").replace(" ", "-")
    if wanted in DEVICES:
        return Device(name=wanted, memory=DEVICES[wanted][0] * _MIB)
    found = [known for known in DEVICES if known.rpartition("-")[0] == wanted]
    if len(found) == 1:
        return Device(name=found[0], memory=DEVICES[found[0]][0] * _MIB)
    import difflib  # only a mistake needs it

    close = found or difflib.get_close_matches(wanted, DEVICES, n=3, cutoff=0.4)
    raise InvalidInput(
        f"'{name}' is not a device of known memory size.",
        fix=(f"use {' or '.join(close)}, " if close else f"use one of {', '.join(DEVICES)}, ") + f"or {otherwise}.",
    )


def graph_bytes(most: int, vocabulary: int) -> int:
    """What is planned for CUDA graphs of at most `most` requests; 0 if there are none."""
    return max(most * _bytes_per_request(vocabulary), LEAST_GRAPHS) if most else 0


def _bytes_per_request(vocabulary: int) -> int:
    """Bytes of the largest graph: logits in float32 twice, as a soft cap of theirs needs, and the rest."""
    return max(GRAPH_BYTES, 8 * vocabulary + _MIB)


def rows_at_once(vocabulary: int) -> int:
    """Rows of logits that sampling filters, or adds noise to, at once on a device: of `_MOST_SAMPLED` numbers, but one
    row at least."""
    return max(1, _MOST_SAMPLED // vocabulary)


def reported_at_once(vocabulary: int) -> int:
    """Rows of logits of a prompt whose log-probabilities are computed at once on a device. They take less than what
    filters take of the rows that are sampled, which are done by then."""
    return 4 * rows_at_once(vocabulary)


def sampling_bytes(rows: int, vocabulary: int) -> int:
    """The most memory that draws for `rows` requests take on a device at once, beside what a graph keeps: logits,
    scaled and reported ones, and what filters compute for some rows at a time."""
    return rows * vocabulary * _PER_LOGIT + min(rows, rows_at_once(vocabulary)) * vocabulary * _PER_SAMPLED


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a ledger: bytes on one rank, what they are, and whether they are an estimate."""

    name: str
    bytes: int
    why: str
    estimated: bool = False
    where: str = "device"


def working_memory(
    *, chunk: int, hidden_size: int, vocabulary: int, graph_batch: int, ranks: int, device: Device
) -> tuple[Line, ...]:
    """The memory that a running server uses beside weights and pools, estimated.

    512 MiB for driver and libraries, 2 MiB per request of the largest captured graph and 128 MiB per rank for
    communication are the reserves of a widely used engine. For a prompt token of a step it reserves 1.5 MiB, which is
    used here for a model 8,192 wide and in proportion for others. Graphs of a large vocabulary have more. A fiftieth of
    the device is for fragmentation.
    """
    per_token = _PER_TOKEN * (hidden_size or _WIDE) // _WIDE
    per_request = _bytes_per_request(vocabulary)
    told = "2 MiB" if per_request == GRAPH_BYTES else f"{per_request:,} bytes"
    lines = [
        ("driver", 512 * _MIB, "driver and libraries: 512 MiB"),
        ("activations", chunk * per_token, f"{per_token:,} bytes for each of {chunk:,} tokens of a step"),
        (
            "graphs",
            graph_batch * per_request,
            f"{told} for each of {graph_batch:,} requests of the largest captured graph",
        ),
        ("workspace", ranks * 128 * _MIB, f"communication buffers: 128 MiB for each of {ranks} ranks"),
        ("reserve", device.memory // 50, "a fiftieth of the device, for fragmentation"),
    ]
    return tuple(
        Line(name=name, bytes=size, why=why, estimated=True)
        for name, size, why in lines
        if ranks > 1 or name != "workspace"
    )
