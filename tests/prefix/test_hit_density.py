"""HitDensity: its candidates against a model, what it takes for a turn or a shared prompt, and what it hits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import pytest

from quire.prefix import hit_density, stay_table
from quire.prefix.endings import CLASSES, Endings
from quire.prefix.evict import eviction_policy
from quire.prefix.hit_density import KINDS, SHARED_KINDS, TOLD, HitDensity, Stay
from quire.prefix.node import Node
from quire.prefix.policy import EvictionPolicy
from quire.prefix.radix_cache import RadixCache
from quire.spec.ending import Ending
from quire.spec.events import Namespace
from quire.spec.ids import Ids

NAMESPACE = Namespace()
NO_IDS: Ids = np.empty(0, dtype=np.int32)


class World:
    """A tree of pages of one token, in a pool; requests come one at a time, each a second after the one before."""

    def __init__(self, policy: EvictionPolicy, pool: int) -> None:
        self.now = 0.0
        self.tree = RadixCache(1, policy, remembered=1_000_000, seconds=lambda: self.now)
        self.pool = pool

    def serve(self, request: Iterable[int], ending: int = 0, after: float = 1.0, told: Ending | None = None) -> int:
        self.now += after
        tree, tokens = self.tree, np.array(list(request), dtype=np.int32)
        match = tree.match(NAMESPACE, tokens)
        lease = tree.lease(match)
        rest = tokens[match.num_pages :]
        tree.evict(tree.num_pages + len(rest) - self.pool)
        half = len(rest) // 2
        for part in (rest[:half], rest[half:]):
            tree.insert(lease, part, part)
        memo = tree.ended(lease, np.array([ending], dtype=np.int32) if ending else NO_IDS, int(ending > 0))
        tree.release(lease)
        if told is not None:
            tree.policy.told(memo, told)
        assert tree.num_pages <= self.pool
        assert tree.queued() == {node for node in tree.nodes() if not node.children}, "a leaf can never be evicted"
        return match.num_pages

    def stay(self, path: Iterable[int]) -> Stay:
        """Of the node at the end of a path."""
        match = self.tree.match(NAMESPACE, np.array(list(path), dtype=np.int32))
        found = match.path[-1].memo
        assert isinstance(found, Stay)
        return found


# -- candidates


def check_candidates(seed: int, patch: pytest.MonkeyPatch) -> None:
    """Leaves are offered, leased and chosen: always just those of the model can be victims."""
    for name, value in (("RANKED", 3), ("WINDOW", 7)):
        patch.setattr(hit_density, name, value)
    draw = np.random.default_rng(seed)
    policy, root = HitDensity(), Node(NAMESPACE, None, b"", b"", 0, 0)
    now = 0.0
    policy.timed_by(lambda: now)
    leased = [Node(NAMESPACE, root, bytes(4), bytes(4), 0, 0) for _ in range(80)]
    model: dict[Node, None] = {}
    told: dict[Stay, Ending] = {}
    rank, ranks = policy._rank, 0

    def counted() -> None:
        nonlocal ranks
        ranks += 1
        assert ranks < 250, "a choice does not end: each looks at some slots and releases their invalid entries"
        rank()

    patch.setattr(policy, "_rank", counted)
    for number in range(1_500):
        now += float(draw.exponential(1.0))
        step = draw.random()
        if step < 0.4 and leased:
            node = leased.pop(int(draw.integers(len(leased))))
            node.answer = int(draw.choice([1, 100]))
            policy.offered(node)
            model[node] = None
        elif step < 0.7 and model:
            node = list(model)[int(draw.integers(len(model)))]
            policy.used(node)
            node.ticket = 0
            del model[node]
            leased.append(node)
        elif step < 0.8 and (known := [*model, *leased]):
            stay = known[int(draw.integers(len(known)))].memo
            policy.told(stay, ending := Ending(draw.choice(list(Ending))))
            if isinstance(stay, Stay) and 0 <= stay.kind < SHARED_KINDS:  # its request has ended
                told[stay] = ending
        elif step < 0.95:
            ranks, victim = 0, policy.victim()
            assert (victim in model) if model else victim is None, number
            if victim is not None:
                del model[victim]
                leased.append(victim)
                if draw.random() < 0.5:  # its last pages are gone
                    model[leased.pop()] = None
                    policy.offered(victim)
        found = list(policy.candidates())
        assert len(found) == len(set(found)) and set(found) == model.keys(), number
        assert len(policy._slots) < 250, "invalid entries pile up"
        for slot, entry in enumerate(policy._slots):
            if entry is not None and entry[0] == entry[1].ticket:
                stay = entry[1].memo
                assert isinstance(stay, Stay) and stay.slot == slot and policy._kinds[slot] == stay.kind, number
                assert stay not in told or stay.kind // KINDS == TOLD[told[stay]], number
                assert stay.number < 0 or policy._table._kinds[stay.number] in (stay.kind, -1), number
    while model:
        ranks, victim = 0, policy.victim()
        assert victim is not None
        del model[victim]
    assert policy.victim() is None


@pytest.mark.parametrize("seed", range(6))
def test_each_candidate_can_be_a_victim_and_nothing_else(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check_candidates(seed, monkeypatch)


def check_worst_first(patch: pytest.MonkeyPatch) -> None:
    """While nothing is known, the order is that of the begin of requests, and the rest of a victim goes on with it."""
    patch.setattr(hit_density, "RANKED", 4)
    policy, root = HitDensity(), Node(NAMESPACE, None, b"", b"", 0, 0)
    now = 0.0
    policy.timed_by(lambda: now)
    leaves = [Node(NAMESPACE, root, bytes(4), bytes(4), 0, 0) for _ in range(40)]
    for leaf in leaves:
        now += 1.0
        policy.offered(leaf)
    for number, leaf in enumerate(leaves):
        assert policy.victim() is leaf
        if number < 20:
            policy.offered(leaf)
            assert policy.victim() is leaf, "the rest of a leaf stays, and another one loses its end"


def test_what_is_worth_least_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    check_worst_first(monkeypatch)


# -- stays


def check_turns() -> None:
    """A conversation that goes on, is evicted in part, and goes on again: its turns and their pace are counted."""
    policy = HitDensity()
    world = World(policy, 100)
    path = list(range(10))
    for turn in range(1, 4):
        world.serve(path, after=60.0)
        stay = world.stay(path)
        assert (stay.turn, stay.uses, stay.num_pages) == (turn, 0, len(path))
        assert stay.pace == pytest.approx(0 if turn == 1 else np.log(60))
        path += range(100 * turn, 100 * turn + 5)
    world.tree.evict(7)
    world.serve(path, after=10.0)
    stay = world.stay(path)
    assert (stay.turn, stay.uses) == (4, 0), "what was evicted is no turn"
    assert stay.pace == pytest.approx(0.6 * np.log(60) + 0.4 * np.log(10))
    table = policy._table
    assert table._ended.sum() == 3 and (table._kinds >= 0).sum() == 1, "a stay is not over, or twice"


def test_turns_follow_evicted_pages_too() -> None:
    check_turns()


def check_parts() -> None:
    """A long path is several nodes, each added while its request runs: they have one stay. It ends with the next turn,
    and what that turn leaves out is left."""
    policy = HitDensity()
    world = World(policy, 1_000)
    tree, prompt, stays = world.tree, list(range(40)), []
    tree.longest_grown = 0
    for turn in range(1, 4):
        world.now += 60.0
        lease = tree.lease(tree.match(NAMESPACE, ids(prompt)))
        for part in (prompt[lease.num_pages :], range(1_000 * turn, 1_000 * turn + 4)):
            tree.insert(lease, ids(part), ids(part))
        tree.ended(lease, NO_IDS, 1)
        tree.release(lease)
        stays.append(world.stay(prompt))
        assert lease.num_pages == len(prompt) + 4 == stays[-1].num_pages and stays[-1].turn == turn
        assert [each.is_superseded for each in stays] == [True] * (turn - 1) + [False]
        assert policy._table._ended.sum() == turn - 1 and (policy._table._kinds >= 0).sum() == 1
        tree.evict(6)  # of what is left, and then of the prompt: it is computed again
        prompt += range(100 * turn, 100 * turn + 5)


def test_nodes_that_one_request_adds_have_one_stay() -> None:
    check_parts()


def check_held() -> None:
    """A session holds its path between turns: how soon it goes on is learned as of paths that nothing holds."""
    policy = HitDensity()
    world = World(policy, 1_000)
    lease = world.tree.lease(world.tree.match(NAMESPACE, NO_IDS))
    for turn in range(1, 4):
        path = ids(range(10 * turn, 10 * turn + 10))
        world.tree.insert(lease, path, path)
        world.tree.ended(lease, NO_IDS, 1)
        table = policy._table
        assert table._ended.sum() == turn - 1 and (table._kinds >= 0).sum() == 1, "nothing is learned"
        assert policy.forecast(lease.node) is not None
        world.now += 60.0
        world.tree.use(lease, 0)
    assert table._ended[:, int(stay_table._place(60.0))].sum() == 3
    assert not list(policy.candidates())


def test_stays_that_sessions_hold_are_learned_from() -> None:
    check_held()


def check_shared() -> None:
    """The end of a prompt from which conversations go on in different ways has stays of its own."""
    policy = HitDensity()
    world = World(policy, 1_000)
    prompt = list(range(10))
    for number in range(6):
        world.serve([*prompt, *range(100 * number + 100, 100 * number + 130)])
        assert world.stay([*prompt, *range(100 * number + 100, 100 * number + 130)]).turn == 1
    stay = world.stay(prompt)
    assert stay.kind >= SHARED_KINDS and stay.uses == 5
    assert policy._table._ended[SHARED_KINDS:].sum() == 3
    world.tree.evict(6 * 30)
    assert world.stay(prompt) is stay and stay.since == world.now, "its age is that since its last use by any"
    assert world.tree.num_pages == 10, "a shared prompt goes before what uses it"


def test_a_shared_prompt_has_stays_of_its_own() -> None:
    check_shared()


def check_superseded() -> None:
    """What a conversation has left out of its history goes before older pages."""
    world = World(HitDensity(), 1_000)
    other, path = list(range(500, 520)), list(range(30))
    world.serve(other)
    world.serve(path)
    world.serve([*path[:20], *range(100, 110)])
    assert world.stay(path).is_superseded
    assert sorted(world.tree.evict(10).tolist()) == path[20:]


def test_what_a_conversation_leaves_goes_first() -> None:
    check_superseded()


def test_the_end_of_an_answer_that_comes_again_differently_is_no_stay_of_the_whole_path() -> None:
    policy = HitDensity()
    world = World(policy, 1_000)
    world.serve(range(100))
    world.serve([*range(40), 500, 501])
    assert policy._table._ended.sum() == 0, "less than a half is used"
    world.serve([*range(95), 700])
    assert policy._table._ended.sum() == 1


# -- traffic


def hits(policy: EvictionPolicy, requests: Iterable[list[int]], pool: int) -> int:
    world = World(policy, pool)
    return sum(map(world.serve, requests))


def loop() -> Iterator[list[int]]:
    for turn in range(1_200):
        yield list(range(turn % 20 * 10, turn % 20 * 10 + 10))


def scan() -> Iterator[list[int]]:
    """Ten hot prompts, each with a question of its own, and long documents that are read once."""
    for turn in range(1_500):
        if turn % 3:
            yield [*range(turn % 10 * 20, turn % 10 * 20 + 20), 1_000 + turn]
        else:
            yield list(range(10_000 + turn * 50, 10_000 + turn * 50 + 40))


def check_loop() -> None:
    assert hits(eviction_policy("lru"), loop(), 100) == 0
    assert hits(HitDensity(), loop(), 100) > 0.35 * 12_000, "half of the loop fits"


def test_part_of_a_loop_longer_than_the_pool_stays() -> None:
    check_loop()


def test_a_scan_does_not_flush_what_is_hit() -> None:
    assert hits(HitDensity(), scan(), 260) > 1.3 * hits(eviction_policy("lru"), scan(), 260)


def test_the_same_requests_get_the_same_victims() -> None:
    assert hits(HitDensity(), scan(), 260) == hits(HitDensity(), scan(), 260)


def agents(requests: int) -> list[tuple[list[int], int]]:
    """After a call, token 1, a session goes on soon; after an answer, token 2, after all the others or never."""
    draw = np.random.default_rng(1)
    sessions = [[1_000 + at] * 8 for at in range(8)]
    found = []
    for number in range(requests):
        at = int(draw.integers(3)) if number % 4 else int(draw.integers(3, 8))
        ends = draw.random() < 0.2
        sessions[at] = [*sessions[at][:40], *([number + 10] * 4)]
        found.append((sessions[at], 2 if ends else 1))
        if ends:
            sessions[at] = [2_000 + number] * 8
    return found


def check_agents() -> None:
    """What ended with an answer goes first."""
    rates = []
    for name, told in (("lru", True), ("density", False), ("density", True)):
        world = World(eviction_policy(name), 180)
        rates.append(sum(world.serve(request, ending if told else 0) for request, ending in agents(3_000)))
    assert rates[2] > 1.02 * max(rates[:2]), rates


def test_calls_of_tools_stay_and_answers_go() -> None:
    check_agents()


def check_told() -> None:
    """Endings that are told, also after the output has ended, are worth as much as last tokens that say the same."""
    rates = []
    for shown, told in ((False, False), (True, False), (False, True)):
        policy = HitDensity()
        world = World(policy, 180)
        rates.append(
            sum(
                world.serve(
                    request, ending if shown else 0, told=(Ending.TOOL, Ending.ANSWER)[ending - 1] if told else None
                )
                for request, ending in agents(3_000)
            )
        )
    assert sum(policy.counters().told_endings.values()) > 2_500
    assert rates[2] > 1.02 * rates[0] and rates[2] > 0.98 * rates[1], rates


def test_endings_that_are_told_are_used() -> None:
    check_told()


def check_told_candidate() -> None:
    """The ending of an output is told when its leaf is a candidate already, and before it is one."""
    policy = HitDensity()
    world = World(policy, 1_000)
    for number in range(0, 8_000, 20):  # after calls sessions go on, after answers they do not
        for path, after, ending in ((number, 1.0, Ending.TOOL), (number, 5.0, None), (number + 10, 1.0, Ending.ANSWER)):
            world.serve(range(path, path + 10), after=after, told=ending)
    world.tree.evict(world.tree.num_pages)
    calls, answers = list(range(900_000, 900_010)), list(range(910_000, 910_010))
    world.serve(calls, told=Ending.TOOL)
    world.serve(answers, told=Ending.ANSWER)
    assert world.stay(answers).kind // KINDS == TOLD[Ending.ANSWER]
    ends = [world.tree.match(NAMESPACE, ids(path)).path[-1] for path in (calls, answers)]
    tool, answer = map(policy.forecast, ends)
    assert tool is not None and answer is not None and tool.chance > 2 * answer.chance
    assert "tool" in tool.kind and "answer" in answer.kind
    world.tree.evict(10)
    assert world.tree.match(NAMESPACE, ids(calls)).num_pages == 10, "what waits for a tool goes before an answer"


def ids(path: Iterable[int]) -> Ids:
    return np.array(list(path), dtype=np.int32)


def test_an_ending_changes_the_place_of_a_candidate() -> None:
    check_told_candidate()


def check_priced() -> None:
    """With a price that grows, the long path of two that are alike stays."""
    for growth, stays in ((0.0, "young"), (1.0, "long")):
        policy = HitDensity()
        policy.priced_by(growth)
        world = World(policy, 1_000)
        world.serve(range(100, 300))  # long, and older
        world.serve(range(10), after=0.1)
        gone = world.tree.evict(10)
        assert (gone < 100).all() == (stays == "long"), growth
    policy = HitDensity()
    policy.priced_by(1.0)
    world = World(policy, 1_000)
    world.serve(range(100))
    world.serve([*range(60), *range(500, 510)])
    assert world.stay(range(100)).is_superseded
    assert sorted(world.tree.evict(40).tolist()) == list(range(60, 100)), "what is left has lost its part"


def test_long_paths_stay_if_their_ends_cost_more() -> None:
    check_priced()


# -- endings


def check_endings() -> None:
    draw = np.random.default_rng(0)
    known = Endings()

    def class_of(token: int) -> int:
        return known.class_of(token.to_bytes(4, "little"))[0]

    assert class_of(5) == 0, "a class of its own after one output"
    drawn = [int(draw.choice([7, 8, draw.integers(100, 10_000)], p=[0.5, 0.2, 0.3])) for _ in range(2_000)]
    classes = {token: class_of(token) for token in drawn}
    assert len({classes[7], classes[8], 0}) == 3 and max(classes.values()) < CLASSES
    assert Counter(classes.values())[0] > 500


def test_frequent_last_tokens_are_classes_and_others_are_not() -> None:
    check_endings()
    known = Endings()
    for token in range(100_000):
        known.class_of(token.to_bytes(4, "little"))
    assert len(known._counts) < 20, "memory is not bounded"


def test_the_class_of_an_ending_that_is_rare_now_is_given_to_another() -> None:
    known = Endings()
    for token in (1, 2, 3):
        for _ in range(20):
            known.class_of(bytes([token]))
    given_up = [known.class_of(b"new") for _ in range(80)]
    assert given_up[0] == (0, False) and given_up[-1][0] > 0
    assert sum(is_new for _, is_new in given_up) == 1


def test_new_endings_become_classes_however_long_there_were_others() -> None:
    """After new weights or another template: the counts of a long time are halved."""
    known = Endings()
    for number in range(50_000):
        known.class_of(b"%d" % (number % 3))
    for number in range(4_000):
        found, _ = known.class_of(b"new %d" % (number % 2))
    assert found > 0


def test_the_record_of_a_class_that_is_given_to_another_ending_is_deleted() -> None:
    policy, root = HitDensity(), Node(NAMESPACE, None, b"", b"", 0, 0)
    endings = [token for token in (b"a", b"b", b"c") for _ in range(20)] + [b"d"] * 60
    for ending in endings:
        leaf = Node(NAMESPACE, root, bytes(4), bytes(4), 0, 0)
        leaf.ending = ending
        policy.offered(leaf)
    counted = Counter(kind // KINDS for kind in policy._table._kinds.tolist() if kind >= 0)
    assert counted[policy._endings._classes[b"d"]] < 20 <= max(counted.values()), counted


def with_patch(check: Callable[[pytest.MonkeyPatch], None]) -> Callable[[], None]:
    def run() -> None:
        with pytest.MonkeyPatch.context() as patch:
            check(patch)

    return run


DENSITY = [
    with_patch(lambda patch: check_candidates(0, patch)),
    with_patch(check_worst_first),
    check_turns,
    check_parts,
    check_held,
    check_shared,
    check_superseded,
    check_loop,
    check_endings,
    check_agents,
    check_told,
    check_told_candidate,
    check_priced,
]
