"""What the engine tells its eviction policy, and what it explains of it: tokens are the same whatever is evicted."""

from __future__ import annotations

import pytest

from quire.engine.config import engine_config
from quire.engine.core import EngineCore
from quire.engine.planning import cost_growth
from quire.prefix.hit_density import HitDensity
from quire.scheduler.sampling_params import SamplingParams
from quire.spec.ending import Ending
from tests.engine.running import core_for, generated, run, shared_prompts
from tests.engine.tiered import Case, build
from tests.tiny_models import VOCAB_SIZE

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def policy_of(core: EngineCore) -> HitDensity:
    found = core.cache.tree.policy
    assert isinstance(found, HitDensity)
    return found


@pytest.mark.parametrize("worth", ["tokens", "flops"])
def test_tokens_are_the_same_whatever_a_page_is_worth_and_whatever_is_told(dense: Case, worth: str) -> None:
    prompts = shared_prompts(3, shared=20, tails=(5, 30, 9, 44, 17, 26), vocabulary=VOCAB_SIZE)
    expected = [generated(build("llama_gqa"), prompt, 6) for prompt in prompts]
    core = core_for(dense.model, pages=14, page_size=8, eviction_worth=worth)
    for turn in range(4):
        for at, prompt in enumerate(prompts):
            name = f"t{turn}-{at}"
            assert run(core, [prompt], GREEDY, name) == [expected[at]]
            assert not core.tell_ending(f"{name}-0", Ending.TOOL), "its limit was told already"
    statistics = core.statistics()
    assert statistics["hit_tokens"] > 0 and statistics["evicted_pages"] > 0
    told = statistics["eviction"]["told_endings"]
    assert (told["tool"], told["answer"]) == (0, 0) and told["length"] >= 20
    assert (policy_of(core)._growth > 0) == (worth == "flops")


def test_a_reader_tells_what_the_engine_cannot_see(dense: Case) -> None:
    [prompt] = shared_prompts(5, shared=20, tails=(9,), vocabulary=VOCAB_SIZE)
    [first, second] = generated(build("llama_gqa"), prompt, 2)
    core = core_for(dense.model, pages=14, page_size=8)
    stops = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, stop_token_ids=[second])
    assert run(core, [prompt], stops, "a") == [[first, second]]
    assert core.tell_ending("a-0", Ending.TOOL) and not core.tell_ending("a-0", Ending.TOOL)
    assert core.statistics()["eviction"]["told_endings"] == {"tool": 1, "answer": 0, "length": 0}
    assert {each.kind for each in core.outline().branches} == {"turn 1, short, ended: tool"}


def test_explanations_say_what_the_policy_takes_a_prefix_for(dense: Case) -> None:
    prompts = shared_prompts(3, shared=16, tails=(40, 40, 40), vocabulary=VOCAB_SIZE)
    core = core_for(dense.model, pages=14, page_size=8)
    for at, prompt in enumerate([*prompts, prompts[0], prompts[2]]):
        run(core, [prompt], GREEDY, f"e{at}")
    kinds = {}
    for at in range(5):
        for reason in core.explain(f"e{at}-0")[f"e{at}-0"].reasons:
            if reason.kind:
                kinds[str(reason.cause)] = reason
                assert 0 < (reason.chance or 0) < 1 and (reason.expected_s or 0) >= 0
    assert kinds.keys() == {"hit", "evicted"}
    assert kinds["evicted"].kind == "turn 1, short, ended: length"
    told = core.explain("e3-0")["e3-0"].for_client()
    assert all(each.chance is None and not each.kind for each in told.reasons), "what others do is told to a client"


def test_late_tokens_cost_more_by_what_the_model_computes(dense: Case) -> None:
    def growth(worth: str) -> float:
        return cost_growth(engine_config(model=dense.model.name, eviction_worth=worth), dense.model)

    spec, model = dense.model.spec, dense.model
    heads = spec.query_heads
    assert heads is not None
    pairs = sum(2 * heads * (call.key_dim + call.value_dim) for call in spec.calls)  # type: ignore[union-attr]
    assert growth("tokens") == 0.0
    assert growth("flops") == pytest.approx(pairs / (2 * model.num_parameters), rel=0.1)
