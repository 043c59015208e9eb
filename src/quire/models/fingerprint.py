"""A fingerprint of loaded weights, and of all that a page's bytes depend on besides tokens, namespace and layout.

Each tensor is hashed by xxh3_128, which is as fast as reading memory. Names, dtypes, shapes and these digests, each
with its length before it, are hashed by one SHA-256. The result is the same in every process, on every machine and
device, and for any division of the weights into files. It distinguishes weights and does not authenticate them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import torch
import xxhash
from torch import Tensor

CHUNK_BYTES = 64 * 2**20
"""Bytes that are read, and copied from a device, at once. The fingerprint does not depend on it."""


def fingerprint_weights(
    tensors: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype] | None = None, *, chunk_bytes: int = CHUNK_BYTES
) -> bytes:
    """32 bytes that change with any name, dtype, shape or byte of these tensors, and with nothing else.

    `dtypes` are the dtypes in which tensors are hashed, for weights that are held wider than they were loaded. Tensors
    of other devices than the CPU are copied to it, `chunk_bytes` at a time. O(bytes); tensors that share memory are
    read once.
    """
    digest = hashlib.sha256(b"quire-weights-1" + len(tensors).to_bytes(8, "little"))
    known: dict[tuple[object, ...], bytes] = {}
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        dtype = (dtypes or {}).get(name, tensor.dtype)
        place = tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), dtype
        if place not in known:
            known[place] = _digest(tensor, dtype, chunk_bytes)
        shape = b"".join(size.to_bytes(8, "little") for size in tensor.shape)
        for part in (name.encode(), str(dtype).encode(), shape, known[place]):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def identity_of(described: bytes, weights: bytes, weights_epoch: int) -> bytes:
    """32 bytes for a model: its description, the fingerprint of its weights (b"" if no stored page outlives the
    process), and the number of times that its weights were replaced since."""
    digest = hashlib.sha256(b"quire-model-1")
    for part in (described, weights, weights_epoch.to_bytes(8, "little")):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def _digest(tensor: Tensor, dtype: torch.dtype, chunk_bytes: int) -> bytes:
    """xxh3_128 of a tensor's elements in their order, read as `dtype`."""
    found = xxhash.xxh3_128()
    for chunk in _chunks(tensor, max(1, chunk_bytes // max(1, tensor.element_size()))):
        found.update(chunk.to(dtype).cpu().view(torch.uint8).numpy().data)
    return found.digest()


def _chunks(tensor: Tensor, most: int) -> Iterator[Tensor]:
    """The elements in order, in flat contiguous chunks of about `most`; copies only tensors that are not contiguous."""
    if tensor.is_contiguous():
        flat = tensor.reshape(-1)
        yield from (flat[at : at + most] for at in range(0, len(flat), most))
        return
    rows = max(1, most // max(1, tensor[0].numel()))
    yield from (tensor[at : at + rows].reshape(-1).contiguous() for at in range(0, len(tensor), rows))
