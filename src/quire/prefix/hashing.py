"""Content keys of pages: a SHA-256 chain over length-prefixed fields, the same in every process, on every machine."""

from __future__ import annotations

import hashlib

from quire.spec.events import Namespace


def namespace_seed(namespace: Namespace, identity: bytes = b"") -> bytes:
    """Where a namespace's chain begins. `identity` stands for everything else that a page's bytes depend on: the model
    and the layouts. An adapter named like another's salt gives another seed."""
    digest = hashlib.sha256(b"quire-namespace-1")
    for part in (identity, namespace.adapter.encode(), namespace.salt.encode()):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def chain_pages(parent: bytes, tokens: bytes, page_bytes: int) -> tuple[bytes, ...]:
    """Hashes of the whole pages in `tokens` (raw int32 bytes), each over its parent's hash and its own bytes."""
    hashes = []
    for at in range(0, len(tokens) - page_bytes + 1, page_bytes):
        parent = hashlib.sha256(b"quire-page-1" + parent + tokens[at : at + page_bytes]).digest()
        hashes.append(parent)
    return tuple(hashes)
