"""The same tokens with drafts and without: every kind of attention, whatever is proposed, however short memory is."""

from __future__ import annotations

from typing import Any

import pytest

from quire.counters import plain
from quire.engine.core import EngineCore
from quire.engine.messages import EngineRequest, prompt_bytes
from quire.models.hf import LoadedModel
from quire.scheduler.sampling_params import SamplingParams
from quire.spec.events import Namespace
from quire.spec.pages import pages_for
from quire.speculative.ngram import NgramDrafter
from quire.speculative.speculator import Speculator
from tests.changes import DRAFTS, in_turns, slow_unless_changed
from tests.covering import covering
from tests.engine.running import core_for, run, tight_core
from tests.engine.scripted import SCRIPTS, drafts_with, follow_script
from tests.engine.test_hybrid_tokens import GREEDY, NEW_TOKENS, PROMPTS, SERVED, Case, case_of
from tests.tiny_models import build_tiny

NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
BOUNDS = {"max_model_len": 256, "max_running_requests": 8}
KINDS = [
    "deepseek_v32",
    "falcon_h1",
    "gemma3_text",
    "gpt_oss",
    "jamba",
    "llama4_text",
    "minimax_m3",
    "qwen3_next",
    "deepseek_v3",
]
PAGES = (1, 4, 16, 64)


def drafting_core(model: LoadedModel, page_size: int, **settings: Any) -> EngineCore:
    return core_for(model, page_size=page_size, speculative_config=NGRAM, **BOUNDS, **settings)


def check_counts(speculator: Speculator, script: str) -> None:
    found = plain(speculator.counted())
    right, wrong = found["accepted_tokens"], found["draft_tokens"] - found["accepted_tokens"]
    assert (right > 0) == (script != "none"), "drafts that are right are not accepted"
    assert wrong > 0 or script == "all right", "no draft was rejected, so this shows little"


def check_script(case: Case, page_size: int, script: str, chunk: int = 50) -> None:
    """Cold and warm."""
    model, expected = case
    core = drafting_core(model, page_size, max_num_batched_tokens=chunk)
    speculator = follow_script(core, PROMPTS, expected, script)
    for turn in ("cold", "warm"):
        assert run(core, PROMPTS, GREEDY, turn) == expected
    check_counts(speculator, script)
    found = core.statistics()
    if page_size < 64:
        assert found["hit_tokens"] > 0
    assert all(frames["private"] == 0 for frames in found["frames"].values())


@pytest.fixture(scope="module", params=in_turns(KINDS, 3, *DRAFTS))
def case(request: pytest.FixtureRequest) -> Case:
    return case_of(request.param)


@covering(name=in_turns(KINDS, 3, *DRAFTS), script=sorted(SCRIPTS))
def test_same_tokens(name: str, script: str) -> None:
    place = KINDS.index(name) + sorted(SCRIPTS).index(script)
    check_script(case_of(name), PAGES[place // 2 % len(PAGES)], script)


def test_starved(case: Case) -> None:
    """Preempted with drafts, evicted between, and nothing is different."""
    model, expected = case
    page_size = 4
    kinds = [group.reach.kind for group in model.spec.groups(page_size)]
    longest = max(map(len, PROMPTS)) + NEW_TOKENS
    core = tight_core(
        model,
        num_tokens=(pages_for(longest + 12, page_size) + 8) * page_size,
        window_tokens=44,
        page_size=page_size,
        max_num_batched_tokens=17,
        max_running_requests=3,
        max_mamba_cache_size=4 if "state" in kinds else None,
        speculative_config=NGRAM,
    )
    speculator = follow_script(core, PROMPTS, expected, "wrong in the third")
    for turn in range(2):
        assert run(core, PROMPTS, GREEDY, f"turn{turn}") == expected
    check_counts(speculator, "wrong in the third")
    assert all(owners["private"] == 0 for owners in core.statistics()["frames"].values())


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(SERVED) - set(KINDS)))
@pytest.mark.parametrize("page_size", PAGES)
def test_same_tokens_everywhere(name: str, page_size: int) -> None:
    case = case_of(name)
    for script in sorted(SCRIPTS):
        check_script(case, page_size, script)


REPEATING = [[5, 6, 7, 8] * 6, [9, 3, 9, 3, 9, 3, 4], [1, 2, 3] * 5]
MANY = {
    "greedy": SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
    "seeded": SamplingParams(temperature=0.9, seed=3, max_tokens=40, ignore_eos=True, top_p=0.9),
    "cool": SamplingParams(temperature=0.05, seed=1, max_tokens=40, top_k=5),
    "penalties": SamplingParams(temperature=0.05, seed=2, max_tokens=40, repetition_penalty=1.1, frequency_penalty=0.2),
    "least": SamplingParams(temperature=0, max_tokens=40, min_tokens=30),
    "stop": SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop_token_ids=[17, 40, 99]),
    "biased": SamplingParams(temperature=0, max_tokens=40, logit_bias={7: 30.0}, ignore_eos=True),
}


@pytest.fixture(scope="module")
def llama() -> LoadedModel:
    return LoadedModel(build_tiny("llama_gqa"), name="llama_gqa")


@slow_unless_changed(*DRAFTS)
@covering(params=sorted(MANY), page_size=[1, 4])
def test_every_kind_of_draw(llama: LoadedModel, params: str, page_size: int) -> None:
    """Of n-grams, and of a script that knows the draws."""
    expected = run(core_for(llama, page_size=page_size, **BOUNDS), REPEATING, MANY[params])
    core = drafting_core(llama, page_size)
    assert run(core, REPEATING, MANY[params]) == expected
    for script in SCRIPTS:
        speculator = follow_script(core, REPEATING, expected, script)
        assert run(core, REPEATING, MANY[params], script) == expected
        if max(map(len, expected)) > 10:
            check_counts(speculator, script)


TREE = {**NGRAM, "num_speculative_tokens": 4, "topk": 3, "num_draft_tokens": 12}
BRANCHING = ["llama_gqa", "gemma3_text", "gpt_oss", "deepseek_v3"]


@slow_unless_changed(*DRAFTS)
@covering(name=BRANCHING, script=sorted(SCRIPTS))
def test_trees(name: str, script: str, tree_cases: dict[str, Case]) -> None:
    """Drafts that branch, in the middle of pages, of several requests at once: rows that were right are moved down."""
    model, expected = tree_cases[name]
    page_size = PAGES[(BRANCHING.index(name) + sorted(SCRIPTS).index(script)) % len(PAGES)]
    core = core_for(model, page_size=page_size, speculative_config=TREE, **BOUNDS)
    speculator = follow_script(core, PROMPTS, expected, script)
    for turn in ("cold", "warm"):
        assert run(core, PROMPTS, GREEDY, turn) == expected
    found = plain(speculator.counted())
    right = found["accepted_tokens"]
    assert (right > 0) == (script != "none") and found["draft_tokens"] > 2 * right


@pytest.fixture(scope="module")
def tree_cases() -> dict[str, Case]:
    llama = LoadedModel(build_tiny("llama_gqa"), name="llama_gqa")
    expected = run(core_for(llama, page_size=4, **BOUNDS), PROMPTS, GREEDY)
    return {name: case_of(name) for name in BRANCHING if name != "llama_gqa"} | {"llama_gqa": (llama, expected)}


@slow_unless_changed(*DRAFTS)
@pytest.mark.parametrize("params", ["greedy", "penalties", "seeded", "stop"])
def test_trees_of_n_grams(llama: LoadedModel, params: str) -> None:
    expected = run(core_for(llama, page_size=4, **BOUNDS), REPEATING, MANY[params])
    core = core_for(llama, page_size=4, speculative_config={**TREE, "prompt_lookup_max": 2}, **BOUNDS)
    assert core.speculator is not None
    drafts_with(core, core.speculator.drafter, 4)
    for turn in range(2):
        assert run(core, REPEATING, MANY[params], f"turn{turn}") == expected
    assert (core.speculator.counted().draft_tokens > 0) == (params != "penalties")


@pytest.mark.parametrize("name", ["qwen3_next", "llama4_text", "deepseek_v32"])
def test_trees_that_cannot_be_verified_are_refused(name: str) -> None:
    from quire.errors import UnsupportedModel

    model, _ = case_of(name)
    with pytest.raises(UnsupportedModel, match="topk"):
        core_for(model, page_size=16, speculative_config=TREE, **BOUNDS)


def test_log_probabilities(llama: LoadedModel) -> None:
    """Each token of a step with several has its own, as without drafts."""
    params = SamplingParams(temperature=0, max_tokens=24, logprobs=3, ignore_eos=True)

    def outputs(core: EngineCore) -> list[Any]:
        core.add(EngineRequest(request_id="a", prompt=prompt_bytes(REPEATING[0]), params=params))
        return [output for _ in range(60) if core.has_work() for output in core.step()]

    plain = outputs(core_for(llama, page_size=4, **BOUNDS))
    core = drafting_core(llama, 4)
    expected = [token for output in plain for token in output.token_ids]
    speculator = follow_script(core, REPEATING[:1], [expected], "wrong in the third")
    found = outputs(core)
    assert [token for output in found for token in output.token_ids] == expected
    assert max(len(output.token_ids) for output in found) > 1
    said = [each for output in found for each in output.logprobs or ()]
    before = [each for output in plain for each in output.logprobs or ()]
    assert [(each.rank, each.top_ids) for each in said] == [(each.rank, each.top_ids) for each in before]
    assert [each.logprob for each in said] == pytest.approx([each.logprob for each in before], abs=1e-4)
    check_counts(speculator, "wrong in the third")


def test_an_abort_with_drafts(llama: LoadedModel) -> None:
    """A request that ends between steps leaves nothing, and its neighbours draw what they would."""
    expected = run(core_for(llama, page_size=4, **BOUNDS), REPEATING, MANY["greedy"])
    core = drafting_core(llama, 4)
    follow_script(core, REPEATING, expected, "wrong in the third")
    for name, prompt in zip("abc", REPEATING, strict=True):
        core.add(EngineRequest(request_id=name, prompt=prompt_bytes(prompt), params=MANY["greedy"]))
    tokens: dict[str, list[int]] = {name: [] for name in "abc"}
    for step in range(100):
        if step == 4:
            *_, room = core.scheduler.drafting()
            assert room.any(), "nothing could be drafted, so this shows little"
            core.abort("b")
        for output in core.step() if core.has_work() else ():
            tokens[output.request_id] += output.token_ids
    core.audit()
    assert [tokens["a"], tokens["c"]] == [expected[0], expected[2]]
    assert tokens["b"] == expected[1][: len(tokens["b"])]
    assert all(frames["private"] == 0 for frames in core.statistics()["frames"].values())


def test_what_cannot_run_is_refused() -> None:
    """By name, before a model is loaded."""
    from quire.engine.config import engine_config
    from quire.errors import InvalidInput

    with pytest.raises(InvalidInput, match="overlap"):
        engine_config(speculative_config=NGRAM, overlap=True)
    with pytest.raises(InvalidInput, match="num_speculative_tokens"):
        engine_config(speculative_config='{"method": "ngram", "num_speculative_token": 4}')


def test_a_drafter_that_fails_costs_its_drafts(llama: LoadedModel, caplog: pytest.LogCaptureFixture) -> None:
    expected = run(core_for(llama, page_size=4, **BOUNDS), REPEATING, MANY["greedy"])
    core = drafting_core(llama, 4)
    speculator = follow_script(core, REPEATING, expected, "wrong in the third")
    propose, calls = speculator.drafter.propose, 0

    def fails_at_times(drafting: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % 3 == 0:
            raise RuntimeError("out of device memory")
        return propose(drafting)

    speculator.drafter.propose = fails_at_times  # type: ignore[method-assign]
    assert run(core, REPEATING, MANY["greedy"]) == expected
    assert calls > 3 and "proposing them failed" in caplog.text
    check_counts(speculator, "wrong in the third")


def test_requests_of_before_a_flush_are_not_proposed_from(llama: LoadedModel) -> None:
    """Also where one still ran when it came."""
    core = core_for(llama, page_size=4, speculative_config={**NGRAM, "shared_history": True}, **BOUNDS)
    core.add(EngineRequest(request_id="a", prompt=prompt_bytes(REPEATING[0]), params=MANY["greedy"]))
    core.step()
    core.flush(None)
    while core.has_work():
        core.step()
    assert isinstance(core.speculator.drafter, NgramDrafter)
    assert not core.speculator.drafter._history.num_texts
    run(core, REPEATING[:1], MANY["greedy"])
    assert core.speculator.drafter._history.num_texts == 1


def test_a_flush_of_one_namespace_leaves_the_history_of_others(llama: LoadedModel) -> None:
    core = core_for(llama, page_size=4, speculative_config={**NGRAM, "shared_history": True}, **BOUNDS)

    def add(name: str, salt: str) -> None:
        prompt = prompt_bytes(REPEATING[0])
        core.add(EngineRequest(request_id=name, prompt=prompt, params=MANY["greedy"], salt=salt))

    ended = []
    core.speculator.drafter.ended = lambda namespace, *_: ended.append(namespace.salt)
    for name, salt in (("a", "one"), ("b", "other")):
        add(name, salt)
    core.step()
    core.flush(Namespace("", "one"))
    while core.has_work():
        core.step()
    assert ended == ["other"]


def test_a_request_that_ends_at_a_stop_string_is_remembered(llama: LoadedModel) -> None:
    """One whose client has left is not."""
    core = core_for(llama, page_size=4, speculative_config={**NGRAM, "shared_history": True}, **BOUNDS)
    for stopped in (False, True):
        core.add(EngineRequest(request_id="a", prompt=prompt_bytes(REPEATING[0]), params=MANY["greedy"]))
        for _ in range(3):
            core.step()
        core.abort("a", stopped=stopped)
        while core.has_work():
            core.step()
        assert isinstance(core.speculator.drafter, NgramDrafter)
        assert core.speculator.drafter._history.num_texts == int(stopped)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"num_speculative_tokens": 10**9}, "at most 256"),
        ({"prompt_lookup_max": 10**6}, "at most 64"),
        ({"topk": 2, "num_draft_tokens": 1}, "below 2"),
        ({"shared_history": 1}, "true or false"),
    ],
)
def test_numbers_out_of_bounds_are_refused(more: dict[str, Any], said: str) -> None:
    from quire.errors import InvalidInput
    from quire.spec.speculation import SpeculativeConfig

    with pytest.raises(InvalidInput, match=said):
        SpeculativeConfig.parse({**NGRAM, **more})
