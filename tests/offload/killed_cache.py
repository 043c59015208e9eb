"""A process that starts caches on a store, each of which lives until it is killed.

A job has `url`, `seed` (of the layouts and prompts), `life` (of what happens), `turns`, `generations` of what earlier
lives have flushed, and `die_at`: as writers of a directory have it, ["move", n] when so many moves were begun, ["open",
seconds] after the store began to be opened, or null.
"""

from __future__ import annotations

import random
from typing import Any

import torch

from quire.settings.fields import PrefetchPolicy, WritePolicy
from quire.tiers.store import Store
from quire.tiers.stores.directory import DirectoryStore
from quire.tiers.stores.registry import directory_of, open_store
from quire.tiers.transfer import Transfer
from tests.forked import Say, die_in, serve
from tests.offload.random_life import EPOCHS, RandomLife
from tests.offload.threaded_cache import MODELS, Generations, ThreadedCache, random_prompts
from tests.tiers.stores.directory_writer import arrange_death

CAPACITY = 768 << 10
"""Of the directory: less than all prompts take, so that it forgets."""


def open_killed(url: str) -> Store:
    """The store of these caches, however it was left."""
    return open_store(url, capacity=CAPACITY if directory_of(url) else None)


def work(job: dict[str, Any], say: Say) -> None:
    """Read back what earlier lives have stored, and go on. Raises AssertionError at a wrong byte."""
    torch.set_num_threads(1)
    rng = random.Random(f"{job['seed']} {job['life']}")
    where, when = job["die_at"] or ("", 0)
    if where == "open":
        die_in(say, when)
    store = open_killed(job["url"])
    cache = ThreadedCache(
        store,
        MODELS[job["seed"] % len(MODELS)],
        write=rng.choice(list(WritePolicy)),
        prefetch=rng.choice(list(PrefetchPolicy)),
        threads=rng.choice((1, 2, 4)),
        epoch=rng.choice(EPOCHS),
        generations=Generations(**job["generations"]),
    )
    if isinstance(store, DirectoryStore):
        say({"reclaimed": store.statistics["reclaimed"]})
    arrange(cache, store, where, when, say)
    life = RandomLife(cache, random_prompts(job["seed"]), rng, say, flushes=job.get("flushes", True))
    say({"storage_hits": life.read_back()})
    life.steps(job["turns"])
    life.end()
    tiers = cache.tiers
    assert tiers is not None
    cache.close()
    say({"ended": dict(life.happened), "hits": cache.hits, "defects": len(tiers.counters.defects)})


def arrange(cache: ThreadedCache, store: Store, where: str, when: float, say: Say) -> None:
    """This process will be killed, if it is not about to be already."""
    if where == "time":
        die_in(say, when)
    elif where == "move":
        die_at_move(cache, when, say)
    elif where in ("statement", "write"):
        assert isinstance(store, DirectoryStore)
        arrange_death(store, where, int(when))


def die_at_move(cache: ThreadedCache, left: float, say: Say) -> None:
    """It goes on until it is killed, which is when so many moves were begun."""
    really = cache.mover.submit

    def submit(move: Transfer) -> bool:
        nonlocal left
        left -= 1
        taken = really(move)
        if left == 0:
            die_in(say, 0.0)
        return taken

    cache.mover.submit = submit  # type: ignore[method-assign]


if __name__ == "__main__":
    serve(work)
