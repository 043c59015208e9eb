"""Keys: which client sent a request, and what it may do.

    no key at all        each client is the operator
    one key              its clients are the operator's own, unless there is an admin key
    keys with names      each is a tenant: its cached pages are its own, and it sees nothing of others
    an admin key         the only one that sees and changes the cache as a whole

A tenant's salt begins with its name, so that two of them never share a page, whatever salt they send.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from quire.errors import InvalidInput, NotAllowed, QuireError, RefusedCombination, WrongKey
from quire.settings.tenants import TenantTerms

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")

OWN_KEY = "default"
"""The name of `--api-key` beside keys with names."""

_OF_EVERY_CLIENT = frozenset({"/v1/cache/retain", "/v1/cache/release", "/v1/cache/flush"})
"""Routes below /v1/cache that tenants may use, for what is their own, beside explanations. All others there are the
operator's."""

_EXPLAIN = "/v1/cache/explain/"

TENANTS = "/v1/tenants"
"""The route that tells and changes what tenants may hold."""

LIVE = "/v1/cache/live"
"""The events of the page (`quire.serve.live`): no request of an engine, however long it is open."""

_OUTSIDE = frozenset((
    "/detokenize", "/generate", "/get_model_info", "/model_info", "/tokenize", "/tokenizer_info",
))  # fmt: skip
"""Routes outside of /v1 that need a key."""

_OF_OPERATORS = frozenset((
    "/flush_cache", "/get_server_info", "/pause", "/reset_prefix_cache", "/resume", "/server_info", "/sleep",
    "/start_profile", "/stop_profile", "/wake_up",
))  # fmt: skip
"""Routes outside of /v1 that are the operator's."""

_OF_COUNTS = frozenset({"/metrics", "/load"})
"""Routes whose answers tell what tenants do; open where keys have no names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """The sender of a request. `name` is that of its key, "" if keys have no names. A `tenant` has namespaces of its
    own. What it makes has it as `owner`, and it sees what has the owner that it `sees`, or all."""

    name: str = ""
    is_tenant: bool = False
    is_admin: bool = False

    @property
    def owner(self) -> str:
        """No name of a key is that of the operator."""
        return "(operator)" if self.is_admin else self.name

    @property
    def sees(self) -> str | None:
        """None: all."""
        return None if self.is_admin else self.owner

    def salt(self, given: str) -> str:
        """The salt of its namespace; no other tenant has one that is equal."""
        return f"{self.name}/{given}" if self.is_tenant else given


def readable(key: str) -> str:
    """`key`. Raises InvalidInput unless a client could send it."""
    if not key.strip() or not key.isprintable():
        raise InvalidInput("the API key is empty or not printable.", fix="give a key, or leave --api-key out.")
    if key != key.strip():
        raise InvalidInput("the API key begins or ends with a space, which HTTP drops.", fix="leave the space out.")
    return key


def read_keys(path: Path) -> dict[str, str]:
    """The keys of a file by name: a line of `name key` for each; those that begin with # are comments. Raises
    InvalidInput, without a key in its message."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"the API keys in '{path}' cannot be read: {error}.") from error
    if path.stat().st_mode & 0o007:
        raise InvalidInput(f"other users can read the API keys in '{path}'.", fix=f"chmod o= {path}")
    keys: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        name, _, key = line.strip().partition(" ")
        if not name or name.startswith("#"):
            continue
        if not _NAME.fullmatch(name) or name in keys or key.strip() in keys.values():
            raise InvalidInput(
                f"line {number} of '{path}' has a name or key that cannot be used, or occurs twice.",
                fix="write 'name key', the name of letters, digits, '.', '_' and '-'.",
            )
        keys[name] = readable(key.strip())
    if not keys:
        raise InvalidInput(f"'{path}' has no API key.", fix="write a line of 'name key' for each client.")
    return keys


class Keys:
    """The keys of a server. All are compared, each in constant time."""

    def __init__(
        self,
        api_key: str | None = None,
        *,
        named: Mapping[str, str] | None = None,
        admin_key: str | None = None,
        share_cache: bool = False,
    ) -> None:
        """With `share_cache`, keys with names have one namespace: their prompts share pages."""
        self._clients: list[tuple[bytes, Client]] = []
        self.have_names = bool(named)
        self.has_admin = admin_key is not None
        if api_key is not None:
            name = OWN_KEY if named else ""
            is_tenant = bool(named) and not share_cache
            self._add(api_key, Client(name=name, is_tenant=is_tenant, is_admin=not (named or admin_key)))
        for name, key in (named or {}).items():
            self._add(key, Client(name=name, is_tenant=not share_cache))
        if admin_key is not None:
            self._add(admin_key, Client(is_admin=True))

    @property
    def tenants(self) -> frozenset[str]:
        """The names with which salts begin."""
        return frozenset(client.name for _, client in self._clients if client.is_tenant)

    def check_tenants(self, terms: Sequence[TenantTerms]) -> None:
        """Raise InvalidInput unless each key that a tenant has is the name of one that has cached pages of its own."""
        if terms and not self.tenants:
            raise RefusedCombination(
                "--tenants needs keys with names, whose cached pages are their own.",
                fix="add --api-keys FILE, and leave --share-cache out.",
            )
        unknown = [(each.name, key) for each in terms for key in each.keys if key not in self.tenants]
        if unknown:
            name, key = unknown[0]
            known = ", ".join(sorted(self.tenants))
            raise InvalidInput(f"tenant '{name}' has a key '{key}' that is not known.", fix=f"use some of {known}.")

    def _add(self, key: str, client: Client) -> None:
        self._clients.append((sha256(f"Bearer {key}".encode()).digest(), client))

    def refusal(self, path: str, authorization: bytes) -> tuple[Client, QuireError | None]:
        """The client, and why it may not use the route, if so."""
        if not self._clients:
            return Client(is_admin=True), None
        client = self._client(authorization)
        if path in _OF_OPERATORS or (path in _OF_COUNTS and (self.have_names or self.has_admin)):
            needs_admin = True
        elif path.startswith("/v1/") or path in _OUTSIDE:
            is_own = path in _OF_EVERY_CLIENT or path.startswith(_EXPLAIN)
            needs_admin = path == TENANTS or (path.startswith("/v1/cache/") and not is_own)
        else:
            return client or Client(), None
        if client is None:
            return Client(), WrongKey(
                "the API key is missing or wrong.", fix="send 'Authorization: Bearer <key>', or 'X-Api-Key: <key>'."
            )
        if needs_admin and not client.is_admin:
            return client, not_allowed(path)
        return client, None

    def _client(self, authorization: bytes) -> Client | None:
        given = sha256(authorization).digest()
        found = None
        for expected, client in self._clients:
            if hmac.compare_digest(given, expected):
                found = client
        return found


def not_allowed(what: str) -> NotAllowed:
    """The error for `what`, which is the operator's alone."""
    return NotAllowed(f"{what} needs the admin key.", fix="ask the operator, who starts the server with --admin-key.")
