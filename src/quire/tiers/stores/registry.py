"""Stores by URL: the options of a URL, and its backend, which is imported on demand."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from quire.errors import InvalidInput, QuireError, StoreError
from quire.settings.setting import without_secrets
from quire.tiers.store import Store

Opener = Callable[..., Store]
"""`open(url, capacity, *, counts_use)` of a backend, as in `open_store`."""

_BACKENDS: dict[str, str | Opener] = {
    **dict.fromkeys(("valkey", "valkeys", "redis", "rediss", "unix"), "valkey"),
    "s3": "s3",
    "mooncake": "mooncake",
}
"""The function that opens each scheme, or the module with such an `open`, which the extra of that name enables."""

_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(//)?")


def directory_of(url: str) -> str | None:
    """The path, if a URL is a local directory: a path, `dir:PATH` or a `file:` URL; else None. Raises InvalidInput for
    an empty path, a `file:` URL of another host, and a server's URL without slashes, whose password would show."""
    found = _SCHEME.match(url)
    scheme, rest = (found[1].lower(), url[found.end() :]) if found is not None else ("", url)
    has_slashes = found is not None and found[2] is not None
    path = url
    if scheme == "file":
        host = rest.partition("/")[0] if has_slashes else ""
        if host not in ("", "localhost"):
            shown = without_secrets(url)
            host = shown.partition("://")[2].partition("/")[0]
            raise InvalidInput(
                f"'{shown}' names a directory of the host '{host}'.", fix="write file:///var/cache/quire."
            )
        path = unquote(rest.removeprefix(host))
    elif url.startswith("dir:"):
        path = rest
    elif has_slashes:
        return None
    elif scheme in _BACKENDS:
        raise InvalidInput(
            f"the URL of a store begins with {scheme}://, and this one with {scheme}:.",
            fix=f"write both slashes, or dir:PATH for a directory whose name begins with {scheme}:.",
        )
    if not path:
        raise InvalidInput("the directory of a store has no name.", fix="write dir:/var/cache/quire.")
    return path


def register_store(scheme: str, opener: Opener) -> None:
    """Register `opener(url, capacity, *, counts_use)` for `storage="SCHEME://..."`, in this process.

    The process of a server imports the main program again: call this at its top level. Wrong or used: InvalidInput."""
    if not _SCHEME.fullmatch(f"{scheme}://") or _BACKENDS.setdefault(scheme.lower(), opener) is not opener:
        raise InvalidInput(f"'{scheme}' cannot be the scheme of a store.", fix="give another one, such as mystore.")


def open_store(url: str, *, capacity: int | None = None, counts_use: bool = True, direct: bool | None = None) -> Store:
    """Open the store of a URL or a path; the caller closes it. Raises StoreError and, for an invalid URL, InvalidInput.

    With a `capacity` in bytes a missing directory is created; None opens only an existing one, with its own. Servers
    may refuse a capacity. Without `counts_use`, reading does not change the order of eviction, if the store decides it.
    `direct` is that of a `DirectoryStore`.
    """
    path = directory_of(url)
    if path is not None:
        from quire.tiers.stores.directory import DirectoryStore

        with _understood(url):
            return DirectoryStore(Path(path).expanduser(), capacity, counts_use=counts_use, direct=direct)
    scheme = url.partition(":")[0].lower()
    backend = _BACKENDS.get(scheme)
    if backend is None:
        raise InvalidInput(
            f"there is no store for '{scheme}://'.",
            fix=f"give a directory, or one of {', '.join(f'{name}://' for name in _BACKENDS)}.",
        )
    if not isinstance(backend, str):
        return backend(url, capacity, counts_use=counts_use)
    try:
        with _understood(url):
            store: Store = import_module(f"quire.tiers.stores.{backend}").open(url, capacity, counts_use=counts_use)
    except ImportError as error:
        raise StoreError(
            f"a store at {scheme}:// needs a package that is not installed: {error}.",
            fix=f"in the checkout of Quire: pip install '.[{backend}]'.",
        ) from error
    return store


@contextmanager
def _understood(url: str) -> Iterator[None]:
    """What libraries say of a path or an option that cannot be, as InvalidInput."""
    try:
        yield
    except QuireError:
        raise
    except (ValueError, TypeError, OverflowError, RuntimeError, OSError) as error:
        why = str(error).replace(url, without_secrets(url)).rstrip(".")
        raise InvalidInput(
            f"the store {without_secrets(url)} cannot be opened: {why}.", fix="correct its path or its options."
        ) from None  # the cause may quote a password


def not_understood(where: str) -> InvalidInput:
    """A URL that cannot be parsed."""
    return InvalidInput(
        f"{where} cannot be understood.",
        fix="write scheme://user:password@host:port, with %40 for @, %2F for /, %3F for ? and %23 for # in a password.",
    )


class Options:
    """A parsed URL: `parts` by urllib, and options by name; a name not `known`, also as a prefix, is InvalidInput."""

    def __init__(self, url: str, known: Collection[str]) -> None:
        self.where = without_secrets(url)
        try:
            self.parts: SplitResult = urlsplit(url)
            self.parts.port  # noqa: B018 - reading it parses it
            if "@" in self.parts.query + self.parts.fragment:
                raise ValueError
        except ValueError:
            raise not_understood(self.where) from None  # the cause may quote a password
        self._given = dict(parse_qsl(self.parts.query, keep_blank_values=True))
        for name in self._given:
            if name not in known and not any(name.startswith(start[:-1]) for start in known if start.endswith("*")):
                raise InvalidInput(
                    f"a {self.parts.scheme} URL has no option {name!r}.", fix=f"use one of {', '.join(known)}."
                )

    def number(self, name: str, default: float) -> float:
        """A number above 0, and at most a million."""
        text = self.text(name)
        if not text:
            return default
        if not re.fullmatch(r"\d+(\.\d*)?|\.\d+", text) or not 0 < float(text) <= 1e6:
            raise InvalidInput(f"option {name!r} of {self.where} is a number above 0, at most 1,000,000, not {text!r}.")
        return float(text)

    def size(self, name: str, default: int) -> int:
        """Bytes, as in 512MiB; 0 is valid."""
        text = self.text(name)
        if not text:
            return default
        parts = re.fullmatch(r"(\d+) ?([A-Za-z]*)", text)
        if parts is None or parts[2] not in _UNITS:
            raise InvalidInput(f"option {name!r} of {self.where} is a size like 512MiB, not {text!r}.")
        return int(parts[1]) * _UNITS[parts[2]]

    def text(self, name: str, default: str = "") -> str:
        """Any text."""
        return self._given.pop(name, default)

    def rest(self) -> dict[str, str]:
        """The options that were not read yet."""
        return dict(self._given)
