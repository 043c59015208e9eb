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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.errors import InvalidInput
from quire.settings.setting import parse_bytes

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
    def parse(cls, value: Any) -> Amount:
        """From `"25%"`, `"8GiB"` or a number of bytes; 0 and `"0"` are nothing. Raises InvalidInput."""
        text = str(value).strip()
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise InvalidInput(f"{value!r} is no part of the KV memory.", fix=_HOW)
        if text == "0":
            return cls()
        if not text.endswith("%"):
            return cls(bytes=parse_bytes(value))
        try:
            share = float(text[:-1]) / 100
        except ValueError:
            share = math.nan
        if not 0 <= share <= 1:
            raise InvalidInput(f"'{text}' is no part of the KV memory.", fix=_HOW)
        return cls(share=share)

    def of(self, total: int) -> float:
        """Its share of so many bytes, which may be above 1."""
        return self.share if not self.bytes else self.bytes / max(1, total)

    def __str__(self) -> str:
        return f"{self.bytes}" if self.bytes else f"{100 * self.share:g}%"


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
        floor = Amount.parse(given["floor"]) if "floor" in given else self.floor
        ceiling = self.ceiling
        if "ceiling" in given:
            ceiling = None if given["ceiling"] is None else Amount.parse(given["ceiling"])
        return TenantTerms(name=self.name, keys=self.keys, floor=floor, ceiling=ceiling, weight=float(weight))


def read_tenants(path: Path | None) -> tuple[TenantTerms, ...]:
    """The tenants of a file; the first is `default`. There are none without a file. Raises InvalidInput."""
    if path is None:
        return ()
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInput(f"the tenants in '{path}' cannot be read: {error}.", fix="write a JSON object.") from error
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


def check_tenants(tenants: Sequence[TenantTerms], total: int, least: float) -> None:
    """Raise InvalidInput unless the floors fit together in `total` bytes of KV memory, each within its ceiling, and no
    ceiling is below the `least` share that the smallest request takes."""
    for each in tenants:
        floor, ceiling = each.floor.of(total), each.ceiling.of(total) if each.ceiling is not None else math.inf
        if ceiling * NEARLY < least:
            size = math.ceil(least * total)
            told = f"tenant '{each.name}' has a ceiling of {each.ceiling}, and the smallest request takes {least:.2%}"
            raise InvalidInput(f"{told} of the memory, {size:,} bytes.", fix=f"give it {size} or more.")
        if floor > ceiling:
            need, have = f"a floor of {each.floor}", f"a ceiling of {each.ceiling}"
            raise InvalidInput(f"tenant '{each.name}' has {need} and {have}.", fix="lower the floor.")
    promised = {each.name: each.floor.of(total) for each in tenants if each.floor.of(total)}
    if sum(promised.values()) > 1 + 1e-9:
        told = ", ".join(f"'{name}' {share:.1%}" for name, share in promised.items())
        sizes = sum(each.floor.bytes for each in tenants)
        rest = 1 - sum(each.floor.share for each in tenants if not each.floor.bytes)
        more = f", or have room for {math.ceil(sizes / rest):,} bytes of frames" if sizes and rest > 1e-6 else ""
        raise InvalidInput(
            f"the floors need {sum(promised.values()):.1%} of the KV memory of {total:,} bytes: {told}.",
            fix=f"lower them to 100 % together{more}.",
        )
