"""Content keys of pages: a SHA-256 chain over length-prefixed fields, equal in every process and on every machine."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from quire.spec.events import Namespace


def namespace_seed(namespace: Namespace, identity: bytes = b"") -> bytes:
    """The first hash of a namespace's chain, 32 bytes. `identity` is a `layout_identity`."""
    return _digest(b"quire-namespace-2", identity, namespace.adapter.encode(), namespace.salt.encode())


def layout_identity(model: bytes, layouts: Sequence[str]) -> bytes:
    """32 bytes for the model and all layouts, on which a page's bytes depend besides tokens and namespace."""
    return _digest(b"quire-layouts-1", model, *[layout.encode() for layout in layouts])


def scope_of(namespace: Namespace, identity: bytes) -> bytes:
    """The prefix of a namespace's records in stores, 16 bytes.

        |-- scope_prefix_of(identity): 8 bytes --|-- the namespace in it: 8 bytes --|

    All records of a model are found without a salt. A scope does not reveal a salt. Page keys do not depend on it.
    """
    inner = _digest(b"quire-scope-1", identity, namespace.adapter.encode(), namespace.salt.encode())
    return scope_prefix_of(identity) + inner[:8]


def scope_prefix_of(identity: bytes) -> bytes:
    """The first 8 bytes of every scope with this model, weights epoch and layouts."""
    return _digest(b"quire-edition-1", identity)[:8]


def chain_pages(parent: bytes, tokens: bytes, page_bytes: int) -> tuple[bytes, ...]:
    """Hashes of the whole pages in `tokens` (raw int32 bytes), each over the previous hash and its own bytes."""
    hashes = []
    begun = hashlib.sha256(b"quire-page-2" + page_bytes.to_bytes(4, "little")).copy  # a copy costs less than a new one
    for at in range(0, len(tokens) - page_bytes + 1, page_bytes):
        digest = begun()
        digest.update(parent)
        digest.update(tokens[at : at + page_bytes])
        parent = digest.digest()
        hashes.append(parent)
    return tuple(hashes)


def _digest(domain: bytes, *parts: bytes) -> bytes:
    """SHA-256 of the number of parts, and of each part after its length. No domain may be a prefix of another."""
    digest = hashlib.sha256(domain + len(parts).to_bytes(8, "little"))
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


@dataclass(slots=True, eq=False)
class _Run:
    """Pages that were cached together: they are hashed together once, even if the tree splits them later."""

    parent: PageHashes | bytes
    tokens: bytes
    page_bytes: int
    digests: tuple[bytes, ...] | None = None


class PageHashes:
    """Hashes of consecutive pages, computed at the first read. `parent`: the previous pages, or a namespace's seed."""

    __slots__ = ("_run", "_start", "_stop")

    def __init__(self, parent: PageHashes | bytes, tokens: bytes, page_bytes: int) -> None:
        self._run = _Run(parent, tokens, page_bytes)
        self._start = 0
        self._stop = len(tokens) // page_bytes

    def __len__(self) -> int:
        return self._stop - self._start

    @property
    def tokens(self) -> bytes:
        """Raw int32 bytes."""
        return self._run.tokens[self._start * self._run.page_bytes : self._stop * self._run.page_bytes]

    @property
    def parent(self) -> bytes:
        """The hash of the page before the first one."""
        return _digests(self._run)[self._start - 1] if self._start else _before(self._run)

    @property
    def digests(self) -> tuple[bytes, ...]:
        """One hash for each page. O(pages not hashed yet, in this run and earlier ones)."""
        return _digests(self._run)[self._start : self._stop]

    @property
    def last(self) -> bytes:
        """The hash of the last page."""
        return _digests(self._run)[self._stop - 1]

    def begins_with(self, tokens: bytes) -> bool:
        """Whether the first pages hold `tokens`, whole pages as raw int32 bytes."""
        size = self._run.page_bytes
        return self._run.tokens.startswith(tokens, self._start * size, self._stop * size)

    def cut(self, at: int) -> tuple[PageHashes, PageHashes]:
        """The first `at` pages and the rest."""
        return self._part(self._start, self._start + at), self._part(self._start + at, self._stop)

    def _part(self, start: int, stop: int) -> PageHashes:
        part = object.__new__(PageHashes)
        part._run, part._start, part._stop = self._run, start, stop
        return part


def cut_hashes(hashes: list[PageHashes], at: int) -> tuple[list[PageHashes], list[PageHashes]]:
    """The first `at` pages of consecutive runs, and the rest."""
    upper: list[PageHashes] = []
    lower: list[PageHashes] = []
    for run in hashes:
        if 0 < at < len(run):
            left, right = run.cut(at)
            upper.append(left)
            lower.append(right)
        else:
            (upper if at > 0 else lower).append(run)
        at -= len(run)
    return upper, lower


def _digests(run: _Run) -> tuple[bytes, ...]:
    """The hashes of a run. Those of earlier runs are computed first, in a loop because a chain may be long."""
    waiting: list[_Run] = []
    missing = run
    while missing.digests is None:
        waiting.append(missing)
        if isinstance(missing.parent, bytes):
            break
        missing = missing.parent._run
    for missing in reversed(waiting):
        missing.digests = chain_pages(_before(missing), missing.tokens, missing.page_bytes)
    assert run.digests is not None
    return run.digests


def _before(run: _Run) -> bytes:
    return run.parent if isinstance(run.parent, bytes) else run.parent.last
