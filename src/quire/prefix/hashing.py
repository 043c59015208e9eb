"""Content keys of pages: a SHA-256 chain over length-prefixed fields, the same in every process, on every machine."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from quire.spec.events import Namespace


def namespace_seed(namespace: Namespace, identity: bytes = b"") -> bytes:
    """Where a namespace's chain begins. `identity` stands for everything else that a page's bytes depend on: the model
    and the layouts. An adapter named like another's salt gives another seed."""
    digest = hashlib.sha256(b"quire-namespace-1")
    for part in (identity, namespace.adapter.encode(), namespace.salt.encode()):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def layout_identity(model: bytes, layouts: Sequence[str]) -> bytes:
    """What a page's bytes depend on besides its tokens and namespace: the model, and every group's layout."""
    return hashlib.sha256(len(model).to_bytes(8, "little") + model + "".join(layouts).encode()).digest()


def chain_pages(parent: bytes, tokens: bytes, page_bytes: int) -> tuple[bytes, ...]:
    """Hashes of the whole pages in `tokens` (raw int32 bytes), each over its parent's hash and its own bytes."""
    hashes = []
    for at in range(0, len(tokens) - page_bytes + 1, page_bytes):
        parent = hashlib.sha256(b"quire-page-1" + parent + tokens[at : at + page_bytes]).digest()
        hashes.append(parent)
    return tuple(hashes)


class _Run:
    """Pages that were cached together: hashed together, once, however often the tree cuts them."""

    __slots__ = ("digests", "page_bytes", "parent", "tokens")

    def __init__(self, parent: PageHashes | bytes, tokens: bytes, page_bytes: int) -> None:
        self.parent = parent
        self.tokens = tokens
        self.page_bytes = page_bytes
        self.digests: tuple[bytes, ...] | None = None


class PageHashes:
    """The hashes of consecutive pages, computed when somebody first reads them.

    It stays what it is when the tree cuts or forgets the pages. `parent` are the pages before them, or a namespace's
    seed; `tokens` are raw int32 bytes.
    """

    __slots__ = ("_run", "_start", "_stop")

    def __init__(self, parent: PageHashes | bytes, tokens: bytes, page_bytes: int) -> None:
        self._run = _Run(parent, tokens, page_bytes)
        self._start = 0
        self._stop = len(tokens) // page_bytes

    def __len__(self) -> int:
        return self._stop - self._start

    @property
    def tokens(self) -> bytes:
        """The tokens of these pages, raw int32 bytes."""
        return self._run.tokens[self._start * self._run.page_bytes : self._stop * self._run.page_bytes]

    @property
    def parent(self) -> bytes:
        """The hash of the page before the first one."""
        if self._start:
            return _digests(self._run)[self._start - 1]
        return _before(self._run)

    @property
    def digests(self) -> tuple[bytes, ...]:
        """One hash for each page. O(pages not hashed yet, of these and of those before them)."""
        return _digests(self._run)[self._start : self._stop]

    @property
    def last(self) -> bytes:
        """The hash of the last page."""
        return _digests(self._run)[self._stop - 1]

    def cut(self, at: int) -> tuple[PageHashes, PageHashes]:
        """The first `at` pages and the rest."""
        return self._part(self._start, self._start + at), self._part(self._start + at, self._stop)

    def _part(self, start: int, stop: int) -> PageHashes:
        part = object.__new__(PageHashes)
        part._run, part._start, part._stop = self._run, start, stop
        return part


def _digests(run: _Run) -> tuple[bytes, ...]:
    """The hashes of a run, after those of the runs before it: a loop, since a chain may be long."""
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
