"""Recorded operations on another engine's trees of windows and of states, replayed on Quire's cache with two groups.

The recorded trees keep windows and states by node and evict the least recently used. Quire keeps them by page, counts
what they are good for (018), and needs no copy to store a state (019). So after the first eviction the two hold other
windows and states: nothing differs before, some lengths differ after, and Quire finds more tokens in all. How many
lengths differ is pinned, first where each eviction takes what the recorded one took, then where it takes exactly what
is asked for (002). In every case the amount evicted, running out and the audit of the cache are checked.

512:mamba-radix finds far fewer: its eviction of pages takes no states along.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quire.cache import KVCache, RequestKV
from quire.errors import OutOfPages
from quire.spec.group import ReachSpec
from quire.spec.ids import Ids
from quire.testing import small_plan
from tests.changes import CORE, slow_unless_changed
from tests.golden.recorded import ids, load, needs_golden, result_of

pytestmark = needs_golden

_AFTER = np.array([7], dtype=np.int32)  # no recorded token: the last token of a prompt is never found in the cache


class Replay:
    """A cache with pages of one token and a group of windows or states. `in_step`: evict what was recorded."""

    def __init__(self, case: dict[str, Any], *, in_step: bool) -> None:
        self.is_window = case["kind"] == "swa"
        # A recorded window counts the tokens before the one that reads, Quire's that one as well.
        reach = ReachSpec("window", case["window"] + 1) if self.is_window else ReachSpec("state")
        frames = (case["pool"], case["pool_swa"] if self.is_window else case["mamba"])
        plan = small_plan(
            case["pool"], 1, max_requests=64, groups=("full", "other"), reaches=(ReachSpec(), reach), frames=frames
        )
        self.cache = KVCache(plan, eviction="lru")
        self.sizes = frames
        self.locks: dict[int, RequestKV] = {}
        self.in_step = in_step

    def run(self, op: dict[str, Any], entry: dict[str, Any]) -> dict[str, Any]:
        key = ids(op.get("key", []))
        match op["op"]:
            case "match":
                kv = self.begin(key)
                self.cache.finish(kv)
                found: dict[str, Any] = {"len": kv.num_cached}
            case "lock":
                kv = self.locks[op["id"]] = self.begin(key)
                found = {"len": kv.num_cached}
            case "unlock":
                self.cache.finish(self.locks.pop(op["id"]))
                found = {}
            case "evict":
                asked = [op["n"], op["n"] if self.is_window else max(1, op["n"] // 8)]
                found = {"evicted": self.evict(entry["evicted"] if self.in_step else asked)}
            case "insert":
                found = self.insert(key, entry)
            case other:
                raise AssertionError(f"unknown operation {other}")
        self.cache.audit()
        return found | {"state": self.state()}

    def begin(self, key: Ids) -> RequestKV:
        return self.cache.begin(np.concatenate((key, _AFTER)))

    def state(self) -> dict[str, list[int]]:
        free = [group.num_free for group in self.cache.groups]
        evictable = self.evictable()
        held = [size - mine - more for size, mine, more in zip(self.sizes, free, evictable, strict=True)]
        assert held[0] == self.cache.tree.num_protected
        return {"avail": free, "evictable": evictable, "protected": held}

    def evictable(self) -> list[int]:
        return [self.cache.tree.num_evictable, self.cache.groups[1].num_evictable]

    def evict(self, wanted: list[int]) -> list[int]:
        """Returns what was evicted of each group: of pages exactly what is wanted, and with each page its frame."""
        free, evictable = self.state()["avail"], self.evictable()
        most = [min(n, have) for n, have in zip(wanted, evictable, strict=True)]
        self.cache.parts.reclaim([have + n for have, n in zip(free, most, strict=True)], "", ())
        evicted = [now - before for now, before in zip(self.state()["avail"], free, strict=True)]
        assert evicted[0] == most[0]
        assert evicted[1] >= most[1]
        return evicted

    def insert(self, key: Ids, entry: dict[str, Any]) -> dict[str, Any]:
        kv = self.begin(key)
        found: dict[str, Any] = {"matched": kv.num_cached}
        if self.in_step and "evicted_for_space" in entry:
            self.evict(entry["evicted_for_space"])
        try:
            self.cache.extend([kv], [len(key) - kv.num_cached])
        except OutOfPages:
            self.cache.finish(kv)
            return found | {"oom": True}
        if len(key) > kv.num_cached:
            self.cache.launch(1, [kv], np.array([len(key)]))
        self.cache.finish(kv, key)
        return found


@slow_unless_changed(*CORE, "tests/golden/")
@pytest.mark.parametrize(
    ("name", "impl", "hits", "num_differing", "num_differing_exact"),
    [
        ("swa_p1_w4", "523:unified-py", 755, 57, 88),
        ("swa_p1_w4", "512:swa-radix", 692, 31, 118),
        ("swa_p1_w4", "512:unified-py", 692, 31, 118),
        ("mamba_p1", "523:unified-py", 427, 21, 18),
        ("mamba_p1", "512:mamba-radix", 257, 150, 137),
        ("mamba_p1", "512:unified-py", 430, 4, 14),
    ],
)
def test_windows_and_states(name: str, impl: str, hits: int, num_differing: int, num_differing_exact: int) -> None:
    recorded = load(f"radix_ops_{name}")
    log = result_of(recorded, impl)
    assert sum(found_in(entry) for entry in log) == hits
    for in_step, expected in ((True, num_differing), (False, num_differing_exact)):
        replay = Replay(recorded["case"], in_step=in_step)
        lengths, evicted, ours = 0, False, 0
        for op, entry in zip(recorded["ops"], log, strict=True):
            found = replay.run(op, entry)
            assert found.get("oom") == entry.get("oom")
            evicted = evicted or "evicted" in entry or "evicted_for_space" in entry
            if not evicted:
                assert {key: entry.get(key) for key in found} == found
            lengths += found_in(found) != found_in(entry)
            ours += found_in(found)
        assert lengths == expected
    assert ours > hits


def found_in(entry: dict[str, Any]) -> int:
    """The tokens that an operation found."""
    length: int = entry.get("len", entry.get("matched", 0))
    return length
