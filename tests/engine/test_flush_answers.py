"""The answer to a flush waits for storage, delays no other request, and comes when the engine ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from quire.client import process
from quire.client.process import StepLoop
from quire.engine.messages import Ask, Later, Reply, Shutdown
from quire.errors import StoreError
from quire.offload.deletion import Flushed, Stored
from quire.spec.events import Namespace

GONE = Flushed(flushed_tokens=5, held_tokens=0, num_retentions=0, storage=Stored.GONE)
ALICE = Namespace(salt="alice")


class Core:
    """Flushes, and says of them what it is told to."""

    def __init__(self, says: Callable[[Namespace | None, bool], Flushed | None], seconds: float = 60.0) -> None:
        self.says = says
        self.seconds = seconds
        self.closed = False

    def flush(self, namespace: Namespace | None) -> Later[Flushed]:
        return Later(poll=lambda waits: self.says(namespace, waits), until_s=time.monotonic() + self.seconds)

    def has_work(self) -> bool:
        return False

    def is_due(self) -> bool:
        return False

    def counters(self) -> dict[str, Any]:
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
        if isinstance(report, Reply):
            self.reports.append(report)


def asks(number: int, verb: Callable[..., Any], *arguments: Any) -> Ask:
    return Ask(number, verb.__name__, msgspec.Raw(msgspec.msgpack.encode(arguments)))


def answers(number: int, value: Any) -> Reply:
    return Reply(number, msgspec.Raw(msgspec.msgpack.encode(value)))


def run(core: Core, *commands: Any) -> list[Any]:
    link = Link(*commands, Shutdown())
    StepLoop(core, link).run()  # type: ignore[arg-type]
    assert core.closed
    return link.reports


def test_what_is_known_is_answered_at_once() -> None:
    assert run(Core(lambda namespace, waits: GONE), asks(1, process.Core.flush, None)) == [answers(1, GONE)]


def test_a_flush_does_not_wait_for_another() -> None:
    """Alice's ends after Bob's, and another request is answered between them."""
    asked: list[object] = []

    def says(namespace: Namespace | None, waits: bool) -> Flushed | None:
        asked.append(namespace)
        return GONE if namespace is None or asked.count(ALICE) == 4 else None

    reports = run(
        Core(says),
        asks(1, process.Core.flush, ALICE),
        asks(2, process.Core.flush, None),
        asks(3, process.Core.counters),
        asks(4, process.Core.counters),
        asks(5, process.Core.counters),
    )
    assert reports == [
        answers(2, GONE),
        answers(3, {}),
        answers(4, {}),
        answers(1, GONE),
        answers(5, {}),
    ]


def test_an_answer_that_cannot_be_encoded_ends_only_itself() -> None:
    core = Core(lambda namespace, waits: object())  # type: ignore[arg-type, return-value]
    first, second = run(core, asks(1, process.Core.flush, None), asks(2, process.Core.counters))
    assert first.error is not None and "object" in first.error.message
    assert second == answers(2, {})


def test_a_broken_invariant_ends_the_engine_also_where_arguments_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def decode(self, _: object) -> Any:
            raise AssertionError("a broken invariant")

    monkeypatch.setitem(process.VERBS, "flush", process.VERBS["flush"]._replace(arguments=Broken()))  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="a broken invariant"):
        run(Core(lambda namespace, waits: GONE), asks(1, process.Core.flush, None))


def test_an_engine_that_ends_says_what_has_become_of_it() -> None:
    core = Core(lambda namespace, waits: None if waits else GONE)
    assert run(core, asks(1, process.Core.flush, ALICE)) == [answers(1, GONE)]


@pytest.mark.parametrize("seconds", [0.0, 60.0])
def test_what_the_store_took_no_note_of_is_no_answer(seconds: float) -> None:
    """After its time, or at the end."""

    def says(namespace: Namespace | None, waits: bool) -> Flushed | None:
        if waits:
            return None
        raise StoreError("it does not answer.")

    reports = run(Core(says, seconds), asks(1, process.Core.flush, ALICE), asks(2, process.Core.counters))
    first, second = reports if seconds == 0 else reversed(reports)
    assert first.number == 1 and first.error is not None and "does not answer" in first.error.message
    assert second == answers(2, {})
