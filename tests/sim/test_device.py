"""The simulated device notices every page that does not hold what it must, in every kind of group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from quire.cache.hold import Fences
from quire.cache.states import StatePieces
from quire.errors import WrongContent
from quire.sim.replay import Replay
from quire.sim.trace_request import page_digests, prefix_hashes
from quire.spec.events import Namespace
from quire.spec.ids import Ids
from tests.sim.replays import replay_of, requests

TRACE = requests([(40, 12), (44, 12), (48, 12)], shared=16)


def after(replay: Replay, step: int, verb: str, change: Callable[..., None]) -> None:
    """From that step on, `change` what a verb of the cache returns; it gets the result and the verb's arguments."""
    owner = replay.cache if hasattr(replay.cache, verb) else replay.cache.rows
    original = getattr(owner, verb)

    def changed(*arguments: Any, **named: Any) -> Any:
        result = original(*arguments, **named)
        if replay.loop.num_steps >= step:
            change(result, *arguments, **named)
        return result

    setattr(owner, verb, changed)


def runs(replay: Replay) -> None:
    replay.run(TRACE)


@pytest.mark.parametrize("groups", ["full", "window", "chunk", "state"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_sound_cache_passes(groups: str, overlap: bool, page_size: int) -> None:
    runs(replay_of(160 // page_size, page_size, groups=groups, overlap=overlap))


def group_of(groups: str) -> int:
    return 0 if groups == "full" else 1


@pytest.mark.parametrize("groups", ["full", "window", "chunk"])
@pytest.mark.parametrize("step", [1, 4, 9, 12])
def test_a_page_without_a_frame(groups: str, step: int) -> None:
    replay = replay_of(groups=groups)

    def lose(table: Ids, kvs: Any, lengths: Any, group: int) -> None:
        if group == group_of(groups):
            table[0, (int(lengths[0]) - 1) // 4 - 1 if lengths[0] > 4 else 0] = 0

    after(replay, step, "page_table", lose)
    with pytest.raises(WrongContent, match="has no frame"):
        runs(replay)


@pytest.mark.parametrize("groups", ["full", "window", "chunk"])
def test_pages_in_the_wrong_order(groups: str) -> None:
    replay = replay_of(groups=groups)

    def swap(table: Ids, kvs: Any, lengths: Any, group: int) -> None:
        if group == group_of(groups) and lengths[0] >= 8:
            last = int(lengths[0]) // 4
            table[0, [last - 2, last - 1]] = table[0, [last - 1, last - 2]]

    after(replay, 1, "page_table", swap)
    with pytest.raises(WrongContent, match="holds 0 of its 4 tokens"):
        runs(replay)


def test_a_page_of_another_request() -> None:
    replay = replay_of()

    def swap(table: Ids, kvs: Any, lengths: Any, group: int) -> None:
        if len(table) > 1:
            table[[0, 1], 6] = table[[1, 0], 6]

    after(replay, 8, "page_table", swap)
    with pytest.raises(WrongContent, match="page 6 of request"):
        runs(replay)


@pytest.mark.parametrize("groups", ["full", "window", "chunk"])
def test_a_frame_that_was_given_to_another_too_early(groups: str) -> None:
    """One request's new tokens are written over the last whole page of another."""
    replay = replay_of(groups=groups)
    frames = replay.cache.rows.page_table

    def overwrite(slots: Ids, kvs: Any, starts: Any, ends: Any, group: int) -> None:
        if group == group_of(groups) and len(kvs) > 1 and len(slots) == len(kvs):
            table = frames(kvs, ends, group)
            slots[1] = table[0, int(ends[0]) // 4 - 1] * 4 + 2

    after(replay, 5, "slots", overwrite)
    with pytest.raises(WrongContent, match="holds 3 of its 4 tokens"):
        runs(replay)


def test_a_token_in_the_wrong_slot_and_one_in_the_padding_frame() -> None:
    for change, message in ((-1, "tokens"), (None, "writes to a page of group 'full' that has no frame")):
        replay = replay_of()

        def shift(slots: Ids, kvs: Any, starts: Any, ends: Any, group: int, change: int | None = change) -> None:
            slots[-1] = 1 if change is None else slots[-1] + change

        after(replay, 6, "slots", shift)
        with pytest.raises(WrongContent, match=message):
            runs(replay)


def test_a_stale_page_of_the_same_request() -> None:
    """A frame that the request wrote for an earlier page stands where a later one should."""
    replay = replay_of()

    def stale(table: Ids, kvs: Any, lengths: Any, group: int) -> None:
        if lengths[0] > 16:
            table[0, 3] = table[0, 1]

    after(replay, 3, "page_table", stale)
    with pytest.raises(WrongContent, match="page 3 of request 'r0'"):
        runs(replay)


@pytest.mark.parametrize("fault", ["another's", "nothing", "old", "shared", "short"])
def test_a_wrong_state(fault: str) -> None:
    replay = replay_of(groups="state")

    def change(pieces: StatePieces | None, *_: Any) -> None:
        if pieces is None or len(pieces.lengths) < 2:
            return
        if fault == "another's":
            pieces.sources[:2] = pieces.sources[1::-1]
        elif fault == "nothing":
            pieces.sources[0] = 0
        elif fault == "old":
            pieces.sources[0] = pieces.targets[0] = pieces.targets.max() + 1
        elif fault == "shared":
            pieces.targets[0] = pieces.targets[1]
        else:
            pieces.lengths[0] += 1

    after(replay, 9, "launch", change)
    with pytest.raises(WrongContent):
        runs(replay)


def test_a_page_that_is_begun_anew_while_a_step_in_flight_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fences, "retire", lambda self, retired: True)  # given back at once, whatever is in flight
    trace = requests([(30, 10)] * 8 + [(30, 10)] * 8, gap=0.004)
    trace[::2] = [replace(request, abort_after=3) for request in trace[::2]]
    with pytest.raises(WrongContent, match="is in flight"):
        replay_of(28, 4, overlap=True, check="reads").run(trace)


def test_tokens_that_were_drawn_for_another() -> None:
    replay = replay_of()
    settle = replay.scheduler.settle
    replay.scheduler.settle = lambda batch, drawn, kept: settle(batch, drawn[::-1])  # type: ignore[method-assign]
    with pytest.raises(WrongContent, match="drawn for another"):
        runs(replay)


def test_a_hash_depends_on_all_tokens_before() -> None:
    tokens = np.arange(50, dtype=np.int32)
    hashes = prefix_hashes(Namespace(), tokens)
    assert len(set(hashes.tolist())) == 50
    for at in range(50):
        other = tokens.copy()
        other[at] += 1
        changed = prefix_hashes(Namespace(), other) != hashes
        assert not changed[:at].any() and changed[at:].all()
    assert (prefix_hashes(Namespace(salt="x"), tokens) != hashes).all()


def test_a_digest_changes_with_any_slot() -> None:
    hashes = prefix_hashes(Namespace(), np.arange(8, dtype=np.int32))[None]
    (digest,) = page_digests(hashes)
    for at in range(8):
        wrong = hashes.copy()
        wrong[0, at] ^= np.uint64(1 << 63)
        assert page_digests(wrong)[0] != digest
    assert page_digests(hashes[:, ::-1])[0] != digest
