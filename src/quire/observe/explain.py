"""Explanation: what became of each token of a prompt, and why no more of it was reused. Plain data, for people too."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Cause(StrEnum):
    """What became of a run of a prompt's tokens. Every token has exactly one cause."""

    HIT = "hit"
    """Reused."""
    LAST_TOKEN = "last_token"
    """Cached, and computed again: a prompt's last token always is, with the page it is in."""
    GROUP = "group"
    """Cached, but a group of layers has lost what it needs to go on from there."""
    EVICTED = "evicted"
    """Was cached and had to make room."""
    NAMESPACE = "namespace"
    """Cached for another adapter or salt only."""
    PAGE = "page"
    """Less than a page: the same tokens as in a page that is or was cached, which differs later on."""
    NEW = "new"
    """Never seen behind this prefix, as far as is remembered."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Tokens `start .. start + tokens - 1` of a prompt and their cause. `by` and `seconds_ago` tell of an eviction."""

    cause: Cause
    start: int
    tokens: int
    detail: str = ""
    by: str = ""
    seconds_ago: float | None = None


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
