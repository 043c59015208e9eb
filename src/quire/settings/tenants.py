"""Tenants: whose requests are whose, what memory each is promised, and what it may hold.

A file names them:

    {"quiet": {"keys": ["alice", "bob"], "floor": "25%"},
     "noisy": {"keys": ["crawler"], "ceiling": "6GiB", "weight": 0.5}}

`keys` are names of API keys, by default the tenant's own. Requests with other keys are those of `default`, which may be
named too, without keys. Nothing here loads numpy or torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.errors import InvalidInput
from quire.settings.setting import exact_bytes, format_bytes, parse_bytes

DEFAULT_TENANT = "default"
MOST_TENANTS = 1024
NEARLY = 1 + 1e-12  # times a share: the float of a whole number may be a little below it
_TERMS = ("floor", "ceiling", "weight")
_HOW = 'write a share or a size: "25%" or "8GiB".'


@dataclass(frozen=True, slots=True)
class Amount:
    """A part of the KV memory: a `share` of it, from 0 to 1, or a number of `bytes`."""

    share: float = 0.0
    bytes: int = 0

    @classmethod
    def parse(cls, value: Any, what: str) -> Amount:
        """From `"25%"`, `"8GiB"` or a number of bytes; 0 and `"0"` are nothing. Raises InvalidInput, about `what`."""
        text = str(value).strip()
        with suppress(ValueError):  # InvalidInput is one
            if text == "0":
                return cls()
            if not text.endswith("%"):
                return cls(bytes=parse_bytes(value))
            if 0 <= (share := float(text[:-1]) / 100) <= 1:
                return cls(share=share)
        raise InvalidInput(f"{what} is {value!r}, which is no part of the KV memory.", fix=_HOW)

    def of(self, total: int) -> float:
        """Its share of so many bytes, which may be above 1."""
        return self.share if not self.bytes else self.bytes / max(1, total)

    def __str__(self) -> str:
        return exact_bytes(self.bytes) if self.bytes else f"{100 * self.share:g}%"

    def told(self, total: int) -> str:
        """As it was written, and what that is of so many bytes."""
        return f"{self} ({self.of(total):.1%})" if self.bytes else f"{self} ({format_bytes(int(self.share * total))})"


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantTerms:
    """A tenant. Its `floor` of the KV memory no other tenant takes from it. It holds no more than its `ceiling`, None:
    all. `weight` is its part of admissions where requests of several tenants wait."""

    name: str
    keys: tuple[str, ...] = ()
    floor: Amount = Amount()
    ceiling: Amount | None = None
    weight: float = 1.0

    def changed(self, given: Mapping[str, Any]) -> TenantTerms:
        """These terms with others of `floor`, `ceiling` (None: none) and `weight`. Raises InvalidInput."""
        if unknown := [name for name in given if name not in _TERMS]:
            raise InvalidInput(f"a tenant has no '{unknown[0]}'.", fix=f"use {', '.join(_TERMS)}.")
        weight = given.get("weight", self.weight)
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
            raise InvalidInput(f"tenant '{self.name}' has the weight {weight!r}.", fix="give a number above 0.")
        whose = f"of tenant '{self.name}'"
        floor = Amount.parse(given["floor"], f"the floor {whose}") if "floor" in given else self.floor
        ceiling = self.ceiling
        if "ceiling" in given:
            ceiling = None if given["ceiling"] is None else Amount.parse(given["ceiling"], f"the ceiling {whose}")
        return TenantTerms(name=self.name, keys=self.keys, floor=floor, ceiling=ceiling, weight=float(weight))


def read_tenants(path: Path | None) -> tuple[TenantTerms, ...]:
    """The tenants of a file; the first is `default`. There are none without a file. Raises InvalidInput."""
    if path is None:
        return ()
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        fix = f"write a JSON object to '{path}', or name another file."
        raise InvalidInput(f"the tenants in '{path}' cannot be read: {error}.", fix=fix) from error
    return tenants_of(found)


def tenants_of(found: Any) -> tuple[TenantTerms, ...]:
    """As `read_tenants`, from what the file has."""
    if not isinstance(found, dict) or not all(isinstance(terms, dict) for terms in found.values()):
        fix = '{"quiet": {"floor": "25%"}} is an example.'
        raise InvalidInput("tenants are an object: a name, and its terms.", fix=fix)
    if len(found) > MOST_TENANTS:
        raise InvalidInput(f"there are {len(found)} tenants, and {MOST_TENANTS} at most.", fix="group keys.")
    tenants, owners = {DEFAULT_TENANT: TenantTerms(name=DEFAULT_TENANT)}, dict[str, str]()
    for name, terms in found.items():
        keys = terms.get("keys", [] if name == DEFAULT_TENANT else [name])
        if not isinstance(keys, list) or not all(isinstance(key, str) and key for key in keys):
            raise InvalidInput(f"the keys of tenant '{name}' are no list of names.", fix='write "keys": ["alice"].')
        for key in keys:
            if owners.setdefault(key, name) != name:
                raise InvalidInput(f"the key '{key}' has two tenants, '{owners[key]}' and '{name}'.", fix="name one.")
        given = {term: value for term, value in terms.items() if term != "keys"}
        tenants[name] = TenantTerms(name=name, keys=tuple(keys)).changed(given)
    return tuple(tenants.values())


def check_tenants(tenants: Sequence[TenantTerms], total: int, least: float, padding: int) -> None:
    """Raise InvalidInput unless the floors fit together in `total` bytes of frames, beside which the KV memory has
    `padding`, each within its ceiling, and no ceiling is below the `least` share that the smallest request takes."""
    for each in tenants:
        floor, ceiling = each.floor, each.ceiling or Amount(share=math.inf)
        if ceiling.of(total) * NEARLY < least:
            size = math.ceil(least * total)
            told = f"tenant '{each.name}' has a ceiling of {ceiling}, and the smallest request takes {least:.2%}"
            told += f" of the memory, {format_bytes(size)}."
            raise InvalidInput(told, fix=f"give it {exact_bytes(size)} or more.")
        if floor.of(total) > ceiling.of(total):
            told = f"tenant '{each.name}' has a floor of {floor.told(total)} and a ceiling of {ceiling.told(total)}."
            raise InvalidInput(told, fix="lower the floor, or raise the ceiling.")
    promised = [each for each in tenants if each.floor.of(total)]
    if (share := sum(each.floor.of(total) for each in promised)) > 1 + 1e-9:
        told = ", ".join(f"'{each.name}' {each.floor.told(total)}" for each in promised)
        sizes = sum(each.floor.bytes for each in tenants)
        rest = 1 - sum(each.floor.share for each in tenants if not each.floor.bytes)
        more = ""
        if sizes and rest > 1e-6:
            need = math.ceil(sizes / rest) + 2 * padding  # their frames, and up to a page that is none
            more = f", or have {-(-need // 2**20)}MiB or more of KV memory (--kv-memory, or --resize while it serves)"
        have = f"{format_bytes(total)} of frames in {format_bytes(total + padding)} of KV memory"
        raise InvalidInput(
            f"the floors need {share:.1%} of the {have}: {told}.", fix=f"lower them to 100 % together{more}."
        )
