"""The answer to a flush waits for storage, holds nobody else up, and comes when the engine ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from quire.engine import process
from quire.engine.process import StepLoop
from quire.engine.wire import AskFlush, AskStatistics, Declined, FlushAnswer, Shutdown, Statistics
from quire.errors import StoreError
from quire.offload.deletion import Stored
from quire.offload.flush import Flushed
from quire.spec.events import Namespace

DONE = Flushed(flushed_tokens=5, held_tokens=0, num_retentions=0)
GONE = Flushed(flushed_tokens=5, held_tokens=0, num_retentions=0, storage=Stored.GONE)
ALICE = Namespace(salt="alice")


class Core:
    """Flushes, and says of them what it is told to."""

    def __init__(self, says: Callable[[Namespace | None, bool], Flushed | None]) -> None:
        self.says = says
        self.closed = False

    def flush(self, namespace: Namespace | None) -> Flushed:
        return DONE

    def flushed(self, done: Flushed, namespace: Namespace | None, *, waits: bool) -> Flushed | None:
        assert done is DONE
        return self.says(namespace, waits)

    def has_work(self) -> bool:
        return False

    def has_moves(self) -> bool:
        return False

    def statistics(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self.closed = True


class Link:
    """Commands come one at a time, one each turn; `reports` are those that answer."""

    def __init__(self, *commands: Any) -> None:
        self.left = list(commands)
        self.reports: list[Any] = []

    def commands(self, timeout_ms: int) -> list[Any]:
        return [self.left.pop(0)] if self.left else []

    def report(self, report: Any) -> None:
        if isinstance(report, FlushAnswer | Declined | Statistics):
            self.reports.append(report)


def run(core: Core, *commands: Any) -> list[Any]:
    link = Link(*commands, Shutdown())
    StepLoop(core, link).run()  # type: ignore[arg-type]
    assert core.closed
    return link.reports


def test_what_is_known_is_answered_at_once() -> None:
    assert run(Core(lambda namespace, waits: GONE), AskFlush(1, None)) == [FlushAnswer(1, GONE)]


def test_nobody_waits_for_another_ones_flush() -> None:
    """Alice's ends after bob's, and between them somebody else is answered."""
    asked: list[object] = []

    def says(namespace: Namespace | None, waits: bool) -> Flushed | None:
        asked.append(namespace)
        return GONE if namespace is None or asked.count(ALICE) == 4 else None

    reports = run(
        Core(says), AskFlush(1, ALICE), AskFlush(2, None), AskStatistics(3), AskStatistics(4), AskStatistics(5)
    )
    assert reports == [
        FlushAnswer(2, GONE),
        Statistics(3, {}),
        Statistics(4, {}),
        FlushAnswer(1, GONE),
        Statistics(5, {}),
    ]


def test_an_engine_that_ends_says_what_has_become_of_it() -> None:
    core = Core(lambda namespace, waits: None if waits else GONE)
    assert run(core, AskFlush(1, ALICE)) == [FlushAnswer(1, GONE)]


@pytest.mark.parametrize("seconds", [0.0, 60.0])
def test_what_the_store_took_no_note_of_is_no_answer(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its time, or at the end."""

    def says(namespace: Namespace | None, waits: bool) -> Flushed | None:
        if waits:
            return None
        raise StoreError("it does not answer.")

    monkeypatch.setattr(process, "FLUSH_S", seconds)
    reports = run(Core(says), AskFlush(1, ALICE), AskStatistics(2))
    first, second = reports if seconds == 0 else reversed(reports)
    assert isinstance(first, Declined) and first.question == 1 and "does not answer" in first.error.message
    assert second == Statistics(2, {})
