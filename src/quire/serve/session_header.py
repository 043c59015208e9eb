"""The header that names a request's session, for clients whose dialect has no field for it."""

from __future__ import annotations

from starlette.datastructures import Headers

from quire.cache.session import LONGEST_SESSION_ID
from quire.serve.errors import BadField

SESSION = "X-Quire-Session"
"""`ID`, or `ID; last`: the turn of a session, and that no other follows."""


def session_named(headers: Headers, of_body: str) -> tuple[str, bool]:
    """The session of a request whose body names one too, or "", and whether the header says that it ends. Raises
    BadField for a header that cannot be read, and for two sessions."""
    given = headers.getlist(SESSION)
    if not given:
        return of_body, False
    name, semicolon, mark = (part.strip() for part in given[0].partition(";"))
    is_readable = len(given) == 1 and name.isascii() and name.isprintable() and mark == ("last" if semicolon else "")
    if not is_readable or not 0 < len(name) <= LONGEST_SESSION_ID:
        raise BadField(
            f"the header {SESSION} is not the id of a session, or that with '; last' behind it.",
            param=SESSION,
            fix=f"send an ID of at most {LONGEST_SESSION_ID} printable characters of ASCII, or 'ID; last'.",
        )
    if of_body and name != of_body:
        raise BadField(
            f"the header {SESSION} names another session than session_id.", param=SESSION, fix="leave one of them out."
        )
    return name, bool(mark)
