"""What is reused of windows and states: where requests can resume, in numbers, and that nothing falls off a cliff."""

from __future__ import annotations

import pytest

from quire.spec.group import ReachSpec
from tests.changes import CORE, slow_unless_changed
from tests.scheduler.hybrid_server import FULL, STATE, HybridServer, ids, prompt

WINDOW = ReachSpec("window", 128)
HYBRIDS = {
    "window": (FULL, WINDOW),
    "chunk": (FULL, ReachSpec("chunk", 128)),
    "state": (FULL, STATE),
    "window and state": (FULL, WINDOW, STATE),
    "states alone": (STATE,),
    "windows alone": (WINDOW,),
}


def test_the_second_request_that_shares_a_prefix_leaves_a_state_where_they_part() -> None:
    """300 tokens, then prompts that share 200 with them, in pages of 16 with a grid of 64: the second one can begin at
    192, where the grid left a state; with no grid it begins at 0, and leaves one at 192 for the third."""
    first, *others = (prompt(0, 200) + prompt(seed, 100) for seed in (1, 2, 3))
    for interval, second in ((64, 192), (4096, 0)):
        server = HybridServer(FULL, STATE, num_pages=200, frames=(200, 20), interval=interval)
        assert server.hit(first) == 0
        assert [server.hit(p) for p in others] == [second, 192]
    assert server.hit(first) == 288  # its last whole page but one


@slow_unless_changed(*CORE)
@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("page_size", [1, 16])
def test_hits_do_not_depend_on_where_a_shared_prefix_ends(name: str, page_size: int) -> None:
    for shift in range(0, 129, max(page_size, 8)):
        check_shared_prefixes(name, page_size, shift)


def check_shared_prefixes(name: str, page_size: int, shift: int) -> None:
    """Prompts that share 320 tokens and `shift` more: the third one computes its own tokens only, and so do those that
    come together, once the first of them has computed the prefix."""
    shared = prompt(7, 320 + shift)
    prompts = [shared + prompt(seed, 40) for seed in (1, 2, 3)]
    server = HybridServer(*HYBRIDS[name], num_pages=200 * 16 // page_size, page_size=page_size)
    assert [server.hit(p) for p in prompts][2] == len(shared), shift
    together = HybridServer(*HYBRIDS[name], num_pages=200 * 16 // page_size, page_size=page_size)
    assert [r.num_cached for r in together.serve(*prompts)] == [0, len(shared), len(shared)], shift


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_prompt_that_comes_again_is_computed_to_its_last_page(name: str) -> None:
    for length in (17, 160, 161, 175, 300):
        server = HybridServer(*HYBRIDS[name], num_pages=200, chunk=48)
        server.hit(prompt(1, length), max_tokens=40)
        assert server.hit(prompt(1, length)) == (length - 1) // 16 * 16


@pytest.mark.parametrize("name", ["state", "window and state", "states alone"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_steps_that_end_where_a_state_is_left(name: str, page_size: int) -> None:
    """The end of a prompt's last page, or of what prompts share, is also the end of a step: the state is left by the
    next step, behind pages that are the tree's already, and to those who wait for it at once."""
    chunk = 64
    for length in (65, 70, 128, 129, 193, 520):
        server = HybridServer(*HYBRIDS[name], num_pages=4096 // page_size, page_size=page_size, chunk=chunk)
        server.hit(prompt(1, length), max_tokens=3)
        assert server.hit(prompt(1, length)) == (length - 1) // page_size * page_size
        together = HybridServer(*HYBRIDS[name], num_pages=4096 // page_size, page_size=page_size, chunk=chunk)
        shared = length // chunk * chunk
        found = together.serve(*(prompt(1, shared) + prompt(seed, 9) for seed in (2, 3, 4)), max_tokens=5)
        assert [request.num_cached for request in found] == [0, shared, shared]


def test_a_follower_gets_the_end_of_its_leader_s_prompt() -> None:
    """The leader's prompt ends where a page ends, and it is decoding when the state there is left."""
    server = HybridServer(FULL, STATE, num_pages=100, page_size=64, chunk=64)
    leader, follower = prompt(1, 128), prompt(1, 128) + prompt(2, 9)
    found = server.serve(leader, follower, max_tokens=40)
    assert [request.num_cached for request in found] == [0, 128]


@pytest.mark.parametrize("length", [514, 520, 527, 528, 530])
def test_conversations_that_end_near_the_grid(length: int) -> None:
    server = HybridServer(FULL, STATE, num_pages=400, frames=(400, 12), max_requests=1)
    (request,) = server.serve(prompt(1, length - 30), max_tokens=31)  # so many tokens were computed
    assert server.hit([*request.tokens.tolist(), 1]) == length // 16 * 16


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_conversation_goes_on_where_its_last_answer_ended(name: str) -> None:
    """Every turn computes what is new in it, and the part of a page that the answer before did not fill."""
    server = HybridServer(*HYBRIDS[name], num_pages=400)
    tokens = prompt(1, 50)
    for turn in range(6):
        (request,) = server.serve(tokens, max_tokens=21 + turn)
        answered = request.tokens.tolist()
        tokens = answered + prompt(100 + turn, 13)
        hit = server.cache.match(ids(tokens))
        assert hit.num_tokens == (len(answered) - 1) // 16 * 16  # the last token was drawn and never computed


def test_two_long_sessions_keep_each_other_s_windows() -> None:
    """Two conversations in turn, whose windows fill a small pool: at least 99 % of what was computed is reused on
    return, and the pools are not full."""
    server = HybridServer(FULL, WINDOW, num_pages=1300, frames=(1300, 60), chunk=256, max_requests=1)
    sessions = [prompt(seed, 4_000) for seed in (1, 2)]
    reused = reusable = 0
    for turn in range(8):
        for index, tokens in enumerate(sessions):
            (request,) = server.serve(tokens, max_tokens=24)
            if turn:
                reused += request.num_cached
                reusable += len(tokens) - 20
            sessions[index] = request.tokens.tolist() + prompt(10 * turn + index, 20)
    assert reused >= 0.99 * reusable > 0
    assert server.frames(1).dropped > 0, "the window pool was never short, so this shows little"
    full = server.frames(0)
    assert full.total - full.free < full.total
    assert server.cache.statistics().evicted_pages == 0


@pytest.mark.parametrize("name", ["state", "window and state", "states alone"])
def test_one_state_is_enough_to_run(name: str) -> None:
    check_one_state(name)


def check_one_state(name: str) -> None:
    """Nothing fails; checkpoints are skipped and counted, and a prompt can still resume on the one state there is."""
    reaches = HYBRIDS[name]
    frames = [1 if reach.kind == "state" else 100 for reach in reaches]
    server = HybridServer(*reaches, num_pages=100, frames=frames, max_requests=1)
    for seed in (1, 2, 1):
        server.serve(prompt(0, 64) + prompt(seed, 100), max_tokens=30)
    states = server.frames(len(reaches) - 1)
    assert states.skipped > 0
    tokens = prompt(9, 33)
    (request,) = server.serve(tokens, max_tokens=16)  # 48 tokens computed: it ends where a page ends
    assert server.hit([*request.tokens.tolist(), 1]) == 48
    assert server.frames(len(reaches) - 1).free + server.frames(len(reaches) - 1).cached == 1


def test_checkpoints_never_take_the_place_of_a_request() -> None:
    """As many states as may run at once: the first request takes no frame for a checkpoint, so that later ones run
    beside it."""
    server = HybridServer(FULL, STATE, num_pages=200, frames=(200, 3), max_requests=3, chunk=32)
    early = server.submit(prompt(1, 150), max_tokens=60)
    for _ in range(5):
        server.step()
    late = [server.submit(prompt(seed, 40), max_tokens=60) for seed in (2, 3)]
    for _ in range(4):
        server.step()
    assert all(request.kv is not None for request in (early, *late)), [r.wait_reason for r in late]
    server.finish()
    assert server.scheduler.num_preemptions == 0
    assert server.frames(1).skipped > 0


def test_windows_go_before_pages_and_come_back() -> None:
    """A window pool for one request and a bit: another request takes the cached windows, the pages stay, and the first
    prompt, computed again, gives its cached pages their windows back."""
    server = HybridServer(FULL, WINDOW, num_pages=100, frames=(100, 12), max_requests=1)
    first = prompt(1, 200)
    server.hit(first)
    server.hit(prompt(2, 200))
    assert server.frames(1).dropped > 0
    assert server.cache.statistics().evicted_pages == 0
    found = server.cache.match(ids(first))
    assert (found.num_tokens, found.match.num_pages, found.choice.limited_by) == (0, 12, "window1")
    server.hit(first)
    assert server.frames(1).revived > 0
    assert server.hit(first) == 192
    assert server.cache.statistics().duplicate_pages > 0


def test_a_window_pool_of_one_window_serves_any_prompt() -> None:
    """Chunks are cut to what the pool has room for; a prompt of many windows goes through a pool of little more than
    one."""
    server = HybridServer(FULL, WINDOW, num_pages=100, frames=(100, 10), max_requests=2, chunk=512)
    found = server.serve(prompt(1, 700), prompt(2, 700), max_tokens=30)
    assert all(request.num_outputs == 30 for request in found)
