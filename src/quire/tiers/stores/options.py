"""Options: the query of a store's URL."""

from __future__ import annotations

import re
from collections.abc import Collection
from urllib.parse import SplitResult, parse_qsl, urlsplit

from quire.errors import InvalidInput

_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def without_secrets(url: str) -> str:
    """A store's URL without user, password and options; a directory as it is. Everything before the last @ is removed,
    since a password may be quoted wrongly."""
    scheme, mark, rest = url.partition("://")
    return f"{scheme}://{re.split('[?#]', rest.rpartition('@')[2])[0]}" if mark else url


def not_understood(where: str) -> InvalidInput:
    """A URL that cannot be taken apart."""
    return InvalidInput(
        f"{where} cannot be understood.",
        fix="write scheme://user:password@host:port, with %40 for @, %2F for /, %3F for ? and %23 for # in a password.",
    )


class Options:
    """A parsed URL: `parts` by urllib, and options by name. `known` are the valid names, or prefixes with a `*` at the
    end. Raises InvalidInput for any other."""

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
        """A number above 0."""
        text = self.text(name)
        if not text:
            return default
        if not re.fullmatch(r"\d+(\.\d*)?|\.\d+", text) or float(text) <= 0:
            raise InvalidInput(f"option {name!r} of {self.where} is a number above 0, not {text!r}.")
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
