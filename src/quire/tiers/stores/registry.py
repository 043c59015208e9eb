"""The storage backend of each URL, imported on demand."""

from __future__ import annotations

import re
from importlib import import_module

from quire.errors import InvalidInput, StoreError
from quire.tiers.store import Store

_BACKENDS = {
    **dict.fromkeys(("valkey", "valkeys", "redis", "rediss", "unix"), "valkey"),
    "s3": "s3",
    "mooncake": "mooncake",
}
"""By scheme, the module that has `open(url, capacity, *, counts_use) -> Store`. The extra of that name installs what it
needs."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_DIRECTORY = "dir:"


def directory_of(url: str) -> str | None:
    """The path, where a URL is a local directory: `dir:PATH` or a path; else None. Raises InvalidInput for a mistyped
    server URL, since a path is shown, with its password."""
    if url.startswith(_DIRECTORY):
        return url.removeprefix(_DIRECTORY).removeprefix("//")
    scheme, mark, _ = url.partition(":")
    if mark and scheme.lower() in _BACKENDS and not _SCHEME.match(url):
        raise InvalidInput(
            f"the URL of a store begins with {scheme}://, and this one with {scheme}:.",
            fix=f"write both slashes, or dir:PATH for a directory whose name begins with {scheme}:.",
        )
    return None if _SCHEME.match(url) else url


def open_store(url: str, *, capacity: int | None = None, counts_use: bool = True) -> Store:
    """Open the store of a URL or a path; the caller closes it.

    With a `capacity` in bytes a missing directory is made; None opens only an existing one, with its own. Servers may
    refuse a capacity. Without `counts_use` reading does not change the order of eviction, where the store decides it.

    Raises StoreError where the store cannot be opened or a package is missing, and InvalidInput for an invalid URL.
    """
    path = directory_of(url)
    if path is not None:
        from quire.tiers.stores.directory import DirectoryStore

        if not path:
            raise InvalidInput("the directory of a store has no name.", fix="write dir:/var/cache/quire.")
        return DirectoryStore(path, capacity, counts_use=counts_use)
    scheme = url.partition(":")[0].lower()
    backend = _BACKENDS.get(scheme)
    if backend is None:
        raise InvalidInput(
            f"there is no store for '{scheme}://'.",
            fix=f"give a directory, or one of {', '.join(f'{name}://' for name in _BACKENDS)}.",
        )
    try:
        store: Store = import_module(f"quire.tiers.stores.{backend}").open(url, capacity, counts_use=counts_use)
    except ImportError as error:
        raise StoreError(
            f"a store at {scheme}:// needs a package that is not installed: {error}.",
            fix=f'pip install "quire[{backend}]".',
        ) from error
    return store
