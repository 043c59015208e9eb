"""Flushing an engine, and replacing its weights while it runs: no later request uses what was cached before."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire.client.llm import LLM
from quire.engine.messages import EngineRequest
from quire.errors import InvalidInput
from quire.scheduler.sampling_params import SamplingParams
from quire.tiers.scope_facts import is_facts
from quire.tiers.stores.directory import DirectoryStore
from tests.serve.tiny_model import make_tiny_model
from tests.waits import SOON_S

PROMPT = list(range(1, 101))
GREEDY = SamplingParams(temperature=0, max_tokens=6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def llms(folder: Path, tmp_path: Path) -> Iterator[Any]:
    """Makes engines that share one store."""
    made: list[LLM] = []

    def make(**settings: Any) -> LLM:
        tiers = {"host_memory": "1MiB", "storage": str(tmp_path / "store"), "storage_size": "16MiB", "load": "always"}
        settings = tiers | {"prefetch": "wait_complete", "kv_memory": "64KiB", "max_model_len": 160} | settings
        made.append(LLM(str(folder), skip_tokenizer_init=True, dtype="float32", show_plan=False, **settings))
        return made[-1]

    yield make
    for llm in made:
        settle(llm)
        llm.engine.audit()
        llm.engine.close()


def ask(llm: LLM, prompt: list[int] = PROMPT, **options: Any) -> tuple[int, list[int]]:
    """How much was cached, and what was drawn."""
    [output] = llm.generate({"prompt_token_ids": prompt}, GREEDY, **options)
    return output.num_cached_tokens, list(output.outputs[0].token_ids)


def settle(llm: LLM) -> None:
    """Until nothing is on its way between tiers."""
    engine = llm.engine
    while engine.has_moves():
        engine.offload.ahead.wait_moves(1.0)
        engine.step()


def records(llm: LLM, *, are_facts: bool = False) -> int:
    settle(llm)
    store = DirectoryStore(Path(str(llm.config.storage)), None)
    try:
        return sum(is_facts(entry.key) is are_facts for entry in store.entries())
    finally:
        store.close()


@pytest.mark.parametrize("salt", ["", "a tenant's"])
def test_a_flushed_salt_is_in_no_tier_and_in_no_engine_that_starts_later(llms: Any, salt: str) -> None:
    llm = llms()
    for other in (salt, "another"):
        assert ask(llm, salt=other)[0] == 0
    settle(llm)
    assert ask(llms(), salt=salt)[0] == 96, "what is stored is found by others"
    assert llm.flush(salt=salt).flushed_tokens == 96
    assert ask(llm, salt=salt)[0] == 0, "also while the store is at it"
    llm.flush(salt=salt)
    settle(llm)
    later = llms()
    assert ask(later, salt=salt)[0] == 0
    assert ask(later, salt="another")[0] == 96


def test_a_flush_of_everything(llms: Any) -> None:
    llm = llms()
    drawn = ask(llm)[1]
    ask(llm, salt="b")
    for _ in range(3):
        assert records(llm) > 0
        llm.flush()
        assert records(llm) == 0
        assert ask(llm) == (0, drawn)
    assert ask(llm) == (96, drawn)
    end = time.monotonic() + SOON_S
    while records(llm, are_facts=True) != 1:  # what the store says of its pages is there again
        assert time.monotonic() < end


@pytest.mark.parametrize("tiers", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("kind", ["flush", "epoch"])
def test_requests_go_on_across_it_and_leave_nothing(llms: Any, tiers: bool, overlap: bool, kind: str) -> None:
    off: dict[str, Any] = {"host_memory": None, "storage": None, "storage_size": None, "load": "break_even"}
    off["prefetch"] = "break_even"
    llm = llms(overlap=overlap, max_num_batched_tokens=24, **({} if tiers else off))
    drawn = ask(llm)[1]
    llm.flush()
    for turn, steps in enumerate((1, 3, 6, 8), 1):
        engine = llm.engine
        engine.add(EngineRequest(request_id="r", prompt=np.array(PROMPT, dtype=np.int32).tobytes(), params=GREEDY))
        tokens: list[int] = []
        while steps:  # once it runs: what only waits for storage begins afterwards, and may be shared
            tokens += [token for output in engine.step() for token in output.token_ids]
            steps -= bool(engine.scheduler.num_running)
        done = llm.flush() if kind == "flush" else llm.set_weights_epoch(turn)
        assert done.held_tokens <= 96
        engine.audit()
        while engine.has_work():
            tokens += [token for output in engine.step() for token in output.token_ids]
            engine.audit()
        assert tokens == drawn, "a running request keeps what it has"
        settle(llm)
        assert not engine.cache.tree.hidden_roots and engine.cache.tree.num_pages == 0
        assert ask(llm)[0] == 0
        llm.flush()


def replace_weights(llm: LLM) -> None:
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in llm.engine.model.module.parameters():
            weight.add_(0.3 * torch.randn(weight.shape, generator=generator))


def test_new_weights_never_read_what_old_ones_left(llms: Any) -> None:
    llm, fresh = llms(), llms(storage=None, storage_size=None, prefetch="break_even")
    old = ask(llm)[1]
    replace_weights(fresh)
    new = ask(fresh)[1]
    assert new != old
    llm.engine.add(EngineRequest(request_id="r", prompt=np.array(PROMPT, dtype=np.int32).tobytes(), params=GREEDY))
    for _ in range(3):
        llm.engine.step()
    stored = records(llm)
    replace_weights(llm)
    done = llm.set_weights_epoch(1)
    assert done.flushed_tokens + done.held_tokens >= 96
    while llm.engine.has_work():
        llm.engine.step()
    assert ask(llm) == (0, new)
    assert ask(llm) == (96, new)
    assert records(llm) >= 2 * stored, "what is stored of the old ones stays, for engines that have them"
    assert ask(llms()) == (96, old), "such as this one"
    assert llm.statistics()["weights_epoch"] == 1


def test_an_epoch_twice_changes_nothing(llms: Any) -> None:
    llm = llms(weights_epoch=3)
    ask(llm)
    assert llm.set_weights_epoch(3).flushed_tokens == 0
    assert ask(llm)[0] == 96
    for bad in (-1, 2**63, True, "4", 1.0):
        with pytest.raises(InvalidInput, match="weights_epoch"):
            llm.set_weights_epoch(bad)
    assert ask(llm)[0] == 96
    assert llm.set_weights_epoch(4).flushed_tokens > 0
    assert ask(llm)[0] == 0


def test_what_is_to_be_kept_is_flushed_with_the_rest(llms: Any) -> None:
    llm = llms()
    ask(llm)
    granted = llm.retain({"prompt_token_ids": PROMPT}, ttl_seconds=60)
    assert granted.granted_tokens > 0
    assert llm.flush(salt="").num_retentions == 1
    assert not llm.release(granted.retention_id) and llm.engine.retained().retained_tokens == 0


def test_an_idle_engine_tries_again_to_have_the_store_forget(llms: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = llms()
    ask(llm)
    settle(llm)
    tiers = llm.engine.offload.tiers
    assert tiers is not None and llm.engine.tiers is not None and llm.engine.tiers.store is not None
    with monkeypatch.context() as patch:
        patch.setattr(type(llm.engine.tiers.store), "remove", lambda store, keys: 0)
        llm.flush()
        settle(llm)
        assert tiers.deletion.num_failed == 1 and not llm.engine.has_moves(), "not at once, or it would never rest"
    tiers.deletion._due_at = 0.0
    assert llm.engine.has_moves()
    assert records(llm) == 0 and tiers.deletion.scopes == {}
    assert llm.statistics()["tiers"]["failed_deletions"] == 1
