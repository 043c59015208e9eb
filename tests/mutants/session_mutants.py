"""Mistakes of sessions. `tests/scheduler/test_sessions.py` and its machine must notice each of them."""

from __future__ import annotations

from typing import Any

from quire.cache.hold import Fences
from quire.cache.running import RunningTables
from quire.cache.session import Session, SessionKey, Turn
from quire.cache.sessions import Sessions
from quire.spec.events import Namespace
from quire.spec.ids import Ids
from tests.mutants.mutants import Patch, mutant


@mutant("sessions", "the row of a session goes on after an edited history, with keys of the old tokens")
def history_is_not_compared(patch: Patch) -> None:
    def resumable(sessions: Sessions, turn: Turn, tokens: Ids, num_cached: int) -> int:
        row = turn.session.row
        return min(len(row.tokens), len(tokens) - 1) if row is not None and len(tokens) > 1 else 0

    patch.setattr(Sessions, "resumable", resumable)


@mutant("sessions", "a state that has passed a token is taken back to the token before")
def states_are_trimmed(patch: Patch) -> None:
    real = Sessions.__init__

    def init(sessions: Sessions, *arguments: Any) -> None:
        real(sessions, *arguments)
        sessions._trims = True

    patch.setattr(Sessions, "__init__", init)


@mutant("sessions", "a tenant who guesses the id of another's session closes or continues it")
def sessions_have_no_namespace(patch: Patch) -> None:
    real = Sessions.open

    def open_session(sessions: Sessions, key: SessionKey, arrival: int, **more: Any) -> Turn:
        return real(sessions, key._replace(namespace=Namespace()), arrival, **more)

    patch.setattr(Sessions, "open", open_session)


@mutant("sessions", "a key that shares a cache with another sees, ends and overwrites the other's session by its id")
def sessions_have_no_owner(patch: Patch) -> None:
    real = Sessions.open

    def open_session(sessions: Sessions, key: SessionKey, arrival: int, **more: Any) -> Turn:
        return real(sessions, key._replace(owner=""), arrival, **more)

    patch.setattr(Sessions, "open", open_session)


@mutant("sessions", "the last turn of a session leaves it open, and its own pages are evicted as late as any")
def last_turns_are_as_others(patch: Patch) -> None:
    real = Sessions.open
    patch.setattr(Sessions, "open", lambda sessions, key, arrival, **more: real(sessions, key, arrival))


@mutant("sessions", "a turn begins in a row that a step in flight still writes, and its states are one token behind")
def rows_are_taken_in_flight(patch: Patch) -> None:
    real = Sessions.end

    def end(sessions: Sessions, turn: Turn, kv: Any, tokens: Ids, num_settled: int, num_launched: int) -> Any:
        return real(sessions, turn, kv, tokens, num_settled, num_settled)

    patch.setattr(Sessions, "end", end)


@mutant("sessions", "pages of a row are handed out while the last step of its turn still writes them")
def rows_end_in_flight(patch: Patch) -> None:
    patch.setattr(Fences, "has_passed", lambda fences, fence: True)


@mutant("sessions", "the last page of a closed session is never free again")
def a_closed_row_leaks(patch: Patch) -> None:
    def end_row(sessions: Sessions, session: Session, why: str, *, damaged: bool = False) -> None:
        if session.row is not None:
            sessions._drop(session)
            session.lost = why

    patch.setattr(Sessions, "_end_row", end_row)


@mutant("sessions", "a running request is preempted, and sessions nobody uses keep their pages")
def sessions_never_give_way(patch: Patch) -> None:
    patch.setattr(Sessions, "give_way", lambda sessions, but=None, **by: False)


@mutant("sessions", "the row used last ends first, so that two sessions that take turns never continue")
def the_newest_row_ends_first(patch: Patch) -> None:
    real = Sessions.give_way

    def give_way(sessions: Sessions, but: Session | None = None, **by: Any) -> bool:
        sessions._by_key = dict(reversed(sessions._by_key.items()))
        found = real(sessions, but, **by)
        sessions._by_key = dict(reversed(sessions._by_key.items()))
        return found

    patch.setattr(Sessions, "give_way", give_way)


@mutant("sessions", "a key with many sessions ends the only one of each other key, which was used before")
def the_oldest_row_of_all_ends_first(patch: Patch) -> None:
    real = Sessions.give_way

    def give_way(sessions: Sessions, but: Session | None = None, **by: Any) -> bool:
        sessions.expire()
        keys = {session: session.key for session in sessions._by_key.values()}
        for session, key in keys.items():
            session.key = key._replace(owner="")
        found = real(sessions, but, **by)
        for session, key in keys.items():
            session.key = key
        return found

    patch.setattr(Sessions, "give_way", give_way)


@mutant("sessions", "pages that were computed with replaced weights, or flushed, are held and read again")
def flushed_rows_stay(patch: Patch) -> None:
    patch.setattr(Sessions, "_flushed", lambda sessions, namespace: None)


@mutant("sessions", "a row that is at rest takes the tokens of its ended turn's last step")
def rows_at_rest_are_live(patch: Patch) -> None:
    patch.setattr(RunningTables, "rest", lambda rows, kv: int(rows.serials[kv.row]))


@mutant("sessions", "rooms beyond the held tokens stay, and the next turn writes behind a gap")
def rows_are_not_shortened(patch: Patch) -> None:
    real = Sessions.__init__

    def init(sessions: Sessions, parts: Any, settings: Any, cache: Any, shorten: Any) -> None:
        del shorten
        real(sessions, parts, settings, cache, lambda kv, num_tokens: None)

    patch.setattr(Sessions, "__init__", init)
