"""Which URL means which storage backend. None is imported before its URL is met."""

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
"""By scheme, the module here that has `open(url, capacity, *, counts_use) -> Store`. The package's extra of that name
installs what it needs."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_DIRECTORY = "dir:"


def directory_of(url: str) -> str | None:
    """The path, where a URL means a local directory: `dir:PATH` or a path; else None. Raises InvalidInput for what was
    meant to be a server's, whose password would else be shown as part of a path."""
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
    """Open the store that a URL or a path names; the caller closes it.

    `capacity` is in bytes. A directory that does not exist is made where it is given; None opens only what is there,
    as it is. Servers take it as a hint, or have their own. Without `counts_use` reading leaves the order in which
    records are forgotten as it is, where the store has a say in it.

    Raises StoreError where it cannot be opened, or needs a package that is not installed, and InvalidInput for a URL
    that means nothing.
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
