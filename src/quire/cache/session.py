"""Session: one conversation's turns, the row that it holds between them, and what callers are told of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from quire.cache.request_kv import RequestKV
from quire.counters import counter, gauge
from quire.prefix.node import User
from quire.spec.events import Namespace
from quire.spec.ids import Ids

LONGEST_SESSION_ID = 256
"""Characters."""

SESSION_SHARE = 0.25
"""The default budget of all sessions, as a share of the plan's pages."""

SESSION_TTL_S = 300.0
"""The default time for which a session is kept after its last turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """All rows hold at most `share` of the plan's pages, each counted once. A session is kept `ttl_s` seconds."""

    share: float = SESSION_SHARE
    ttl_s: float = SESSION_TTL_S


class Start(StrEnum):
    """How a turn began."""

    NEW = "new"
    """The session had no turn before, or has expired."""
    CONTINUED = "continued"
    """After all tokens that the session held."""
    TRIMMED = "trimmed"
    """After a part of them: the prompt differs in the last, partly filled page."""
    EDITED = "edited"
    """On the cached prefix: the prompt differs earlier, or whole pages reach as far."""
    BRANCHED = "branched"
    """On the cached prefix, while another turn of the session ran."""
    LOST = "lost"
    """On the cached prefix: the session held nothing any more."""
    NONE = "none"
    """The turn ended before it ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionGrant:
    """What a turn that has ended leaves. `held_tokens` are held for `expires_in_seconds`, unless room is short; if they
    are none, `reason` says why. The turn itself began after `resumed_tokens` that the session had held, and `start`
    says how. `saved_tokens` are those of the prompts of all its turns so far that were not computed."""

    session_id: str
    start: Start
    resumed_tokens: int = 0
    saved_tokens: int = 0
    held_tokens: int = 0
    expires_in_seconds: float = 0.0
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionState:
    """One session. Of the `prompt_tokens` of its turns, `saved_tokens` were not computed. Of these, `resumed_tokens`
    were in rows that it held, and `partial_tokens` were in no whole page that was cached."""

    session_id: str
    turns: int
    running_turns: int
    prompt_tokens: int
    saved_tokens: int
    resumed_tokens: int
    partial_tokens: int
    held_tokens: int
    expires_in_seconds: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionList:
    """Sessions, the one used last comes first. `budget_tokens` and `held_tokens` are those of all namespaces."""

    budget_tokens: int
    held_tokens: int
    sessions: tuple[SessionState, ...]


@dataclass(kw_only=True)
class SessionCounters:
    """Counters of all sessions, and gauges. `sessions_held` have a row."""

    sessions: int = gauge("Sessions that are known.")
    sessions_held: int = gauge("Sessions that hold a row between two turns.")
    session_held_tokens: int = gauge("Tokens of these rows.")
    session_held_pages: int = gauge("Pages of these rows, each counted once.")
    session_resumed_tokens: int = counter("Prompt tokens that were in rows of sessions, and were not computed.")
    session_partial_tokens: int = counter("Of these, tokens in no cached whole page.")
    sessions_continued: int = counter("Turns that went on in the row that their session held.")
    sessions_expired: int = counter("Sessions whose time was over.")
    sessions_given_up: int = counter("Rows of sessions that ended because room was needed.")


@dataclass(slots=True, eq=False)
class HeldRow:
    """The row of an ended turn with its `tokens`, int32, all computed when the steps before `fence` have settled."""

    kv: RequestKV
    tokens: Ids
    serial: int  # its row's, for the next turn
    fence: int
    arrival: int  # its turn's


class SessionKey(NamedTuple):
    """An owner's own name of a session in a namespace."""

    namespace: Namespace
    session_id: str
    owner: str = ""


@dataclass(slots=True, eq=False, kw_only=True)
class Session:
    """One session."""

    key: SessionKey
    turns: int = 0
    running_turns: int = 0
    prompt_tokens: int = 0
    saved_tokens: int = 0
    resumed_tokens: int = 0
    partial_tokens: int = 0
    expires_at: float = math.inf  # while a turn runs
    row: HeldRow | None = None
    lost: str = ""  # why it holds no row, if a turn has ended
    num_flushes: int = 0
    closed: bool = False
    user: User = field(default_factory=User)  # the user of what its turns leave in the tree

    def is_idle_of(self, owner: str) -> bool:
        """Whether it is this owner's, and no turn of it runs."""
        return self.key.owner == owner and not self.running_turns


@dataclass(slots=True, eq=False)
class Turn:
    """A request of a session. `arrival` is its number in the order of arrival. With a `refusal` its row is not held."""

    session: Session
    arrival: int
    start: Start = Start.NONE
    resumed_tokens: int = 0
    num_flushes: int = 0  # flushes of its namespace when it began
    refusal: str = ""
    is_last: bool = False  # the session closes when it ends
