"""Explanation: a cause for each token of a prompt, and so why no more of it was reused. Plain data, for people too."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from quire.errors import UnknownRequest

_NUMBERS = re.compile(r"(-\d+)*")  # behind the id of a request, those of a sequence


class Cause(StrEnum):
    """The cause of a run of a prompt's tokens. Every token has exactly one cause."""

    HIT = "hit"
    """Reused."""
    LAST_TOKEN = "last_token"
    """Cached, and computed again: a prompt's last token always is, with the page it is in."""
    LOGPROBS = "logprobs"
    """Cached, and computed again: the request asks for log-probabilities of its prompt, which pages do not have."""
    ROOM = "room"
    """Cached, and computed again: in an arena it would take bytes that its request needs, which runs alone."""
    SLOWER = "slower"
    """Cached on a lower tier, and computed again because that is faster than loading."""
    GROUP = "group"
    """Cached, but a group of layers has lost the frames that it needs to resume there."""
    PEER = "peer"
    """Asked of a prefill engine, which did not bring it: computed here."""
    EVICTED = "evicted"
    """Was cached and then evicted."""
    NAMESPACE = "namespace"
    """Cached for another adapter or salt only."""
    PAGE = "page"
    """Less than a page: the same tokens as at the start of a page that is or was cached."""
    NEW = "new"
    """Never seen after this prefix, as far as evicted edges show."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Tokens `start .. start + tokens - 1` of a prompt and their cause. `by` and `seconds_ago` describe an eviction;
    of tokens that a peer was asked for, `by` is the peer. `tier` is where reused ones were: device, host, storage or
    peer. `kind` is what the eviction policy takes a prefix for that was used before: by `chance` such a one is used
    again, and half of these uses come within `expected_s` seconds from now."""

    cause: Cause
    start: int
    tokens: int
    detail: str = ""
    by: str = ""
    seconds_ago: float | None = None
    tier: str = ""
    kind: str = ""
    chance: float | None = None
    expected_s: float | None = None


@dataclass(frozen=True, slots=True)
class FromPeer:
    """Tokens `start .. stop - 1` of a prompt were asked of `peer`, "" if there was none, and those before `end`
    arrived. `why` says what became of the rest."""

    peer: str
    start: int
    end: int
    stop: int
    why: str

    def why_here(self) -> str:
        """Why the rest is computed here."""
        return f"computed here; {self.why}"


def arrived_tokens(asked: Iterable[FromPeer], start: int, stop: int) -> dict[str, int]:
    """Tokens `start .. stop - 1` of a prompt that peers have computed, by peer."""
    found: dict[str, int] = {}
    for part in asked:
        count = min(part.end, stop) - max(part.start, start)
        if count > 0:
            found[part.peer] = found.get(part.peer, 0) + count
    return found


@dataclass(frozen=True, slots=True)
class Explanation:
    """Reasons in the order of the prompt's tokens, without gaps: their tokens add up to `prompt_tokens`, always."""

    prompt_tokens: int
    reasons: tuple[Reason, ...]

    @property
    def hit_tokens(self) -> int:
        """Tokens that were reused."""
        return sum(reason.tokens for reason in self.reasons if reason.cause is Cause.HIT)

    def tokens_by_cause(self) -> dict[str, int]:
        """Tokens of every cause that there is, zeros included."""
        tokens = {cause.value: 0 for cause in Cause}
        for reason in self.reasons:
            tokens[reason.cause] += reason.tokens
        return tokens

    def to_dict(self) -> dict[str, Any]:
        """For JSON; empty fields are left out."""
        reasons = [
            {name: value for name, value in asdict(reason).items() if value not in ("", None)}
            for reason in self.reasons
        ]
        return {"prompt_tokens": self.prompt_tokens, "hit_tokens": self.hit_tokens, "reasons": reasons}

    def for_client(self) -> Explanation:
        """The part that the prompt's client may see, without pages and evictions of other namespaces, and without what
        the policy has learned from others. Less than a page
        in common is omitted too: it would let a prompt be guessed token by token."""
        hidden = (Cause.NAMESPACE, Cause.PAGE, Cause.NEW)
        plain = [replace(reason, kind="", chance=None, expected_s=None) for reason in self.reasons]
        known = tuple(
            replace(reason, by="", detail=f"evicted {reason.seconds_ago:.1f} s ago")
            if reason.cause is Cause.EVICTED
            else reason
            for reason in plain
            if reason.cause not in hidden
        )
        at = sum(reason.tokens for reason in known)
        if at == self.prompt_tokens:
            return replace(self, reasons=known)
        rest = Reason(Cause.NEW, at, self.prompt_tokens - at, "no further whole page is cached")
        return replace(self, reasons=(*known, rest))


def never_seen(start: int, stop: int) -> tuple[Reason, ...]:
    """The reason that tokens `start .. stop - 1`, if any, are new."""
    if start == stop:
        return ()
    return (Reason(Cause.NEW, start, stop - start, f"token {start} is the first that was never seen here"),)


class Explanations:
    """The explanations of the last admitted requests, by their ids, for their owners; older ones are dropped."""

    CAPACITY = 1000

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[str, Explanation]] = OrderedDict()

    def add(self, request_id: str, explanation: Explanation, owner: str = "") -> None:
        """Store the explanation of an admitted request."""
        self._kept[request_id] = owner, explanation
        self._kept.move_to_end(request_id)
        if len(self._kept) > self.CAPACITY:
            self._kept.popitem(last=False)

    def of(self, request_id: str, owner: str | None = None) -> dict[str, Explanation]:
        """The explanation of the sequence of that id, or of all sequences of that request: at least one. Raises
        UnknownRequest if none of this `owner`, or of any owner, is stored."""
        found = {
            key: each
            for key, (its, each) in self._kept.items()
            if owner in (None, its) and key.startswith(request_id) and _NUMBERS.fullmatch(key, len(request_id))
        }
        if found:
            return {request_id: found[request_id]} if request_id in found else found
        raise UnknownRequest(
            f"no explanation of request '{request_id}' is kept; {len(self._kept):,} are, of at most "
            f"{self.CAPACITY:,} sequences that were admitted last.",
            fix="ask by the id of the response, soon after it, of an engine with explain on.",
        )
