"""What sessions add to the admission of a request: its turn, the row that it continues in, and rows that end for it."""

from __future__ import annotations

from collections.abc import Callable

from quire.cache.admission import Claim
from quire.cache.request_kv import RequestKV
from quire.cache.session import Session, SessionKey, Turn
from quire.cache.sessions import Sessions
from quire.scheduler.request import Request


def turn_of(sessions: Sessions, request: Request) -> Turn | None:
    """The turn that a request begins; None for a request without a session."""
    if not request.session_id:
        return None
    key = SessionKey(request.namespace, request.session_id, request.owner)
    return sessions.open(key, request.arrival, is_last=request.last_turn)


def held_row(sessions: Sessions, request: Request, num_cached: int) -> tuple[int, RequestKV | None]:
    """`Sessions.resumable` for a request, and the row."""
    turn = request.turn
    num_held = sessions.resumable(turn, request.tokens, num_cached) if turn is not None else 0
    return num_held, turn.session.row.kv if turn is not None and turn.session.row and num_held > 0 else None


def make_room(sessions: Sessions, why_not: Callable[..., str], claim: Claim, own: Session | None) -> str:
    """`why_not(claim)`: why a request does not fit, "" if it does. If it would without rows of sessions, these end
    one after the other until it does, but for that of `own`, which the request continues."""
    while (reason := why_not(claim)) and sessions.num_held and not why_not(claim, sessions.most_frames):
        if not sessions.give_way(own, for_room=True):
            break
    return reason
