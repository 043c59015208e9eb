"""What frames of a pool hold, as bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from quire.memory.pool import Pool

Pieces = list[dict[int, np.ndarray]]


def pieces_of(pool: Pool) -> Pieces:
    """For each field: layer -> uint8 `[frames + 1, bytes]`, live. What the pool holds, without what copies rely on."""
    found = []
    for field in pool.layout.fields:
        of_layers = [pool.layer(field.name, layer) for layer in field.layers]
        found.append(
            {
                layer: tensor.view(torch.uint8).numpy().reshape(len(tensor), -1)
                for layer, tensor in zip(field.layers, of_layers, strict=True)
            }
        )
    return found


def fill(pool: Pool, rng: np.random.Generator) -> None:
    for field in pieces_of(pool):
        for piece in field.values():
            piece[:] = rng.integers(0, 256, piece.shape, dtype=np.uint8)


def payload(pieces: Pieces, frame: int) -> bytes:
    """Fields in order, layers in order, entries in order."""
    return b"".join(piece[frame].tobytes() for field in pieces for piece in field.values())


def assert_frames(found: Pieces, expected: Pieces, moved: dict[int, int], name: str) -> None:
    """Frames in `moved` are those that it names of `expected`; everything else is zero."""
    for index, field in enumerate(found):
        for layer, piece in field.items():
            wanted = np.zeros_like(piece)
            for frame, source in moved.items():
                wanted[frame] = expected[index][layer][source]
            assert np.array_equal(piece, wanted), f"{name}: field {index} of layer {layer}"


def ids(frames: Sequence[int]) -> np.ndarray:
    return np.array(frames, dtype=np.int32)
