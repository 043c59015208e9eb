"""Outputs that follow a grammar: the same tokens in every engine, each allowed, and other requests as without."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import wait
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from quire.client.request_assembler import RequestAssembler
from quire.counters import plain
from quire.engine.messages import EngineRequest, prompt_bytes
from quire.errors import GrammarNotTried, InvalidInput, Overloaded
from quire.grammar import choice, compiler, ebnf, json_object, json_schema, lark, part, regex, trial
from quire.models.hf import load_model
from quire.scheduler.sampling_params import SamplingParams
from quire.spec.grammar import Grammar
from tests.engine import grammars
from tests.engine.grammars import CHAIN, FORMS, TREE, bundled, bundled_core, check_same, outputs_of, params, prompts
from tests.engine.running import add, run


@pytest.mark.parametrize("overlap", [False, True])
def test_same_tokens(overlap: bool) -> None:
    core = check_same(overlap=overlap)
    found = core.statistics()
    assert found["hit_tokens"] > 0
    assert found["grammar"]["compiled"] == 4
    assert found["grammar"]["masks"] > 100


@pytest.mark.slow
def test_starved() -> None:
    """Chunked, preempted and evicted between."""
    core = check_same(pages=60, max_num_batched_tokens=7, overlap=True)
    assert core.statistics()["preemptions"] > 0


@pytest.mark.parametrize("config", [CHAIN, pytest.param(TREE, marks=pytest.mark.slow)])
def test_drafts(config: dict[str, Any]) -> None:
    """Drafts follow the grammar, and tokens that it forces are drafts."""
    core = check_same(speculative_config=config)
    found = plain(core.speculator.counted()) if core.speculator is not None else {}
    assert found["accepted_tokens"] > 20


def test_draft_model() -> None:
    draft = load_model(grammars.BUNDLED)
    config = {"method": "draft_model", "model": grammars.BUNDLED, "num_speculative_tokens": 3}
    core = check_same(turns=1, draft=draft, speculative_config=config)
    assert core.speculator is not None and plain(core.speculator.counted())["accepted_tokens"] > 0


@pytest.mark.slow
def test_rejection_sampling() -> None:
    """Drafts that the grammar forbids are never drawn."""
    config = {
        "method": "draft_model",
        "model": grammars.BUNDLED,
        "num_speculative_tokens": 3,
        "rejection_sample_method": "standard",
    }
    core = bundled_core(draft=load_model(grammars.BUNDLED), speculative_config=config)
    grammars.check_outputs(run(core, prompts(), params()))


def test_others_draw_as_without() -> None:
    """Rows beside rows with a grammar."""
    plainly = [each for each, form in zip(params(), FORMS * 2, strict=True) if form is None]
    asked = [each for each, form in zip(prompts(), FORMS * 2, strict=True) if form is None]
    alone = run(bundled_core(), asked, plainly)
    beside = [each for each, form in zip(grammars.expected(), FORMS * 2, strict=True) if form is None]
    assert alone == beside


def test_its_end_is_the_end() -> None:
    """Whatever else is asked for."""
    core, (_, tokenizer) = bundled_core(), bundled()
    banned = dict.fromkeys(tokenizer.encode("yes", add_special_tokens=False).tolist(), -100.0)
    for more in ({}, {"ignore_eos": True}, {"logit_bias": banned}, {"repetition_penalty": 2.0, "top_k": 1}):
        given = SamplingParams(grammar=choice(["yes"]), max_tokens=20, **more)
        found = outputs_of(core, "Is it?", given)
        assert tokenizer.decode([token for each in found for token in each.token_ids]) == "yes"
        assert found[-1].finish_reason == "stop"
    with pytest.raises(InvalidInput, match="min_tokens"):
        SamplingParams(grammar=choice(["yes"]), min_tokens=4)


def test_sessions() -> None:
    """Each turn has its own grammar."""
    core, (_, tokenizer) = bundled_core(), bundled()
    tokens = tokenizer.encode("Tell me of Bath.").tolist()
    for turn, form in enumerate((json_object(), choice(["a", "b"]), None, regex("[0-9]{3}"))):
        given = SamplingParams(grammar=form, max_tokens=30, temperature=0)
        request = EngineRequest(request_id=f"t{turn}", prompt=prompt_bytes(tokens), params=given, session_id="s")
        add(core, request)
        drawn: list[int] = []
        while core.has_work():
            drawn += [token for output in core.step() for token in output.token_ids]
        text = tokenizer.decode(drawn)
        assert {0: text[:1] == "{", 1: text in ("a", "b"), 2: text != "", 3: text.isdecimal()}[turn]
        tokens += drawn + tokenizer.encode(" And then?", add_special_tokens=False).tolist()


def test_several_answers_of_one_prompt() -> None:
    """Each has a state of its own, and the prompt is shared."""
    _, tokenizer = bundled()
    params = SamplingParams(n=4, seed=5, temperature=2.0, max_tokens=30, grammar=regex(grammars.CODE))
    core, found = bundled_core(), dict[str, list[int]]()
    for request in RequestAssembler(
        request_id="r", prompt="So", prompt_token_ids=tokenizer.encode("So"), params=params, decoder=None
    ).engine_requests():
        add(core, request)
    while core.has_work():
        for output in core.step():
            found[output.request_id] = [*found.get(output.request_id, ()), *output.token_ids]
    texts = {tokenizer.decode(tokens) for tokens in found.values()}
    assert len(texts) > 1 and all(re.fullmatch(grammars.CODE, text) for text in texts)
    assert core.statistics()["grammar"]["cache_hits"] == 3


def _id(text: str) -> int:
    """The token that is this text."""
    (found,) = bundled()[1].encode(text, add_special_tokens=False).tolist()
    return int(found)


REFUSED = {
    "no text": (lark('start: start "a"'), "allows no text"),
    "an unknown rule": (lark("start: x"), "unknown name"),
    "no regular expression": (regex("[a"), "the regular expression cannot be compiled: unclosed character class. Fix:"),
    "none in a grammar": (lark('start: /[a/ "b"'), r'at 1\(8\): invalid regex "\[a": unclosed character class. Fix:'),
    "no type": (
        json_schema({"type": "strng"}),
        "the JSON schema cannot be compiled: Invalid type: strng. Fix: correct",
    ),
    "look-ahead": (json_schema({"type": "string", "pattern": "(?=a)b"}), "look-around"),
    "an unknown format": (json_schema({"type": "string", "format": "colour"}), "colour"),
    "a reference to itself": (json_schema({"$ref": "#"}), "allows no text"),
    "contradicting bounds": (json_schema({"type": "integer", "minimum": 3, "maximum": 1}), "minimum"),
    "another syntax": (ebnf("root ::= ("), "cannot be read"),
    "a rule that is not there": (ebnf("root ::= foo"), "foo"),
    "depth": (ebnf("root ::= " + "(" * 4000 + '"a"' + ")" * 4000), "cannot be read"),
    "JSON of llguidance": (lark('{"grammars": []}'), "brace"),
}


@pytest.mark.parametrize("schema", [False, {"required": 5}, {"properties": {"a": {"type": "string", "enum": 5}}}])
def test_schemas_that_are_none(schema: Any) -> None:
    with pytest.raises(InvalidInput, match="the JSON schema"):
        json_schema(schema)


def test_a_schema_may_allow_everything() -> None:
    params = SamplingParams(grammar=json_schema(True), max_tokens=4, temperature=0)
    assert outputs_of(bundled_core(), "x", params)[-1].finish_reason in ("stop", "length")


def test_llama_cpp_syntax_is_translated_where_it_is_compiled() -> None:
    form = ebnf('root ::= answer "!"\nanswer ::= "yes" | "no"')
    assert form.text.startswith("root ::=")
    ids = [token for each in outputs_of(bundled_core(), "x", SamplingParams(grammar=form)) for token in each.token_ids]
    assert bundled()[1].decode(ids) in ("yes!", "no!")


JOINED = lark("start: A\nA: " + " & ".join(f"/.*{each}.*/" for each in range(1000)))


def _nested(count: int) -> Any:
    """A schema whose objects are in each other by references."""
    defs: dict[str, Any] = {f"d{at}": _object({"$ref": f"#/$defs/d{at + 1}"}) for at in range(count)}
    return {"$defs": defs | {f"d{count}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def _object(inner: object) -> object:
    return {"type": "object", "properties": {"a": inner}, "required": ["a"]}


@pytest.mark.parametrize(
    "form",
    [json_schema(_nested(1000)), JOINED],
    ids=["overflows the stack", "takes minutes"],
)
def test_a_trial_ends_and_the_engine_does_not(form: Grammar) -> None:
    core = bundled_core()
    with pytest.raises(InvalidInput, match="the grammar takes over"):
        outputs_of(core, "x", SamplingParams(grammar=form))
    assert outputs_of(core, "x", SamplingParams(grammar=choice(["yes"])))[-1].finish_reason == "stop"
    core.close()


def test_a_trial_whose_process_was_killed_has_another() -> None:
    tried = trial.Trial(*_setup())
    tried.check(choice(["yes"]))
    tried._process.kill()
    tried._process.wait()
    tried.check(choice(["yes"]))
    tried.close()


def test_refusals_leave_no_pipe_open() -> None:
    tried = trial.Trial(*_setup())
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(2):
        with pytest.raises(InvalidInput, match="takes over"):
            tried.check(JOINED)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    tried.close()


def _compiler() -> compiler.Compiler:
    content, vocabulary, eos = _setup()
    return compiler.Compiler(lambda: content, vocabulary, eos)


def test_a_grammar_whose_trial_is_killed_may_be_tried_again() -> None:
    made, form = _compiler(), choice(["yes"])
    _, tried = made._loaded()
    os.kill(tried._process.pid, signal.SIGSTOP)
    found = made.compile(form)
    while found.running() and tried._unsent:
        time.sleep(0.001)
    tried._process.kill()
    with pytest.raises(GrammarNotTried, match="has ended with code -9"):
        found.result(60)
    assert made.compile(form).result(60).is_error() is False
    made.close()


def test_no_trial_starts_when_the_engine_ends() -> None:
    made = _compiler()
    _, tried = made._loaded()
    found = made.compile(JOINED)
    while tried._unsent:
        time.sleep(0.001)
    made.close()
    with pytest.raises(GrammarNotTried, match="the engine ends"):
        found.result(60)
    assert tried._process.poll() is not None


def test_no_trial_stays_when_the_engine_ends_while_the_tokenizer_loads() -> None:
    goes_on, (content, vocabulary, eos) = threading.Event(), _setup()
    made = compiler.Compiler(lambda: content if goes_on.wait(60) else None, vocabulary, eos)
    found = made.compile(choice(["yes"]))
    while not found.running():
        time.sleep(0.001)
    made.close()
    goes_on.set()
    with pytest.raises(GrammarNotTried, match="the engine ends"):
        found.result(60)


def test_a_trial_imports_what_its_engine_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "msgspec.py").write_text("raise ImportError")
    monkeypatch.chdir(tmp_path)
    tried = trial.Trial(*_setup())
    tried.check(choice(["yes"]))
    tried.close()


def test_the_stack_of_a_trial_is_smaller_than_its_engines() -> None:
    code = """if True:
        import json, sys
        from quire.errors import InvalidInput
        from quire.grammar import compiler, json_schema
        (content, *more), deep, flat = json.load(sys.stdin)
        made = compiler.Compiler(lambda: content, *more)
        deep, flat = (made.compile(json_schema(each)) for each in (deep, flat))
        assert isinstance(deep.exception(), InvalidInput) and not flat.exception()
        made.close()
    """
    limited = ["sh", "-c", 'ulimit -S -s 1024; exec "$@"', "sh", sys.executable, "-c", code]
    asked = json.dumps([_setup(), _nested(225), _nested(1)])
    subprocess.run(limited, check=True, timeout=120, input=asked, text=True)


def test_a_trial_ends_with_an_engine_that_is_killed() -> None:
    code = """if True:
        import json, sys
        from quire.grammar import choice, trial
        tried = trial.Trial(*json.loads(sys.stdin.readline()))
        tried.check(choice(["yes"]))
        print(tried._process.pid, flush=True)
        sys.stdin.read()
    """
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdin is not None and engine.stdout is not None
        engine.stdin.write(json.dumps(_setup()) + "\n")
        engine.stdin.flush()
        found = int(engine.stdout.readline())
        engine.kill()
    ends = time.monotonic() + 60
    while _runs(found):
        assert time.monotonic() < ends, "the trial's process goes on"
        time.sleep(0.02)


def _setup() -> tuple[str, int, list[int]]:
    model, tokenizer = bundled()
    content = tokenizer.portable()
    assert content is not None
    return content, model.spec.vocab_size, sorted(tokenizer.eos_token_ids)


def _runs(process: int) -> bool:
    """Whether it runs; what has ended and is not waited for does not."""
    with suppress(OSError):
        os.kill(process, 0)
        stat = Path(f"/proc/{process}/stat")
        return not (stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z")
    return False


def test_slow_masks_end_their_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part, "SLOW_S", 0.0)
    monkeypatch.setattr(part, "MASK_S", 0.0)
    end = outputs_of(bundled_core(), "x", SamplingParams(grammar=choice(["yes"])))[-1]
    assert end.finish_reason == "error" and "its masks take too long" in end.error


DOUBTFUL = lark('start: a\na: a a a | a a | /[a-z ]/ | ""')
"""Its masks become slower with each token."""


@pytest.mark.parametrize("config", [None, CHAIN, TREE])
def test_a_slow_grammar_ends_for_all_its_sequences(config: dict[str, Any] | None) -> None:
    check_a_slow_grammar(config)


def check_a_slow_grammar(config: dict[str, Any] | None) -> None:
    """And no other grammar, also of that owner, who takes too long in a step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(part, "STEP_S", 0.05)
        patch.setattr(part, "SLOW_S", 60.0)
        ends = _ends_of_slow_grammars(config)
    assert ends.pop("easy").finish_reason in ("stop", "length")
    assert {(end.finish_reason, "its masks take too long" in end.error) for end in ends.values()} == {("error", True)}


def _ends_of_slow_grammars(config: dict[str, Any] | None) -> dict[str, Any]:
    core, tokens = bundled_core(speculative_config=config), bundled()[1].encode("So")
    many = {f"s{each}": DOUBTFUL for each in range(8)} | {"easy": json_schema({"type": "integer", "maxLength": 9})}
    for name, form in many.items():
        given = SamplingParams(grammar=form, max_tokens=30, temperature=1.0, seed=len(name), ignore_eos=True)
        add(core, EngineRequest(request_id=name, prompt=prompt_bytes(tokens), params=given))
    ends: dict[str, Any] = {}
    while core.has_work():
        ends |= {output.request_id: output for output in core.step() if output.finish_reason}
    return ends


def test_an_owner_has_few_places_of_grammars_that_wait() -> None:
    goes_on = threading.Event()

    def content() -> None:
        goes_on.wait(60)

    made = compiler.Compiler(content, 100, [0])
    try:
        for each in range(compiler.MOST_PENDING_OF_ONE):
            made.compile(regex(f"a{each}"), "a")
        with pytest.raises(Overloaded, match="4 of them this client's"):
            made.compile(regex("b"), "a")
        made.compile(regex("b"), "b")
        for each in range(compiler.MOST_PENDING - compiler.MOST_PENDING_OF_ONE - 1):
            made.compile(regex(f"c{each}"))
        with pytest.raises(Overloaded, match="16 grammars wait"):
            made.compile(regex("d"), "d")
    finally:
        goes_on.set()
        made.close()


def test_a_reference_whose_base_drafts_read_differently() -> None:
    schema = {"$id": "http://a/b", "$ref": "#/$defs/c", "$defs": {"c": {"type": "string"}}}
    json_schema(schema)
    with pytest.raises(InvalidInput, match=r"an '\$id' beside a '\$ref' at #/allOf/0"):
        json_schema({"allOf": [schema]})


@pytest.mark.parametrize(
    ("kind", "right", "wrong"),
    [
        ("date", "2023-02-28 2024-02-29 2000-02-29 2023-12-31", "2023-02-29 1900-02-29 0000-01-01 2023-04-31"),
        ("date-time", "2023-02-28T23:59:59Z 2024-02-29t01:02:03.5-02:00", "2023-02-29T01:02:03Z 1998-12-31T23:59:60Z"),
        ("time", "23:59:59Z 01:02:03.5+01:00", "23:59:60Z 24:00:00Z"),
    ],
)
def test_dates_and_times(kind: str, right: str, wrong: str) -> None:
    """Of any calendar, beside another pattern or none."""
    for text in (*right.split(), *wrong.split()):
        for more in ({}, {"pattern": "^[^x]*$"}, {"allOf": [{"minLength": 2}]}):
            allowed = json.dumps({"type": "string", "format": kind} | more), text
            assert _allows(*allowed) == (text in right.split()), allowed


def _allows(schema: str, value: str) -> bool:
    _, tokenizer = bundled()
    content, vocabulary, eos = _setup()
    state = trial.compiled(trial.LLTokenizer(content, n_vocab=vocabulary, eos_token=eos), json_schema(schema))
    tokens = tokenizer.encode(json.dumps(value), add_special_tokens=False).tolist()
    return bool(state.try_consume_tokens(tokens) == len(tokens) and state.is_accepting())


def test_too_many_optional_properties() -> None:
    schema = {"type": "object", "properties": {f"p{each}": {"type": "string"} for each in range(401)}}
    with pytest.raises(InvalidInput, match="401 properties at #"):
        json_schema(schema)
    json_schema(schema | {"required": ["p0"]})


@pytest.mark.parametrize("name", REFUSED)
def test_refused_when_it_arrives(name: str) -> None:
    form, reason = REFUSED[name]
    core = bundled_core()
    with pytest.raises(InvalidInput, match=reason):
        outputs_of(core, "x", SamplingParams(grammar=form))
    assert not core.has_work()
    assert core.statistics()["grammar"]["refused"] == 1
    assert core.statistics()["refused_requests"] == 1


def test_one_that_cannot_go_on_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = trial.LLParserLimits(max_items_in_row=30, verbose_errors=False)
    monkeypatch.setattr(trial, "limits", lambda: limits)
    core, (_, tokenizer) = bundled_core(), bundled()
    hard = SamplingParams(grammar=lark('start: s "!"\ns: s s | "a"'), max_tokens=60, logit_bias={_id("!"): -100.0})
    many = {"hard": hard, "easy": SamplingParams(grammar=choice(["yes"])), "plain": SamplingParams(max_tokens=20)}
    for name, given in many.items():
        add(core, EngineRequest(request_id=name, prompt=prompt_bytes(tokenizer.encode("So")), params=given))
    ends: dict[str, Any] = {}
    while core.has_work():
        ends |= {output.request_id: output for output in core.step() if output.finish_reason}
    assert ends["hard"].finish_reason == "error" and "the grammar cannot go on" in ends["hard"].error
    assert ends["hard"].status == 400
    assert {ends["easy"].finish_reason, ends["plain"].finish_reason} <= {"stop", "length"}
    core.audit()


def test_a_client_leaves_while_it_is_compiled() -> None:
    core, (_, tokenizer) = bundled_core(), bundled()
    request = EngineRequest(
        request_id="r", prompt=prompt_bytes(tokenizer.encode("So")), params=SamplingParams(grammar=json_object())
    )
    later = core.add(request)
    assert later is not None
    core.abort("r")
    assert later.poll(True) and not core.has_work()


def test_a_compiled_grammar_wakes_its_engine() -> None:
    core, awake = bundled_core(), threading.Event()
    core.wake = awake.set
    request = EngineRequest(request_id="r", prompt=prompt_bytes([1]), params=SamplingParams(grammar=json_object()))
    later = core.add(request)
    assert later is not None and awake.wait(60)
    assert later.poll(True)
    core.close()


def test_grammars_that_are_being_compiled_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "MOST_KEPT", 1)
    goes_on = threading.Event()

    def content() -> None:
        goes_on.wait(60)

    made = compiler.Compiler(content, 100, [0])
    try:
        first, second = made.compile(regex("a")), made.compile(regex("b"))
        assert made.compile(regex("a")) is first and made.compile(regex("b")) is second
        goes_on.set()
        wait([first, second])
        made.compile(regex("c"))
        assert made.counters().kept == 1
    finally:
        goes_on.set()
        made.close()


def test_kept_grammars_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "MOST_KEPT", 3)
    core = bundled_core()
    for turn in (0, 1, 2, 3, 3, 0):
        form = json_schema({"const": turn})
        found = outputs_of(core, "x", SamplingParams(grammar=form, max_tokens=8), f"r{turn}")
        _, tokenizer = bundled()
        assert json.loads(tokenizer.decode([token for each in found for token in each.token_ids])) == turn
    counted = core.statistics()["grammar"]
    assert (counted["kept"], counted["compiled"], counted["cache_hits"]) == (3, 5, 1)
