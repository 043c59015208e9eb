"""Keys of fixed inputs, printed: run in processes of their own, they must be the same."""

from __future__ import annotations

import json

import numpy as np

from quire.prefix.hashing import PageHashes, chain_pages, layout_identity, namespace_seed, scope_of, scope_prefix_of
from quire.spec.events import Namespace

IDENTITY = bytes(range(32))
NAMESPACES = {
    "no tenant": Namespace(),
    "salt": Namespace(salt="tenant-1"),
    "adapter": Namespace(adapter="tenant-1"),
    "both": Namespace(adapter="söl", salt="塩"),
}


def tokens(*ids: int) -> bytes:
    """Raw int32 bytes, little endian."""
    return np.array(ids, dtype="<i4").tobytes()


def vectors() -> dict[str, list[str]]:
    """Every kind of key, in hex."""
    prompt = tokens(*range(100, 148))
    seed = namespace_seed(NAMESPACES["salt"], IDENTITY)
    found = {
        "seeds": [namespace_seed(namespace, IDENTITY) for namespace in NAMESPACES.values()],
        "scopes": [scope_of(namespace, IDENTITY) for namespace in NAMESPACES.values()],
        "scope prefix": [scope_prefix_of(IDENTITY)],
        "layouts": [layout_identity(IDENTITY, ["ab" * 32]), layout_identity(IDENTITY, ["ab" * 32, "cd" * 32])],
        "page of 1": list(chain_pages(seed, tokens(7), 4)),
        "pages of 1": list(chain_pages(seed, tokens(7, 0, 2**31 - 1), 4)),
        "pages of 16": list(chain_pages(seed, prompt, 64)),
        "cut run": list(PageHashes(seed, prompt, 64).cut(1)[1].digests),
    }
    return {name: [key.hex() for key in keys] for name, keys in found.items()}


if __name__ == "__main__":
    print(json.dumps(vectors()))
