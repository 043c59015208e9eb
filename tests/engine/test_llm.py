"""The Python API: prompts of every form, limits, n, stop tokens, log-probabilities, aborts, statistics, refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.engine.messages import EngineRequest, prompt_bytes
from quire.errors import ContextTooLong, InvalidInput, PlanError, QuireError, RequestTooLarge
from tests.tiny_models import save_tiny

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama without a tokenizer."""
    return save_tiny("llama_gqa", tmp_path_factory.mktemp("llm"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    """One engine for the tests that do not mind what is cached."""
    return LLM(str(folder), skip_tokenizer_init=True, kv_memory="2MiB", page_size=4)


def test_forms_of_a_prompt(llm: LLM) -> None:
    """A dict, a list of ids, and lists of them mean the same."""
    [one] = llm.generate({"prompt_token_ids": [5, 6, 7]}, GREEDY)
    [two] = llm.generate([5, 6, 7], GREEDY)
    three, four = llm.generate([[5, 6, 7], {"prompt_token_ids": [5, 6, 7]}], [GREEDY, GREEDY])
    assert len({tuple(o.outputs[0].token_ids) for o in (one, two, three, four)}) == 1
    assert one.prompt_token_ids == [5, 6, 7]
    assert one.outputs[0].finish_reason == "length"
    assert len(one.outputs[0].token_ids) == 8


def test_cached_tokens_are_reported(llm: LLM) -> None:
    """The second time, all whole pages but the last token's are reused, and the counters say so."""
    prompt = list(range(100, 130))
    before = llm.statistics()["hit_tokens"]
    [cold] = llm.generate({"prompt_token_ids": prompt}, GREEDY)
    [warm] = llm.generate({"prompt_token_ids": prompt}, GREEDY)
    assert cold.num_cached_tokens == 0
    assert warm.num_cached_tokens == 28
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
    assert llm.statistics()["hit_tokens"] - before == 28


def test_a_salt_shares_nothing(llm: LLM) -> None:
    """The same tokens under another salt are computed anew."""
    prompt = {"prompt_token_ids": list(range(60, 90))}
    llm.generate(prompt, GREEDY, salt="x")
    for salt in ("", "y"):
        assert llm.generate(prompt, GREEDY, salt=salt)[0].num_cached_tokens == 0
    assert llm.generate(prompt, GREEDY, salt="x")[0].num_cached_tokens > 0


def test_n_shares_the_prompt(llm: LLM) -> None:
    """Three sequences: the prompt is computed once, the draws differ, and a seed repeats them."""
    params = SamplingParams(n=3, temperature=1.5, seed=4, max_tokens=6, ignore_eos=True)
    prompt = {"prompt_token_ids": list(range(200, 241))}
    before = llm.statistics()
    [first] = llm.generate(prompt, params)
    after = llm.statistics()
    assert after["hit_tokens"] - before["hit_tokens"] == 2 * 40
    assert len({tuple(o.token_ids) for o in first.outputs}) == 3
    [second] = llm.generate(prompt, params)
    assert [o.token_ids for o in second.outputs] == [o.token_ids for o in first.outputs]


def test_stop_tokens(llm: LLM) -> None:
    """A sequence ends with the stop token, which is its last, and says which it was."""
    [free] = llm.generate([9, 8, 7], GREEDY)
    stop = free.outputs[0].token_ids[3]
    end = free.outputs[0].token_ids.index(stop)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, stop_token_ids=[stop])
    [stopped] = llm.generate([9, 8, 7], params)
    assert stopped.outputs[0].token_ids == free.outputs[0].token_ids[: end + 1]
    assert stopped.outputs[0].finish_reason == "stop"
    assert stopped.outputs[0].stop_reason == stop


def test_logprobs(llm: LLM) -> None:
    """One entry per token; the greedy token is the most likely one."""
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=3, ignore_eos=True)
    [output] = llm.generate([1, 2, 3], params)
    assert output.outputs[0].logprobs is not None
    assert len(output.outputs[0].logprobs) == 4
    for token, row in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True):
        assert row[token].rank == 1
        assert len(row) == 3


def test_penalties_change_the_tokens_and_overlap_does_not(folder: Path) -> None:
    """Draws that depend on history wait for it: the same tokens with a step in flight."""
    params = SamplingParams(temperature=0, max_tokens=24, presence_penalty=2.0, repetition_penalty=9.0, ignore_eos=True)
    plain = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    results = []
    for overlap in (False, True):
        llm = LLM(str(folder), skip_tokenizer_init=True, kv_memory="1MiB", overlap=overlap)
        outputs = llm.generate([[1, 2, 3], [4, 5]], [params, plain])
        results.append([o.outputs[0].token_ids for o in outputs])
    assert results[0] == results[1]
    [free] = llm.generate([[1, 2, 3]], plain)
    assert results[0][0] != free.outputs[0].token_ids


def test_refusals_name_the_numbers(folder: Path) -> None:
    """What can never run is refused at once, nothing else is lost, and the limit that is named is the limit."""
    llm = LLM(str(folder), skip_tokenizer_init=True, kv_memory=5 * 4608 * 4 // 4, page_size=4, max_model_len=100)
    limit = llm.statistics()["largest_request"]
    assert limit == llm.statistics()["num_pages"] * 4 + 1 < 100
    with pytest.raises(RequestTooLarge, match=rf"more than {limit} tokens") as refused:
        llm.generate([[1] * limit], SamplingParams(max_tokens=1))
    assert "kv-memory" in refused.value.fix
    [output] = llm.generate([[1] * (limit - 1)], SamplingParams(max_tokens=1, temperature=0))
    assert len(output.outputs[0].token_ids) == 1
    with pytest.raises(ContextTooLong, match="the context is 100 tokens"):
        llm.generate([[1] * 95], SamplingParams(max_tokens=6))
    with pytest.raises(InvalidInput, match="empty"):
        llm.generate([{"prompt_token_ids": []}], GREEDY)
    with pytest.raises(InvalidInput, match="nothing else"):
        llm.generate([{"prompt_token_ids": [1], "cache_salt": "a"}], GREEDY)
    with pytest.raises(InvalidInput, match="outside the vocabulary"):
        llm.generate([[1, 256]], GREEDY)
    with pytest.raises(InvalidInput, match="tokenizer"):
        llm.generate("text", GREEDY)
    assert llm.statistics()["refused_requests"] >= 3
    assert llm.statistics()["frames"]["full"]["private"] == 0


def test_one_bad_prompt_runs_none(llm: LLM) -> None:
    """A batch is checked before it runs."""
    before = llm.statistics()["output_tokens"]
    with pytest.raises(QuireError):
        llm.generate([[1, 2], [3] * 100_000], GREEDY)
    assert llm.statistics()["output_tokens"] == before
    assert not llm.engine.has_work()


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"kv_memory": "100B"}, PlanError, "cannot hold one page"),
        ({"kv_memory": "lots"}, InvalidInput, "is not a size"),
        ({"page_size": 0}, InvalidInput, "page_size"),
        ({"dtype": "int3"}, InvalidInput, "dtype"),
        ({"device": "tpu9"}, InvalidInput, "not a device"),
        ({"max_model_len": 10**9}, InvalidInput, "beyond the model"),
        ({"policy": "random"}, InvalidInput, "policy"),
        ({"no_such_setting": 1}, InvalidInput, "no_such_setting"),
    ],
)
def test_bad_settings(folder: Path, settings: dict[str, object], error: type[QuireError], message: str) -> None:
    """Each names what is wrong."""
    with pytest.raises(error, match=message):
        LLM(str(folder), skip_tokenizer_init=True, **settings)


def test_a_failing_step_ends_its_requests_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that raises takes the requests of that step with it, leaks nothing, and the engine goes on."""
    llm = LLM(str(folder), skip_tokenizer_init=True, kv_memory="1MiB")
    [before] = llm.generate([[1, 2, 3]], GREEDY)
    run_model, calls = llm.engine.model.run, iter(range(100))

    def failing(*arguments: object, **named: object) -> object:
        if next(calls) == 3:
            raise RuntimeError("the device fell over")
        return run_model(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(llm.engine.model, "run", failing)
    with pytest.raises(QuireError, match="the device fell over"):
        llm.generate([[1, 2, 3], [4, 5, 6]], GREEDY)
    llm.engine.audit()
    assert llm.statistics()["frames"]["full"]["private"] == 0
    assert llm.statistics()["frames"]["full"]["moving"] == 0
    [after] = llm.generate([[1, 2, 3]], GREEDY)
    assert after.outputs[0].token_ids == before.outputs[0].token_ids


def test_a_failing_step_with_a_scored_prompt_ends_its_requests_only(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(str(folder), skip_tokenizer_init=True, kv_memory="1MiB")
    run_model = llm.engine.model.run
    monkeypatch.setattr(llm.engine.model, "run", lambda *_, **__: 1 / 0)
    with pytest.raises(QuireError, match="division by zero"):
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1, prompt_logprobs=1))
    monkeypatch.setattr(llm.engine.model, "run", run_model)
    [after] = llm.generate([[1, 2, 3]], GREEDY)
    assert after.outputs[0].token_ids


def test_tools_that_a_template_does_not_show_are_refused() -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]
    messages = [{"role": "user", "content": "Hi"}]
    with pytest.raises(InvalidInput, match="shows no tools"):
        LLM(kv_memory="16MiB").chat(messages, SamplingParams(max_tokens=1), tools=tools)
    llm = LLM("quire-bundled-agent", kv_memory="16MiB", max_model_len=1024)
    asked = SamplingParams(max_tokens=1)
    [plain], [shown] = llm.chat(messages, asked), llm.chat(messages, asked, tools=tools)
    assert len(shown.prompt_token_ids) > len(plain.prompt_token_ids)


def test_an_adapter_is_refused(llm: LLM) -> None:
    """Answering with the base weights would be a wrong answer without a word."""
    message = EngineRequest(request_id="a-0", prompt=prompt_bytes([1, 2]), params=GREEDY, adapter="x")
    with pytest.raises(InvalidInput, match="loads no adapters"):
        llm.engine.add(message)


def test_a_preempted_request_counts_once(folder: Path) -> None:
    """Reuse is told per request, whatever happened to it on the way."""
    llm = LLM(str(folder), skip_tokenizer_init=True, kv_memory=3 * 2 * 2 * 16 * 4 * 4 * 14, page_size=4)
    prompts = [[i * 7 + 1] * 20 for i in range(4)]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    statistics = llm.statistics()
    assert statistics["preemptions"] > 0
    assert statistics["prompt_tokens"] == sum(map(len, prompts))
    assert statistics["hit_tokens"] == sum(output.num_cached_tokens for output in outputs)
