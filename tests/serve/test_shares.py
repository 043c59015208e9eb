"""Turns and shares of clients, by a clock of the test."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Coroutine
from typing import Any

import pytest

from quire.errors import Overloaded
from quire.serve.shares import OpenSequences, Shares


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def run(body: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(body, 60))


def test_more_than_may_be_open_is_refused_and_nothing_is_left() -> None:
    async def body() -> None:
        shares = Shares(most_open=4, most_begun=2, have_names=False)
        turns = [await shares.enter("", 1) for _ in range(4)]
        with pytest.raises(Overloaded) as refused:
            await shares.enter("", 1)
        assert refused.value.status == 429 and refused.value.retry_after_s >= 1
        turns[0].close()
        turns[0].close()
        turns[0] = await shares.enter("", 1)
        with pytest.raises(Overloaded):
            await shares.enter("", 1)
        for turn in turns:
            turn.close()
        (await shares.enter("", 9)).close()  # alone, more than that may be
        assert not shares._open.total() and not shares._begun.total()

    run(body())


def check_retry_after_is_the_measured_rate() -> None:
    async def body() -> None:
        clock = Clock()
        shares = Shares(most_open=10, most_begun=10, have_names=False, clock=clock)
        turns = [await shares.enter("", 1) for _ in range(10)]
        for turn in turns:  # two a second
            clock.now += 0.5
            turn.close()
        assert shares.wait_s(8) == pytest.approx(4.0, rel=0.2)
        clock.now += 95  # and none since
        assert shares.wait_s(8) == pytest.approx(80, rel=0.2)
        assert shares.wait_s(10_000) == 120
        assert shares.wait_s(0) == 1

    run(body())


def test_the_time_to_come_again_is_by_the_measured_rate() -> None:
    check_retry_after_is_the_measured_rate()


def check_retry_after_follows_the_queue() -> None:
    """Of those that are refused one after the other, each is told a later time; ends bring the times nearer."""

    async def body() -> None:
        clock = Clock()
        shares = Shares(most_open=10, most_begun=10, have_names=False, clock=clock)
        turns = [await shares.enter("", 1) for _ in range(10)]

        async def end_and_refill(count: int) -> None:
            """Two a second; others take their places at once."""
            for _ in range(count):
                clock.now += 0.5
                turns.pop(0).close()
                turns.append(await shares.enter("", 1))

        async def refused() -> float:
            with pytest.raises(Overloaded) as told:
                await shares.enter("", 1)
            return told.value.retry_after_s

        await end_and_refill(60)
        times = [await refused() for _ in range(8)]
        assert times == sorted(times) and times[0] == 1 and times[-1] == pytest.approx(4.0, rel=0.2)
        await end_and_refill(5)
        assert await refused() == pytest.approx(2.0, rel=0.2)
        await end_and_refill(20)
        assert await refused() == 1, "none that was refused is still to come"
        for _ in range(1000):
            await refused()
        assert await refused() == pytest.approx(5.5, rel=0.2), "no more are waited for than may be open"
        while turns:
            turns.pop().close()
        assert not shares._refused

    run(body())


def test_the_time_to_come_again_follows_the_queue() -> None:
    check_retry_after_follows_the_queue()


def check_a_long_queue_delays_its_own_client() -> None:
    """One that has many requests waiting does not stand before another's first."""

    async def body() -> None:
        shares = Shares(most_open=100, most_begun=4, have_names=True)
        order: list[str] = []
        begun: list[OpenSequences] = []

        async def one(client: str) -> None:
            turn = await shares.enter(client, 1)
            order.append(client)
            begun.append(turn)

        tasks = [asyncio.create_task(one("greedy")) for _ in range(40)]
        await asyncio.sleep(0)
        tasks += [asyncio.create_task(one("small")) for _ in range(3)]
        for _ in range(43):
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert len(begun) <= 4
            begun.pop(0).close()
        await asyncio.gather(*tasks)
        assert order[:4] == ["greedy"] * 4
        assert Counter(order[4:9])["small"] == 3, order[:12]
        assert not shares._open.total() and not shares._begun.total()

    run(body())


def test_a_long_queue_delays_its_own_client() -> None:
    check_a_long_queue_delays_its_own_client()


def test_a_turn_that_waits_for_room_stays_the_first() -> None:
    """Also where its client has a sequence in the engine, and those of clients without one come after it."""

    async def body() -> None:
        shares = Shares(most_open=999, most_begun=8, have_names=True)
        await shares.enter("ann", 1)
        running = [await shares.enter(f"c{at}", 1) for at in range(4)]
        large = asyncio.create_task(shares.enter("ann", 6))
        await asyncio.sleep(0)
        small = [asyncio.create_task(shares.enter(f"d{at}", 1)) for at in range(4)]
        await asyncio.sleep(0)
        for turn in running:
            assert not any(each.done() for each in small)
            turn.close()
            await asyncio.sleep(0)
        assert large.done() and small[0].done() and not small[1].done()
        large.result().close()
        await asyncio.sleep(0)
        assert all(each.done() for each in small)

    run(body())


def test_small_turns_do_not_go_before_one_that_waits_for_room() -> None:
    """One of two others is always in the engine, and its own client sends more meanwhile."""

    async def body() -> None:
        clock = Clock()
        shares = Shares(most_open=999, most_begun=4, have_names=True, clock=clock)
        order: list[tuple[str, int]] = []

        async def turns(client: str, count: int, number: int = 1) -> None:
            for _ in range(number):
                clock.now += 1
                turn = await shares.enter(client, count)
                order.append((client, count))
                for _ in range(6 if client == "eve" else 4):
                    await asyncio.sleep(0)
                turn.close()

        async with asyncio.TaskGroup() as tasks:
            for client in ("bob", "eve"):
                tasks.create_task(turns(client, 1, 20))
                await asyncio.sleep(0)
            tasks.create_task(turns("ann", 4))
            for _ in range(20):
                await asyncio.sleep(0)
                tasks.create_task(turns("ann", 1))
        assert order.index(("ann", 4)) == 2

    run(body())


def test_a_client_that_leaves_as_its_turn_comes() -> None:
    """Its task is cancelled, and has not run yet, when a turn before it ends."""

    async def body() -> None:
        shares = Shares(most_open=9, most_begun=1, have_names=True)
        first = await shares.enter("ann", 1)
        leaves = asyncio.create_task(shares.enter("bob", 1))
        stays = asyncio.create_task(shares.enter("eve", 1))
        await asyncio.sleep(0)
        leaves.cancel()
        first.close()
        assert isinstance((await asyncio.gather(leaves, return_exceptions=True))[0], asyncio.CancelledError)
        (await stays).close()
        assert not shares._open.total() and not shares._begun.total()

    run(body())


def check_a_client_keeps_no_other_out() -> None:
    """It may fill the queue while it is alone; when another comes, it gets no more than its share."""

    async def body() -> None:
        clock = Clock()
        shares = Shares(most_open=10, most_begun=10, have_names=True, clock=clock)
        turns = [await shares.enter("greedy", 1) for _ in range(10)]
        with pytest.raises(Overloaded):
            await shares.enter("greedy", 1)
        other = []
        for _ in range(5):
            turns.pop().close()
            other.append(await shares.enter("small", 1))
            with pytest.raises(Overloaded, match="of them this client's"):
                await shares.enter("greedy", 1)
        with pytest.raises(Overloaded):
            await shares.enter("small", 1)
        for turn in other:
            turn.close()
        clock.now += 61
        await shares.enter("greedy", 1)  # the other is gone

    run(body())


def test_a_client_keeps_no_other_out() -> None:
    check_a_client_keeps_no_other_out()


def test_who_waits_may_leave() -> None:
    async def body() -> None:
        shares = Shares(most_open=10, most_begun=1, have_names=True)
        first = await shares.enter("a", 1)
        waiting = [asyncio.create_task(shares.enter("b", 1)) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.gather(waiting[0], return_exceptions=True)
        first.close()
        (await waiting[1]).close()
        (await waiting[2]).close()
        assert not shares._open.total() and not shares._begun.total()

    run(body())


@pytest.mark.parametrize("seed", range(20))
def test_random_lives_keep_the_limits(seed: int) -> None:
    """Against plain counts: no more is open or begun than may be, and all that wait begin in the end."""
    draw = random.Random(seed)
    most_open, most_begun = draw.randint(1, 12), draw.randint(1, 6)

    async def body() -> None:
        shares = Shares(most_open=most_open, most_begun=most_begun, have_names=True, clock=Clock())
        tasks: list[asyncio.Task[OpenSequences]] = []
        open_turns: list[OpenSequences] = []
        for _ in range(300):
            match draw.randrange(4):
                case 0 | 1:
                    count = draw.choice((1, 1, 2, most_begun + 1))
                    tasks.append(asyncio.create_task(shares.enter(draw.choice("abc"), count)))
                case 2 if open_turns:
                    open_turns.pop(draw.randrange(len(open_turns))).close()
                case 3 if tasks and not draw.randrange(4):
                    draw.choice(tasks).cancel()
            for _ in range(3):
                await asyncio.sleep(0)
            for task in [task for task in tasks if task.done()]:
                tasks.remove(task)
                if not task.cancelled() and task.exception() is None:
                    open_turns.append(task.result())
            counts = [turn.count for turn in open_turns]
            assert sum(counts) == shares._begun.total()
            assert sum(counts) <= most_begun or len(counts) == 1
            assert shares._open.total() <= max(most_open, 3 * (most_begun + 1))
        while tasks or open_turns:
            for turn in open_turns:
                turn.close()
            open_turns = []
            if tasks:
                done, rest = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                tasks = list(rest)
                open_turns = [task.result() for task in done if not task.cancelled() and task.exception() is None]
        assert not shares._open.total() and not shares._begun.total()

    run(body())
