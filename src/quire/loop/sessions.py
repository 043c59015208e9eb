"""SessionsPart: sessions of the cache expire between steps, and end with the loop."""

from __future__ import annotations

from quire.cache.sessions import Sessions
from quire.counters import Section
from quire.loop.part import Part


class SessionsPart(Part):
    """The sessions of one cache."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    def before_schedule(self) -> None:
        self._sessions.expire()

    def counters(self) -> list[Section]:
        return [("", self._sessions.counters())]

    def close(self) -> None:
        self._sessions.close_all()
